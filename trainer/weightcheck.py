"""Refuses a folder of weights that is not whole, from names, sizes and headers alone."""

from __future__ import annotations

from pathlib import Path

from llmtop.presets.errors import UsageError
from llmtop.presets.spec import RunSpec
from llmtop.presets.tensorfile import BrokenWeights
from llmtop.presets.weightfiles import bin_files, check_bin, safetensors_files, stored_tensors
from llmtop.profiler.hardware.machine import torch_version
from llmtop.trainer.toolchain import release

_SAFE_TORCH = (2, 10)
"""The first in which `weights_only` reads weights alone."""


def check_weights(spec: RunSpec) -> None:
    """Raise UsageError for the first thing that is wrong with the run's weights; reads no tensor."""
    if spec.weights_dir is None:
        return
    folder = Path(spec.weights_dir)
    # A configuration can name its file itself, and then transformers looks for no other.
    if named := spec.hf_config.get("transformers_weights"):
        if not str(named).endswith((".safetensors", ".safetensors.index.json")):
            _require_safe_torch(folder)
        return
    try:
        files = safetensors_files(folder)
        if files:
            stored_tensors(files)
            return
        files = bin_files(folder)
        for file in files:
            check_bin(file)
    except BrokenWeights as error:
        raise UsageError(
            f"a weights file in {folder} is broken or cut short",
            why=str(error),
            fix="copy or download the folder again, and compare the files' sizes with the original's",
        ) from error
    except OSError as error:
        raise UsageError(
            f"cannot load the weights in {folder}",
            why=str(error),
            fix="complete the folder, or give its config.json itself to start from random weights",
        ) from error
    if not files:
        raise UsageError(
            f"{folder} holds weights under names that are not looked for",
            why="it must be model.safetensors or pytorch_model.bin, or their parts with an index.json",
            fix="complete the folder, or give its config.json itself to start from random weights",
        )
    _require_safe_torch(folder)


def _require_safe_torch(folder: Path) -> None:
    """Raise UsageError: what torch.save wrote is a pickle, and older ones run what it says."""
    version = torch_version()
    known = release(version or "")
    if known is None or known >= _SAFE_TORCH:
        return
    raise UsageError(
        f"the weights in {folder} are pickles, which torch {version} does not read safely",
        why="such a file could run code or overwrite memory (CVE-2025-32434, CVE-2026-24747)",
        fix=f"install torch {'.'.join(map(str, _SAFE_TORCH))} or newer, or save the weights as safetensors",
    )
