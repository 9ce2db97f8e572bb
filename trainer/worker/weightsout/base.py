"""The weights under adapters, from the folder that the run had them from, with the values that it had."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from safetensors import safe_open

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import Quantization, RunSpec
from llmtop.presets.weightfiles import StoredTensor, safetensors_files, stored_tensors
from llmtop.profiler.units import format_bytes
from llmtop.trainer.room import memory_left_bytes
from llmtop.trainer.statefile import StateIndex
from llmtop.trainer.weightsjob import Base
from llmtop.trainer.worker.build import DTYPES, model_config
from llmtop.trainer.worker.quantize import packed_and_unpacked, packed_modules, packed_start
from llmtop.trainer.worker.state.names import SAMPLE_ELEMENTS, SAMPLED_FROM_ELEMENTS
from llmtop.trainer.worker.stream import CannotStream, plan_stream
from llmtop.trainer.worker.weightsout.statetensors import Tensor, Tensors, model_name

_UNCERTAIN = (
    "whether {folder} is the base that the adapters were trained on could not be told: samples of it differ"
    " from those of the run, as they do for another base, or for one that another device packed"
)


class FoundBase(Struct, frozen=True, kw_only=True, eq=False):
    tensors: Tensors
    """By the model's names."""
    tied: set[str]
    """Names of the model that are tied to another."""
    doubt: str = ""
    """In words why it may be another base."""


def folder_base(spec: RunSpec, skeleton: Any, index: StateIndex, kind: Base) -> FoundBase:
    """The base, read as it is asked for.

    Raises LlmtopError when the folder lacks a tensor, or is not the one that the adapters were trained on.
    """
    dtype = DTYPES[spec.options.precision]
    base, tied = _streamed(spec, skeleton, dtype)
    packed = packed_modules(skeleton) if spec.options.quantization != "none" else {}
    doubt = _check_same(spec, index, base, packed)
    if kind == "original":
        return FoundBase(tensors=base, tied=tied, doubt=doubt)
    for name, module in packed.items():
        weight = f"{name}.weight"
        transposed = type(module) is not torch.nn.Linear
        read = partial(_read_packed, base[weight], spec.options.quantization, dtype, transposed)
        base[weight] = Tensor(shape=base[weight].shape, read=read)
    return FoundBase(tensors=base, tied=tied, doubt=doubt)


def _streamed(spec: RunSpec, skeleton: Any, dtype: torch.dtype) -> tuple[Tensors, set[str]]:
    folder = Path(spec.weights_dir or "")
    stored = stored_tensors(safetensors_files(folder))
    if not stored:
        return _whole(spec, dtype)
    try:
        plan = plan_stream(lambda: _like(skeleton, spec, dtype), stored, dtype)
    except CannotStream:
        return _whole(spec, dtype)
    lacking = (*plan.missing, *plan.mismatched, *plan.packed)
    if lacking:
        raise LlmtopError(
            f"the base in {folder} is not the model of the run",
            why=f"{lacking[0]} is missing, or of another shape or type",
            fix="bring back the folder that the run was started with",
        )
    base = {
        one.name: Tensor(shape=one.tensor.shape, read=partial(_read_stored, one.tensor, dtype))
        for one in plan.placed
    }
    return base, set(plan.tied)


def _like(skeleton: Any, spec: RunSpec, dtype: torch.dtype) -> Any:
    return type(skeleton)._from_config(model_config(spec), dtype=dtype)


def _read_stored(stored: StoredTensor, dtype: torch.dtype, wanted: torch.dtype) -> torch.Tensor:
    """By way of the type that the run had it in."""
    with safe_open(stored.file, framework="pt") as opened:
        values: torch.Tensor = opened.get_tensor(stored.key)
    return values.to(dtype).to(wanted)


def _whole(spec: RunSpec, dtype: torch.dtype) -> tuple[Tensors, set[str]]:
    """Where transformers changes tensors as it loads them: all of them at once, in host memory."""
    from transformers import AutoModelForCausalLM

    folder = Path(spec.weights_dir or "")
    size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    left = memory_left_bytes()
    if left < size:
        raise LlmtopError(
            "there is too little host memory for the base",
            why="Transformers changes this family's tensors as it loads them, all at once: it takes"
            f" {format_bytes(size)}, and {format_bytes(left)} is available",
            fix="end what else takes memory, or do it on another machine",
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    held = model.state_dict()
    tied = set(model.all_tied_weights_keys)

    def given(values: torch.Tensor) -> Tensor:
        return Tensor(
            shape=tuple(values.shape),
            read=values.to,
            dtype=None if values.is_floating_point() else values.dtype,
        )

    return {name: given(values) for name, values in held.items() if name not in tied}, tied


def _read_packed(
    tensor: Tensor, kind: Quantization, dtype: torch.dtype, transposed: bool, wanted: torch.dtype
) -> torch.Tensor:
    values = tensor.read(dtype)
    unpacked = packed_and_unpacked(values.T.contiguous() if transposed else values, kind, dtype)
    return (unpacked.T.contiguous() if transposed else unpacked).to(wanted)


def _check_same(spec: RunSpec, index: StateIndex, base: Tensors, packed: dict[str, Any]) -> str:
    """By the samples that `state.names.frozen_check` took of what the run had; in words what is doubtful."""
    if not index.frozen_check:
        return ""
    dtype, kind = DTYPES[spec.options.precision], spec.options.quantization
    total, forms = 0, set()
    for one in index.parameters:
        if one.trainable or one.elements < SAMPLED_FROM_ELEMENTS:
            continue
        name = model_name(one.name)
        if name not in base:
            raise LlmtopError(
                f"the base in {spec.weights_dir} has no {name}",
                fix="bring back the folder that the run was started with",
            )
        values = base[name].read(dtype)
        module = packed.get(name.removesuffix(".weight"))
        kept_as = str(dtype).removeprefix("torch.")
        if module is not None:
            values = values if type(module) is torch.nn.Linear else values.T
            values = packed_start(values, kind, dtype)
            kept_as = kind
        sample = values.reshape(-1)[:SAMPLE_ELEMENTS].contiguous().view(torch.uint8).numpy().tobytes()
        total = zlib.crc32(one.name.encode() + sample, total)
        forms.add(kept_as)
    form = " and ".join(sorted(forms))
    if f"{form}:{total:08x}" == index.frozen_check:
        return ""
    if (packed and not spec.on_cpu) or form != index.frozen_check.partition(":")[0]:
        # Other kernels packed the run's: a number on the border of two codes may have gone the other way.
        return _UNCERTAIN.format(folder=spec.weights_dir)
    raise LlmtopError(
        f"the base in {spec.weights_dir} is not the one that the adapters were trained on",
        why="samples of its weights differ from those that the checkpoint tells of",
        fix="bring back the folder that the run was started with; --adapters writes the adapters alone",
    )
