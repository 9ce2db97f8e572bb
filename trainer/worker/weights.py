"""A model from a folder of weights: every tensor comes from the files, or the run is refused."""

from __future__ import annotations

import json
import pickle
from typing import Any

import torch

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.units import counted
from llmtop.trainer.worker.quantize import quantization_config

_NAMED = 3
"""Tensors that an error names before it only counts them."""
_BROKEN_ZIP = "PytorchStreamReader"
"""What torch says of a cut-off .bin file, in a plain RuntimeError."""
_ZERO3_SHAPE = "size mismatch for"
"""What transformers says of a tensor of another shape at stage 3, in a plain RuntimeError."""


def model_from_weights(spec: RunSpec, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with the folder's weights. Raises LlmtopError when one is missing or does not fit."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    placed = {"device_map": {"": device}} if spec.options.quantization != "none" else {}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            spec.weights_dir,
            config=config,
            dtype=dtype,
            attn_implementation=spec.options.attention,
            quantization_config=quantization_config(spec, dtype),
            local_files_only=True,
            # Told below, by name; transformers itself would raise a RuntimeError.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **placed,
        )
    except (SafetensorError, EOFError, pickle.UnpicklingError, json.JSONDecodeError) as error:
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
    _refuse_gaps(spec, info)
    return model


def _refuse_gaps(spec: RunSpec, info: dict[str, Any]) -> None:
    """Random numbers take the place of what the files lack, and a loss does not tell where they are.

    Tied tensors are not missing, and tensors that the model does not have are a line in the log.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise LlmtopError(
            f"the weights in {spec.weights_dir} lack {counted(len(missing), 'tensor')}: {_some(missing)}",
            why="the model would train from partly random weights",
            fix="complete the folder (a download or a save that was cut short lacks files), or give its "
            "config.json itself to start from random weights",
        )
    ill = sorted(
        f"{name} {tuple(found)}, not {tuple(wanted)}" for name, found, wanted in info["mismatched_keys"]
    )
    if ill:
        raise _other_shapes(spec, ill)


def _other_shapes(spec: RunSpec, tensors: list[str]) -> LlmtopError:
    return LlmtopError(
        f"the weights in {spec.weights_dir} have other shapes than their config.json says: {_some(tensors)}",
        fix="give a folder whose config.json and weights were saved together",
    )


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _broken(spec: RunSpec, why: str) -> LlmtopError:
    return LlmtopError(
        f"a weights file in {spec.weights_dir} is broken or cut short",
        why=why or "the file ends too early",
        fix="copy or download the folder again, and compare the files' sizes with the original's",
    )
