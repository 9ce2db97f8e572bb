"""Refuses, before anything is started, a run that this machine or environment cannot carry out."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import UsageError, nearest
from llmtop.presets.paths import expand_user
from llmtop.presets.spec import RunSpec
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.units import counted
from llmtop.trainer.records import check_first_record, is_json_lines

_STACK = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors")
_BUILTIN_DATA = ("builtin:english",)
_DATASETS_MARKERS = ("dataset_info.json", "state.json", "dataset_dict.json")


class Need(Struct, frozen=True, kw_only=True):
    """A module that some option needs."""

    module: str
    because: str
    fix: str


def preflight(spec: RunSpec) -> None:
    """Raise UsageError for the first thing that is missing. Imports nothing of what it looks for."""
    _one_machine(spec)
    _modules(spec)
    _devices(spec)
    _data(spec)
    _folders(spec)


def _one_machine(spec: RunSpec) -> None:
    if spec.options.nodes > 1:
        raise UsageError(
            f"nodes = {spec.options.nodes} can be planned, not launched",
            why="this version starts ranks on one machine",
            fix="--nodes 1",
        )


def needs(spec: RunSpec) -> list[Need]:
    """Every module that the run imports beyond llmtop itself."""
    options = spec.options
    stack = _install("train")
    found = [Need(module=name, because="training runs on it", fix=stack) for name in _STACK]
    if options.quantization != "none":
        found.append(_kernel("bitsandbytes", f"quantization = {options.quantization}"))
    if "8bit" in options.optimizer or "paged" in options.optimizer:
        found.append(_kernel("bitsandbytes", f"optimizer = {options.optimizer}"))
    if options.lora_rank:
        found.append(_kernel("peft", f"lora_rank = {options.lora_rank}"))
    if options.liger:
        found.append(_kernel("liger_kernel", "liger = true"))
    if options.attention.startswith("flash_attention"):
        module = "flash_attn_interface" if options.attention.endswith("3") else "flash_attn"
        found.append(
            Need(
                module=module,
                because=f"attention = {options.attention}",
                fix="after torch: pip install --no-build-isolation flash-attn; or --attention sdpa",
            )
        )
    if _is_saved_dataset(Path(expand_user(options.data))):
        found.append(
            Need(module="datasets", because=f"data = {options.data}, a saved dataset", fix=_install("data"))
        )
    return found


def _modules(spec: RunSpec) -> None:
    missing = [need for need in needs(spec) if importlib.util.find_spec(need.module) is None]
    if missing:
        need = missing[0]
        others = [m.module for m in missing[1:] if m.fix == need.fix]
        names = " and ".join(filter(None, [", ".join([need.module, *others[:-1]]), *others[-1:]]))
        raise UsageError(
            f"{names} {'are' if others else 'is'} not installed in this environment",
            why=need.because if not others else "training runs on them",
            fix=need.fix,
        )


def _kernel(module: str, because: str) -> Need:
    return Need(module=module, because=f"{because} needs it", fix=_install("kernels"))


def _install(extra: str) -> str:
    held = "-c constraints-cpu.txt " if extra == "train" and not _driver() else ""
    return f"in the clone of llmtop: pip install {held}-e '.[{extra}]'"


def _driver() -> bool:
    """Whether an NVIDIA driver answers, so that a CUDA build of torch has a use."""
    reader = NvmlReader()
    try:
        return bool(reader.visible_indices())
    finally:
        reader.close()


def _devices(spec: RunSpec) -> None:
    if spec.on_cpu:
        return
    reader = NvmlReader()
    try:
        visible, problem = len(reader.visible_indices()), reader.problem
    finally:
        reader.close()
    if visible < spec.options.gpus:
        raise UsageError(
            f"the run wants {counted(spec.options.gpus, 'GPU')}, and this machine shows {visible}",
            why=problem or "CUDA_VISIBLE_DEVICES and the driver decide which",
            fix=f"--gpus {visible}" if visible else "--gpu cpu, or mend what llmtop doctor names",
        )


def _data(spec: RunSpec) -> None:
    source = spec.options.data
    if source.startswith("builtin:"):
        if source not in _BUILTIN_DATA:
            guess = nearest(source, _BUILTIN_DATA)
            raise UsageError(
                f"there is no data {source}", fix=f"use {guess or _BUILTIN_DATA[0]}, a file or a folder"
            )
        return
    path = Path(expand_user(source))
    _readable(path, "data")
    if path.is_dir() and not any(_files(path)):
        raise UsageError(f"data folder {path} holds no file", fix="give a folder with text or JSONL files")
    if path.is_dir() and _is_saved_dataset(path):
        return
    first = min(_files(path)) if path.is_dir() else path
    if is_json_lines(first):
        check_first_record(first, spec.options.text_field)


def _folders(spec: RunSpec) -> None:
    options = spec.options
    if options.tokenizer not in ("auto", "bytes"):
        _readable(Path(expand_user(options.tokenizer)), "tokenizer")
    if spec.weights_dir is not None:
        _readable(Path(spec.weights_dir), "model")
    if "nvme" in (options.offload_optimizer, options.offload_param) and options.nvme_path:
        _writable(Path(expand_user(options.nvme_path)))


def _readable(path: Path, option: str) -> None:
    if not path.exists():
        siblings = [entry.name for entry in _entries(path.parent)]
        guess = nearest(path.name, siblings)
        raise UsageError(
            f"{option} {path} does not exist",
            fix=f"did you mean {path.parent / guess}?" if guess else "give an existing file or folder",
        )
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise UsageError(f"{option} {path} is not readable", fix=f"change its permissions: chmod u+r {path}")


def _writable(path: Path) -> None:
    """The folder itself, or the nearest one above it that exists and in which it would be made."""
    existing = next((p for p in (path, *path.parents) if p.exists()), path)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(
            f"nvme_path {path} cannot be written",
            why=f"{existing} is no folder that this user may write in",
            fix="give a folder on an NVMe drive that is yours",
        )


def _is_saved_dataset(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _DATASETS_MARKERS)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
