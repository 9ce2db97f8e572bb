"""Takes the weights of a run out of a saved state, as a folder that Transformers or PEFT can load.

The work is done by a process of its own (`trainer.worker.weightsout`), which has torch; here it is said what
is to be done, that it can be done, and the folder gets its name when all of it is there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.presets.errors import JobFailedError, LlmtopError, UsageError
from llmtop.presets.spec import DTYPE_BYTES, Precision, RunSpec
from llmtop.presets.tensorfile import BrokenWeights
from llmtop.presets.weightfiles import safetensors_files, stored_tensors
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import sync_folder
from llmtop.profiler.units import format_bytes
from llmtop.trainer.change.restagefolder import restage_folders
from llmtop.trainer.elsewhere import Task, have_done
from llmtop.trainer.folders import check_place
from llmtop.trainer.partial import held_partial, partial_folder, sync_all
from llmtop.trainer.room import memory_left_bytes, why_no_room
from llmtop.trainer.statefile import Progress, StateIndex, newest_in, read_index, read_progress
from llmtop.trainer.weightcheck import check_weights
from llmtop.trainer.weightsjob import Answer, Base, Content, Finished, WeightsJob, Writing

_TASK = Task(
    module="llmtop.trainer.worker.weightsout",
    worker="the process that wrote the weights",
    failed="the weights could not be taken out",
)
_DECODER: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
SHARD_BYTES = 4 << 30
_LIBRARIES_BYTES = 1 << 30
"""Host memory of a process that has torch and transformers loaded, and its reading buffers."""
_WIDE = 4
"""Bytes of a number in which adapters are added to the base."""
_NARROW = 2
"""The fewest bytes of a number that `--dtype` names."""
_LAYER = re.compile(r"(.*?\.\d+)\.")
"""The block that a tensor belongs to, by its name."""
_LORA = ".lora_"


class Choice(Struct, frozen=True, kw_only=True):
    """What is wanted."""

    content: Content = "full"
    base: Base = "trained"
    dtype: Precision | None = None
    """None: the run's own."""
    checkpoint: str = ""
    """A step, or a `step-N` folder; empty: the newest."""
    shard_bytes: int = SHARD_BYTES


class WeightsOut(Struct, frozen=True, kw_only=True):
    """A folder of weights that was made."""

    path: Path
    run: str
    step: int
    content: Content
    dtype: Precision
    tensors: int
    parameters: int
    size_bytes: int
    notes: tuple[str, ...]
    last_step: int = 0
    """That the run has made, by its record."""
    warning: str = ""
    """Where the run trained on after what is saved of it."""


OnProgress = Callable[[int, int], object]
"""Hears bytes written and bytes to write."""


def take_weights_out(
    run: RunDir, out: Path, choice: Choice | None = None, on_progress: OnProgress = lambda done, total: None
) -> WeightsOut:
    """Make the folder `out` from a saved state of the run; it is there whole or not at all.

    Raises UsageError for what cannot be, LlmtopError for a state or a base that cannot be read or for which
    there is no room, JobFailedError and OutOfMemoryError where the process that does it ended badly.
    """
    choice = choice or Choice()
    spec = _own_spec(run)
    state = find_state(run, choice.checkpoint)
    index = read_index(state)
    _check_content(run, spec, index, choice)
    dtype = choice.dtype or spec.options.precision
    _check_target(out)
    _check_room(out, spec, index, choice.content, dtype)
    job = WeightsJob(
        run=str(run.path.resolve()),
        state=str(state.resolve()),
        target=str(partial_folder(out).absolute()),
        content=choice.content,
        base=choice.base,
        dtype=dtype,
        shard_bytes=choice.shard_bytes,
    )
    made = _make(job, out, on_progress)
    record = read_state(run)
    return WeightsOut(
        path=out,
        run=run.run_id,
        step=index.step,
        content=choice.content,
        dtype=dtype,
        tensors=made.tensors,
        parameters=made.parameters,
        size_bytes=made.size_bytes,
        notes=made.notes,
        last_step=record.steps_finished,
        warning=later_steps_words(record, index.step),
    )


def later_steps_words(state: RunState, step: int) -> str:
    """What a run has trained after `step`, its newest that is saved; empty for nothing."""
    last = state.steps_finished
    newest = state.checkpoints[-1].step if state.checkpoints else step
    if last <= max(newest, step):
        return ""
    if state.status in ENDED:
        return f"the run's last step is {last:,} and was not saved: these are the weights of step {step:,}"
    return f"the run is at step {last:,}: these are the weights of step {step:,}"


def find_state(run: RunDir, checkpoint: str = "") -> Path:
    """The folder of a complete saved state: the newest, or that of a step or path. UsageError without one."""
    folders = (run.checkpoints_dir, *restage_folders(run))
    if not checkpoint:
        found = newest_in(folders)
        if found is None:
            raise UsageError(
                f"run {run.run_id} has no checkpoint to take weights from",
                why=f"none is complete in {run.checkpoints_dir}",
                fix="llmtop stop RUN --save saves one of a run that goes on; --save-at-end and"
                " --checkpoint-every N do so the next time",
            )
        progress, folder = found
        return _folder_of(folder, progress.step)
    places = [_folder_of(folder, int(checkpoint)) for folder in folders] if checkpoint.isdecimal() else []
    places = places or [Path(checkpoint)]
    complete = [place for place in places if read_progress(place) is not None]
    if complete:
        return complete[0]
    steps = sorted({progress.step for folder in folders for progress in _complete_in(folder)})
    raise UsageError(
        f"there is no complete checkpoint {checkpoint}",
        why=f"complete are {', '.join(f'step {step:,}' for step in steps)}" if steps else "there is none",
        fix="name one of those, or leave --from out for the newest" if steps else "llmtop stop RUN --save",
    )


def _folder_of(folder: Path, step: int) -> Path:
    """Of two of one step, one was about to take the other's place: the new one, if it came so far."""
    path, old = folder / f"step-{step}", folder / f"step-{step}.old"
    return old if read_progress(path) is None and read_progress(old) is not None else path


def _complete_in(folder: Path) -> list[Progress]:
    return [found for path in folder.glob("step-*") if (found := read_progress(path)) is not None]


def _own_spec(run: RunDir) -> RunSpec:
    run.require_own("has no weights here")
    spec = run.spec()
    if spec.script is not None:
        raise UsageError(
            f"run {run.run_id} has no weights that llmtop could take out",
            why="it is a command of your own, which keeps its checkpoints itself",
            fix="save from the script: model.save_pretrained(FOLDER), with DeepSpeed"
            " engine.save_16bit_model(FOLDER)",
        )
    return spec


def _check_content(run: RunDir, spec: RunSpec, index: StateIndex, choice: Choice) -> None:
    lora = any(_LORA in one.name for one in index.parameters)
    if choice.content == "quantized" and spec.options.qat == "none":
        raise UsageError(
            f"run {run.run_id} was not trained to be rounded",
            why="--quantized writes the weights of a run with --qat in the bits that it was trained for",
            fix=f"llmtop quantize {run.run_id} rounds any run's weights",
        )
    if not lora and choice.content in _OPTION:
        raise UsageError(
            f"run {run.run_id} trained no adapters",
            why="it trained the weights themselves",
            fix=f"llmtop weights {run.run_id} OUT, without --{_OPTION[choice.content]}",
        )
    if lora and choice.content == "full":
        raise UsageError(
            f"run {run.run_id} trained adapters: say what is wanted of them",
            why="they are small matrices beside a base that was not trained",
            fix="--merge adds them to the base, for a model like any other; --adapters writes them alone, for"
            " PEFT",
        )
    if choice.base == "original" and spec.options.quantization == "none":
        raise UsageError(
            "--base original is for a base that was packed to 8 or 4 bits",
            why="this run's base is in 16 or 32 bits, and there is one only",
            fix="leave it out",
        )
    if choice.content == "merged" and index.left_out:
        _check_base(run, spec)


_OPTION: dict[Content, str] = {"merged": "merge", "adapters": "adapters"}


def _check_base(run: RunDir, spec: RunSpec) -> None:
    """That the weights under the adapters can be had, where they are not part of the state."""
    alone = f"llmtop weights {run.run_id} OUT --adapters writes the adapters alone"
    if spec.weights_dir is None:
        raise UsageError(
            f"the base of run {run.run_id} is kept nowhere",
            why=f"it was random numbers, packed to {spec.options.quantization} as they were drawn",
            fix=alone,
        )
    if not Path(spec.weights_dir).is_dir():
        raise UsageError(
            f"the base of run {run.run_id} is not there",
            why=f"the adapters belong to the weights in {spec.weights_dir}",
            fix=f"bring that folder back; {alone}",
        )
    check_weights(spec)


def _check_target(out: Path) -> None:
    if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise UsageError(
            f"{out} is there already", why="nothing is written over", fix="name another folder, or remove it"
        )
    check_place(out, "name a folder that can be written")


def _check_room(out: Path, spec: RunSpec, index: StateIndex, content: Content, dtype: Precision) -> None:
    """Raise LlmtopError before anything is written, where disk or memory will not do."""
    sizes = _tensor_elements(spec, index, content)
    width = DTYPE_BYTES[dtype]
    why = why_no_room(out, sum(sizes.values()) * width)
    if why is not None:
        raise LlmtopError(
            f"there is no room for the weights in {out.absolute().parent}",
            why=why,
            fix="name a folder on a larger drive" + (", or a narrower --dtype" if width > _NARROW else ""),
        )
    needed = _LIBRARIES_BYTES + _working_bytes(sizes, spec, content, width)
    left = memory_left_bytes()
    if left < needed:
        raise LlmtopError(
            "there is too little host memory to take the weights out",
            why=f"it takes {format_bytes(needed)}, and {format_bytes(left)} is available",
            fix="end what else takes memory, or do it on another machine",
        )


def _tensor_elements(spec: RunSpec, index: StateIndex, content: Content) -> dict[str, int]:
    """Name to elements of what will be written."""
    if content == "merged" and index.left_out:
        try:
            found = stored_tensors(safetensors_files(Path(spec.weights_dir or "")))
        except (BrokenWeights, OSError) as error:
            raise LlmtopError(f"cannot read the weights in {spec.weights_dir}", why=str(error)) from error
        return {key: _product(tensor.shape) for key, tensor in found.items()}
    adapters = content == "adapters"
    return {one.name: one.elements for one in index.parameters if (_LORA in one.name) == adapters}


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _working_bytes(sizes: dict[str, int], spec: RunSpec, content: Content, width: int) -> int:
    """Host memory of what is held at a time: a tensor, or a block's experts on their way to their files."""
    largest = max(sizes.values(), default=0)
    if content == "merged":
        # The base, what is added to it, and what comes of it.
        return largest * (2 * _WIDE + width)
    if content == "quantized":
        # Rounded in the type that it was trained in, by way of some copies.
        return largest * 5 * width
    if spec.model.moe is None:
        return largest * width
    blocks: dict[str, int] = {}
    for name, elements in sizes.items():
        match = _LAYER.match(name)
        block = match.group(1) if match else name
        blocks[block] = blocks.get(block, 0) + elements
    return 2 * width * max(blocks.values(), default=0)


def _make(job: WeightsJob, out: Path, on_progress: OnProgress) -> Finished:
    try:
        with held_partial(out) as partial:
            try:
                made = _have_it_made(job, on_progress)
                sync_all(partial)
                partial.rename(out)
            except BaseException:
                with suppress(OSError):
                    shutil.rmtree(partial)
                raise
        sync_folder(partial.parent)
    except OSError as error:
        raise LlmtopError(
            f"the weights cannot be written to {out}",
            why=f"{error.strerror or error}",
            fix="name a folder that can be written",
        ) from error
    return made


def _have_it_made(job: WeightsJob, on_progress: OnProgress) -> Finished:
    def hear(answer: Answer) -> None:
        if isinstance(answer, Writing):
            on_progress(answer.written_bytes, answer.total_bytes)

    last = have_done(_TASK, job, _DECODER, hear)
    if not isinstance(last, Finished):
        raise JobFailedError(_TASK.failed, why=f"the answer was {last}")
    return last
