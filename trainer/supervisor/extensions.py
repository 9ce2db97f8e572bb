"""The folder in which torch builds ops for the ranks: private to one environment, free of stale locks."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from llmtop.presets.paths import cache_dir
from llmtop.profiler.hardware.processes import COMPILERS, descendants

VARIABLE = "TORCH_EXTENSIONS_DIR"
_PACKAGES = ("torch", "deepspeed")


def extensions_dir(environment: Mapping[str, str]) -> Path:
    """Where this environment's ops lie: what the user chose, else a folder of its own in the cache.

    Torch names its own folder after the Python version alone, so two environments with two torch
    releases would load, or rebuild, each other's ops.
    """
    chosen = environment.get(VARIABLE)
    if chosen:
        return Path(chosen)
    identity = "\n".join([sys.prefix, sys.version, platform.machine(), *map(_version, _PACKAGES)])
    return cache_dir(environment) / "torch_extensions" / hashlib.sha256(identity.encode()).hexdigest()[:16]


def op_library(folder: Path, op: str) -> Path:
    """Where torch puts a built op in such a folder."""
    return folder / op / f"{op}.so"


def stale_locks(folder: Path, *, proc: Path = Path("/proc")) -> list[Path]:
    """The locks that no living build holds: a living one has its lock file open.

    A build killed in the middle leaves its lock, and the next one waits for it in silence, for ever.
    """
    locks = sorted(folder.glob("**/lock"))
    if not locks:
        return []
    held = _open_files(proc)
    return [lock for lock in locks if lock.resolve() not in held]


def remove_stale_locks(folder: Path, *, proc: Path = Path("/proc")) -> list[Path]:
    """Delete the locks that no living build holds; the locks deleted."""
    stale = stale_locks(folder, proc=proc)
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


def compiling(pids: Iterable[int], *, proc: Path = Path("/proc")) -> str | None:
    """What is being compiled below these processes: the op's name, or the compiler's; None for nothing."""
    builders: list[str] = []
    for tree in descendants(pids, proc=proc).values():
        for pid in tree[1:]:
            name = _command_name(proc / str(pid))
            if name == "ninja":
                # Ninja works inside the folder of the op that it builds.
                return _folder_name(proc / str(pid)) or name
            if name in COMPILERS:
                builders.append(name)
    return builders[0] if builders else None


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} none"


def _open_files(proc: Path) -> set[Path]:
    """Every file that a process of this user has open."""
    held: set[Path] = set()
    for process in proc.iterdir():
        if process.name.isdecimal():
            held.update(filter(None, map(_target, _entries(process / "fd"))))
    return held


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # another user's process, or one that has just ended


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:
        return None


def _command_name(process: Path) -> str | None:
    try:
        return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _folder_name(process: Path) -> str | None:
    folder = _target(process / "cwd")
    return folder.name if folder else None
