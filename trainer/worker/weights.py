"""A model from a folder of weights: every tensor comes from the files, or the run is refused."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.presets.tensorfile import BrokenWeights
from llmtop.presets.weightfiles import packed_weights, safetensors_files, stored_tensors
from llmtop.profiler.record.events import WeightsLoaded, WeightsRead
from llmtop.profiler.units import counted
from llmtop.trainer.worker.quantize import quantization_config
from llmtop.trainer.worker.stream import CannotStream, StreamPlan, plan_stream, stream_weights

Report = Callable[[WeightsRead | WeightsLoaded], object]

_NAMED = 3
"""Tensors that an error names before it only counts them."""
_BROKEN_ZIP = "PytorchStreamReader"
"""What torch says of a cut-off .bin file, in a plain RuntimeError."""
_PICKLED_CODE = "unsupported global"
"""What torch says of a pickled file that names a function, in its UnpicklingError."""
_ZERO3_SHAPE = "size mismatch for"
"""What transformers says of a tensor of another shape at stage 3, in a plain RuntimeError."""


def plan_weights(spec: RunSpec, make_model: Callable[[], Any], dtype: torch.dtype) -> StreamPlan | str:
    """Which tensor of the folder goes where, or in words why transformers' own loader has to be used.

    To be called before transformers knows of ZeRO-3. Raises LlmtopError for a tensor that is missing,
    has another shape, or cannot be read.
    """
    with _problems_told(spec):
        files = safetensors_files(Path(spec.weights_dir or ""))
        stored = stored_tensors(files)
    if spec.options.quantization != "none":
        _refuse_packed(spec, packed_weights(stored))
        return f"they are packed to {spec.options.quantization} as they are read"
    if not files:
        return "the folder holds no safetensors files"
    try:
        with _problems_told(spec):
            plan = plan_stream(make_model, stored, dtype)
    except CannotStream as error:
        _refuse_packed(spec, packed_weights(stored))
        return str(error)
    _refuse_packed(spec, plan.packed)
    _refuse_missing(spec, plan.missing)
    if plan.mismatched:
        raise _other_shapes(spec, plan.mismatched)
    return plan


def model_from_stream(
    spec: RunSpec,
    plan: StreamPlan,
    make_model: Callable[[], Any],
    dtype: torch.dtype,
    device: torch.device,
    report: Report,
) -> Any:
    """The model with the folder's weights, each copied from its file into its place."""
    if plan.unexpected:
        _log(
            f"the files hold {counted(len(plan.unexpected), 'tensor')} that the model does not have: "
            f"{_some(plan.unexpected)}"
        )
    if plan.untied:
        _log(f"not tied, although the configuration ties them, since the values differ: {_some(plan.untied)}")
    began, read = time.perf_counter(), 0

    def progress(done: int, total: int) -> None:
        nonlocal read
        read = done
        report(WeightsRead(read_bytes=done, total_bytes=total))

    with _problems_told(spec):
        model = stream_weights(
            plan,
            make_model,
            in_shards=spec.options.zero == 3,
            dtype=dtype,
            device=device,
            on_progress=progress,
        )
    report(WeightsLoaded(way="streamed", read_bytes=read, seconds=time.perf_counter() - began))
    return model


def model_from_weights(
    spec: RunSpec, config: Any, dtype: torch.dtype, device: torch.device, reason: str, report: Report
) -> Any:
    """The model by transformers' own loader. Raises LlmtopError when a tensor is missing or does not fit."""
    from transformers import AutoModelForCausalLM

    whole = spec.options.zero == 3 and spec.options.quantization == "none"
    held = "; a rank may hold all of them in host memory meanwhile" if whole else ""
    _log(f"loaded by transformers, not streamed, because {reason}{held}")
    began = time.perf_counter()
    placed = {"device_map": {"": device}} if spec.options.quantization != "none" else {}
    with _problems_told(spec):
        model, info = AutoModelForCausalLM.from_pretrained(
            spec.weights_dir,
            config=config,
            dtype=dtype,
            attn_implementation=spec.options.attention,
            quantization_config=quantization_config(spec, dtype),
            local_files_only=True,
            trust_remote_code=False,
            # Told below, by name; transformers itself would raise a RuntimeError.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **placed,
        )
    _refuse_gaps(spec, info)
    report(WeightsLoaded(way="transformers", reason=reason, seconds=time.perf_counter() - began))
    return model


@contextmanager
def _problems_told(spec: RunSpec) -> Iterator[None]:
    """What a folder can have wrong, in words."""
    from safetensors import SafetensorError

    try:
        yield
    except (BrokenWeights, SafetensorError, EOFError, pickle.UnpicklingError, json.JSONDecodeError) as error:
        if _PICKLED_CODE in str(error).lower():
            raise LlmtopError(
                f"a weights file in {spec.weights_dir} holds more than tensors, and it is not loaded",
                why="a pickled file can run any program as it is read",
                fix="give a folder with safetensors files",
            ) from error
        raise _broken(spec, str(error)) from error
    except RuntimeError as error:
        shapes = [line.strip() for line in str(error).splitlines() if _ZERO3_SHAPE in line]
        if shapes:
            raise _other_shapes(spec, shapes) from error
        if _BROKEN_ZIP not in str(error):
            raise
        raise _broken(spec, str(error).splitlines()[0]) from error
    except OSError as error:
        raise LlmtopError(
            f"cannot load the weights in {spec.weights_dir}",
            why=str(error),
            fix="the folder must hold the model's safetensors files",
        ) from error


def _refuse_gaps(spec: RunSpec, info: dict[str, Any]) -> None:
    """Random numbers take the place of what the files lack, and a loss does not tell where they are.

    Tied tensors are not missing, and tensors that the model does not have are a line in the log.
    """
    _refuse_missing(spec, sorted(info["missing_keys"]))
    ill = sorted(
        f"{name} {tuple(found)}, not {tuple(wanted)}" for name, found, wanted in info["mismatched_keys"]
    )
    if ill:
        raise _other_shapes(spec, ill)


def _refuse_packed(spec: RunSpec, packed: Sequence[str]) -> None:
    if packed:
        raise LlmtopError(
            f"the weights in {spec.weights_dir} are packed: {_some(packed)}",
            why="8-bit and whole numbers mean nothing without the scales beside them",
            fix="give the folder with the model's 16-bit weights; --quantization packs them itself",
        )


def _refuse_missing(spec: RunSpec, missing: Sequence[str]) -> None:
    if missing:
        raise LlmtopError(
            f"the weights in {spec.weights_dir} lack {counted(len(missing), 'tensor')}: {_some(missing)}",
            why="the model would train from partly random weights",
            fix="complete the folder (a download or a save that was cut short lacks files), or give its "
            "config.json itself to start from random weights",
        )


def _other_shapes(spec: RunSpec, tensors: Sequence[str]) -> LlmtopError:
    return LlmtopError(
        f"the weights in {spec.weights_dir} have other shapes than their config.json says: {_some(tensors)}",
        fix="give a folder whose config.json and weights were saved together",
    )


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _broken(spec: RunSpec, why: str) -> LlmtopError:
    return LlmtopError(
        f"a weights file in {spec.weights_dir} is broken or cut short",
        why=why or "the file ends too early",
        fix="copy or download the folder again, and compare the files' sizes with the original's",
    )


def _log(line: str) -> None:
    """A line in the rank's log."""
    sys.stderr.write(f"weights: {line}\n")
