"""From a job to a folder: which tensors there are, what they become, and the files beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.presets.tensorfile import BrokenWeights
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import sync_folder
from llmtop.trainer.statefile import StateIndex, read_index
from llmtop.trainer.weightsjob import Answer, Finished, WeightsJob, Writing
from llmtop.trainer.worker.build import DTYPES
from llmtop.trainer.worker.weightsout import lora
from llmtop.trainer.worker.weightsout.base import folder_base
from llmtop.trainer.worker.weightsout.files import copy_tokenizer, write_config
from llmtop.trainer.worker.weightsout.model import (
    check_whole,
    form_of_files,
    is_tied,
    make_skeleton,
    named_once,
)
from llmtop.trainer.worker.weightsout.packed import TorchaoPacking
from llmtop.trainer.worker.weightsout.statetensors import StateTensors, Tensors, model_name
from llmtop.trainer.worker.weightsout.writing import ADAPTERS, SINGLE, Written, write_weights

_UNPACKED = (
    "merged into the values that the {kind} base stood for, which the adapters were trained on"
    " (--base original: into the folder's own, before they were packed)"
)
_ORIGINAL = (
    "merged into the folder's own weights; the adapters were trained on those values after {kind} had rounded"
    " them, so the model is not exactly the one that was trained"
)
_WITH_TORCHAO = (
    "{kind}: Transformers loads it where torchao is installed; in its files a weight of 4 bits takes a byte"
)
_UNROUNDED = "trained to be rounded ({kind}), and not rounded here: --quantized does that"
_RANDOM_BASE = (
    "the base of these adapters is random numbers, kept in the run's checkpoints alone: --merge writes both"
)


def do_job(job: WeightsJob, answer: Callable[[Answer], object]) -> Finished:
    """Raises LlmtopError for a state or base that cannot be used, OSError for files that cannot be made."""
    run = RunDir.open(Path(job.run))
    spec, index = run.spec(), read_index(Path(job.state))
    skeleton = make_skeleton(spec)
    state = StateTensors(Path(job.state), index)

    def progress(done: int, total: int) -> None:
        answer(Writing(written_bytes=done, total_bytes=total))

    try:
        if job.content == "adapters":
            written, notes = _adapters(job, spec, skeleton, state, progress)
        else:
            written, notes = _model(job, spec, skeleton, state, progress)
    except BrokenWeights as error:
        raise LlmtopError(f"the weights in {spec.weights_dir} are broken", why=str(error)) from error
    finally:
        state.close()
    target = Path(job.target)
    notes += [note] if (note := copy_tokenizer(target, run, spec)) else []
    sync_folder(target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return Finished(
        tensors=written.tensors, parameters=written.parameters, size_bytes=size, notes=tuple(notes)
    )


Said = Callable[[int, int], None]


def _adapters(
    job: WeightsJob, spec: RunSpec, skeleton: Any, state: StateTensors, progress: Said
) -> tuple[Written, list[str]]:
    by_name = _by_name(state)
    lora.adapters_of(by_name)
    written = write_weights(
        Path(job.target),
        lora.for_peft(by_name),
        DTYPES[job.dtype],
        shard_bytes=1 << 62,  # PEFT reads one file
        revert=None,
        on_progress=progress,
        single=ADAPTERS,
    )
    lora.write_adapter_config(Path(job.target), skeleton, spec)
    return written, [] if state.index.left_out else [_RANDOM_BASE]


def _model(
    job: WeightsJob, spec: RunSpec, skeleton: Any, state: StateTensors, progress: Said
) -> tuple[Written, list[str]]:
    tensors, aliases = _of_state(state, skeleton)
    notes = []
    if job.content == "merged":
        adapters = lora.adapters_of(_by_name(state))
        if state.index.left_out:
            base = folder_base(spec, skeleton, state.index, job.base)
            tensors, aliases = {**base.tensors, **tensors}, base.tied
            notes += [base.doubt] if base.doubt else []
        tensors = lora.merge(tensors, adapters, skeleton, lora.scale_of(spec))
        if spec.options.quantization != "none":
            words = _UNPACKED if job.base == "trained" else _ORIGINAL
            notes.append(words.format(kind=spec.options.quantization))
    check_whole(skeleton, tensors, aliases)
    packing = TorchaoPacking(skeleton, spec) if job.content == "quantized" else None
    written = write_weights(
        Path(job.target),
        tensors,
        DTYPES[job.dtype],
        shard_bytes=job.shard_bytes,
        revert=form_of_files(skeleton),
        on_progress=progress,
        single=SINGLE,
        packing=packing,
    )
    if packing is not None:
        skeleton.config.quantization_config = packing.quantization_config()
        notes.append(_WITH_TORCHAO.format(kind=spec.options.qat))
    elif spec.options.qat != "none":
        notes.append(_UNROUNDED.format(kind=spec.options.qat))
    tied = is_tied(skeleton, aliases)
    write_config(Path(job.target), skeleton, spec, job.dtype, tied=tied)
    notes += [note] if (note := _narrow(state.index, job.dtype)) else []
    return written, notes


def _by_name(state: StateTensors) -> Tensors:
    return {state.index.parameters[number].name: one for number, one in state.parameters().items()}


def _of_state(state: StateTensors, skeleton: Any) -> tuple[Tensors, set[str]]:
    """What the state has of the model itself, and the names that are other names of it."""
    found = state.parameters()
    names = {
        number: (one.name, *one.aliases)
        for number, one in enumerate(state.index.parameters)
        if number in found and not lora.is_adapter(one.name)
    }
    tensors = named_once(skeleton, {given: found[number] for number, given in names.items()})
    aliases = {model_name(name) for given in names.values() for name in given} - set(tensors)
    return {**tensors, **{model_name(name): one for name, one in state.buffers().items()}}, aliases


def _narrow(index: StateIndex, dtype: str) -> str:
    """What fp32 does not have that was asked for."""
    kept = {
        kind
        for file in index.files
        for slab in file.slabs
        for ending, kind in slab.tensors.items()
        if ending == "master"
    }
    narrow = sorted(kept - {"F32", "F64"})
    if dtype != "fp32" or not narrow:
        return ""
    return f"the optimizer kept its weights in {', '.join(narrow)}: fp32 has no more digits than that"
