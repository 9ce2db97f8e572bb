"""Refuses, before anything is started, a run that this machine or environment cannot carry out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from msgspec import Struct

from llmtop.presets.errors import UsageError, nearest
from llmtop.presets.inputs import TOKENIZER_FILES, holds_tokenizer
from llmtop.presets.paths import expand_user, nearest_sibling
from llmtop.presets.rules_deepspeed import raw
from llmtop.presets.spec import RunSpec
from llmtop.presets.truth import is_true
from llmtop.presets.version import install_words
from llmtop.profiler.hardware.disk import (
    MEMORY_FILE_SYSTEMS,
    NETWORK_FILE_SYSTEMS,
    file_system,
    free_bytes,
)
from llmtop.profiler.hardware.libaio import libaio
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.memory import flatlimit
from llmtop.profiler.units import counted, format_bytes
from llmtop.trainer.dsconfig import deepspeed_config, nvme_folders
from llmtop.trainer.folders import why_not_writable
from llmtop.trainer.ops import ops_of
from llmtop.trainer.records import (
    check_enough,
    check_first_record,
    check_regular,
    check_text_start,
    files_under,
    is_json_lines,
)
from llmtop.trainer.toolchain import (
    TRITON_CACHE,
    build_problem,
    compiler_problem,
    mended,
    torch_cuda,
    triton_cache,
)
from llmtop.trainer.weightcheck import check_weights

_STACK = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors")
_BUILTIN_DATA = ("builtin:english",)
_DATASETS_MARKERS = ("dataset_info.json", "state.json", "dataset_dict.json")

_FLASH = {
    "flash_attention_2": (
        "flash_attn",
        "flash-attn",
        "after torch: pip install --no-build-isolation flash-attn; or --attention sdpa",
    ),
    "flash_attention_3": (
        "flash_attn_interface",
        "flash-attn-3",
        "after torch: build it from the folder hopper of FlashAttention's sources; or --attention sdpa",
    ),
    "flash_attention_4": (
        "flash_attn",
        "flash-attn-4",
        "after torch: pip install --pre flash-attn-4; or --attention sdpa",
    ),
}
"""Module, distribution and installation, as transformers tells the versions apart
(`utils/import_utils.py`: 2 and 4 share the module's name)."""


_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""DeepSpeed's block to the module that it imports (deepspeed 0.19.8 `monitor/`)."""


class Need(Struct, frozen=True, kw_only=True):
    """A module that some option needs."""

    module: str
    because: str
    fix: str
    distribution: str = ""
    """Where several packages bring a module of this name, the one that it must be of."""

    @property
    def name(self) -> str:
        return self.distribution or self.module

    @property
    def missing(self) -> bool:
        """Finds the module without importing it."""
        if importlib.util.find_spec(self.module) is None:
            return True
        return bool(self.distribution) and not _has_distribution(self.distribution)


def preflight(spec: RunSpec, *, nvme_bytes: int = 0) -> None:
    """Raise UsageError for the first thing that is missing. Imports nothing of what it looks for.

    A run over hosts is looked at by each of them (`preflight_here`): this one may not be among them.
    `nvme_bytes` is what the run will keep in its NVMe folder.
    """
    flatlimit.check(spec)
    if spec.options.nodes == 1:
        preflight_here(spec, nvme_bytes=nvme_bytes)


def preflight_here(spec: RunSpec, *, nvme_bytes: int = 0, ranks: int | None = None) -> None:
    """Raise UsageError for the first thing that this machine lacks for its `ranks`; by default, a node's."""
    flatlimit.check(spec)
    _modules(spec)
    _devices(spec, spec.options.gpus if ranks is None else ranks)
    _data(spec)
    _folders(spec, nvme_bytes)
    _build(spec)


def needs(spec: RunSpec) -> list[Need]:
    """Every module that the run imports beyond llmtop itself."""
    options = spec.options
    stack = _install("train")
    found = [Need(module=name, because="training runs on it", fix=stack) for name in _STACK]
    if options.quantization != "none":
        found.append(_kernel("bitsandbytes", f"quantization = {options.quantization}"))
    if "8bit" in options.optimizer or "paged" in options.optimizer:
        found.append(_kernel("bitsandbytes", f"optimizer = {options.optimizer}"))
    if options.qat != "none":
        because = f"qat = {options.qat} needs it"
        found.append(Need(module="torchao", because=because, fix=_install("qat")))
    if options.lora_rank:
        found.append(_kernel("peft", f"lora_rank = {options.lora_rank}"))
    if options.liger:
        found.append(_kernel("liger_kernel", "liger = true"))
    if options.attention in _FLASH:
        module, distribution, fix = _FLASH[options.attention]
        because = f"attention = {options.attention}"
        found.append(Need(module=module, distribution=distribution, because=because, fix=fix))
    for block, module in _MONITORS.items():
        if is_true(raw(spec, f"{block}.enabled")):
            because, fix = f"deepspeed.{block} is on", f"pip install {module}, or leave deepspeed.{block} out"
            found.append(Need(module=module, because=because, fix=fix))
    if _is_saved_dataset(Path(expand_user(options.data))):
        found.append(
            Need(module="datasets", because=f"data = {options.data}, a saved dataset", fix=_install("data"))
        )
    return found


def _modules(spec: RunSpec) -> None:
    missing = [need for need in needs(spec) if need.missing]
    if missing:
        need = missing[0]
        # Two options may need the same one.
        _, *others = dict.fromkeys(m.name for m in missing if m.fix == need.fix)
        names = " and ".join(filter(None, [", ".join([need.name, *others[:-1]]), *others[-1:]]))
        raise UsageError(
            f"{names} {'are' if others else 'is'} not installed in this environment",
            why=need.because if not others else "training runs on them",
            fix=need.fix,
        )


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _kernel(module: str, because: str) -> Need:
    return Need(module=module, because=f"{because} needs it", fix=_install("kernels"))


def _install(extra: str) -> str:
    held = "-c constraints-cpu.txt " if extra == "train" and not _driver() else ""
    return install_words(extra, held)


def _driver() -> bool:
    """Whether a CUDA build of torch has a use; also where the driver hangs, and nobody knows yet."""
    reader = NvmlReader()
    try:
        return reader.is_silent or bool(reader.visible_indices())
    finally:
        reader.close()


def _devices(spec: RunSpec, wanted: int) -> None:
    if spec.on_cpu:
        return
    reader = NvmlReader()
    try:
        visible, problem = len(reader.visible_indices()), reader.problem
    finally:
        reader.close()
    if visible < wanted:
        raise UsageError(
            f"the run wants {counted(wanted, 'GPU')}, and this machine shows {visible}",
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
    check_regular(path)
    if path.is_dir() and not any(files_under(path)):
        raise UsageError(
            f"data folder {path} holds no files",
            why="hidden ones are left out",
            fix="give a folder with text or JSONL files",
        )
    if path.is_dir() and _is_saved_dataset(path):
        return
    files = sorted(files_under(path)) if path.is_dir() else [path]
    check_enough(path, files, spec.world_size, spec.options.seq_len)
    first = next(file for file in files if file.stat().st_size)
    if is_json_lines(first):
        check_first_record(first, spec.options.text_field)
    else:
        check_text_start(first)


def _folders(spec: RunSpec, nvme_bytes: int) -> None:
    options = spec.options
    if options.tokenizer not in ("auto", "bytes"):
        _tokenizer(Path(expand_user(options.tokenizer)))
    if spec.weights_dir is not None:
        _readable(Path(spec.weights_dir), "model")
        check_weights(spec)
    if "nvme" in (options.offload_optimizer, options.offload_param):
        _nvme(spec, nvme_bytes)


def _tokenizer(folder: Path) -> None:
    _readable(folder, "tokenizer")
    if not holds_tokenizer(folder):
        raise UsageError(
            f"tokenizer {folder} holds no tokenizer",
            why=f"none of {', '.join(TOKENIZER_FILES)} is a file in it",
            fix="give a folder that holds one, or --tokenizer auto or bytes",
        )


def _nvme(spec: RunSpec, needed_bytes: int) -> None:
    folders = nvme_folders(deepspeed_config(spec))
    for folder in folders:
        path = Path(expand_user(folder))
        _writable(path)
        # How much of it goes to which of two is not known.
        _drive(path, needed_bytes if len(folders) == 1 else 0)
    if libaio() is None:
        raise UsageError(
            "offload to NVMe needs libaio with its header, and this machine has not both",
            why="DeepSpeed compiles its file access against it",
            fix="Debian: apt install libaio-dev; or offload to cpu",
        )


def _build(spec: RunSpec) -> None:
    """What the run's ops are compiled with, in the environment that the ranks will get."""
    version = None if spec.on_cpu else torch_cuda()
    environment = mended(os.environ, version)
    problem = build_problem(ops_of(deepspeed_config(spec)), environment, version)
    if problem is None and spec.options.liger and not spec.on_cpu:
        problem = compiler_problem("liger = true needs one", environment)
        reason = why_not_writable(triton_cache(environment))
        if problem is None and reason:
            problem = UsageError(
                f"Triton's cache {triton_cache(environment)} cannot be written",
                why=f"liger = true needs it: {reason}",
                fix=f"set {TRITON_CACHE} to a folder that is yours, or leave it out",
            )
    if problem is not None:
        raise problem


def _readable(path: Path, option: str) -> None:
    if not path.exists():
        guess = nearest_sibling(path)
        raise UsageError(
            f"{option} {path} does not exist",
            fix=f"did you mean {guess}?" if guess else "give an existing file or folder",
        )
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise UsageError(f"{option} {path} is not readable", fix=f"change its permissions: chmod u+r {path}")


def _writable(path: Path) -> None:
    reason = why_not_writable(path)
    if reason:
        raise UsageError(
            f"nvme_path {path} cannot be written",
            why=reason,
            fix="give a folder on an NVMe drive that is yours",
        )


def _drive(path: Path, needed_bytes: int) -> None:
    """A local drive with room enough."""
    system = file_system(path)
    fix = "give a folder on a local NVMe drive (lsblk and df -T name them)"
    if system is not None and system.kind in MEMORY_FILE_SYSTEMS:
        raise UsageError(
            f"nvme_path {path} lies in memory ({system.kind} on {system.mount})",
            why="what is moved there takes the memory that the offload is to spare",
            fix=fix + "; or offload to cpu, which is what this would be",
        )
    if system is not None and system.kind in NETWORK_FILE_SYSTEMS:
        raise UsageError(
            f"nvme_path {path} lies on a network file system ({system.kind} on {system.mount})",
            why="each step reads and writes all of the offloaded state",
            fix=fix,
        )
    room = free_bytes(path)
    if room is not None and room < needed_bytes:
        raise UsageError(
            f"nvme_path {path} has {format_bytes(room)} free",
            why=f"the run keeps {format_bytes(needed_bytes)} on {system.mount if system else 'it'}",
            fix="make room, give another drive, or offload less",
        )


def _is_saved_dataset(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _DATASETS_MARKERS)
