"""Memory and processor time of a process and everything below it, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
COMPILERS = frozenset({"ninja", "cc1plus", "cc1", "nvcc", "cicc", "ptxas", "cudafe++", "hipcc"})
"""Programs that build an op, by the names that the kernel keeps: none has to do with training."""
_TOOLCHAIN = COMPILERS | {"c++", "g++", "gcc", "cc", "clang", "clang++", "collect2", "ld", "as"}
"""With those that call them and what they call, beside and below them in the tree."""


class TreeMemory(Struct, frozen=True, kw_only=True):
    """Sums over a process tree."""

    pids: tuple[int, ...]
    rss_bytes: int
    """Resident sets added up: pages that processes of the tree share are counted in each."""
    pss_bytes: int | None = None
    """Shared pages divided among those who share them; None where it was not asked for or not readable."""
    cpu_seconds: float | None = None
    """Processor time of the processes that live now."""
    compiler_rss_bytes: int = 0
    """Of the resident sets, those of compilers below the root, and of all that they started."""
    compiler_pss_bytes: int = 0
    """The same of the shares; 0 where they are not known."""


class Running(NamedTuple):
    """One process of a walk over all of them."""

    parent: int
    name: str
    """Of its program, as the kernel keeps it: 15 characters at most."""
    started: int
    """In clock ticks since the machine was started: with the pid it names a process for good."""
    cpu_seconds: float


def process_tree_memory(pid: int, *, with_pss: bool = True, proc: Path = Path("/proc")) -> TreeMemory | None:
    """The tree that starts at `pid`; None when that process is gone."""
    return tree_memory(descendants([pid], proc=proc)[pid], with_pss=with_pss, proc=proc)


def all_running(*, proc: Path = Path("/proc")) -> dict[int, Running]:
    """Every process of the machine that can be seen, by its pid. A zombie counts as gone."""
    found: dict[int, Running] = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            name, fields = _named_stat(entry)
            if fields is not None:
                seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
                found[int(entry.name)] = Running(int(fields[1]), name, int(fields[19]), seconds)
    return found


def thread_waits(pids: Iterable[int], *, proc: Path = Path("/proc")) -> dict[tuple[int, int], float]:
    """How many seconds each thread of processes was ready to run without a processor, by the numbers of both.

    Without those that have ended meanwhile; empty where the kernel keeps no such count.
    """
    found: dict[tuple[int, int], float] = {}
    for pid in pids:
        try:
            threads = list((proc / str(pid) / "task").iterdir())
        except OSError:
            continue
        for thread in threads:
            try:
                nanoseconds = (thread / "schedstat").read_text(encoding="ascii").split()[1]
            except (OSError, IndexError):
                continue
            found[pid, int(thread.name)] = int(nanoseconds) / 1e9
    return found


def descendants(
    roots: Iterable[int], *, proc: Path = Path("/proc"), running: dict[int, Running] | None = None
) -> dict[int, tuple[int, ...]]:
    """Each root with everything below it, by one walk over all processes, or that of before (`running`). A
    zombie counts as gone."""
    children: dict[int, list[int]] = {}
    for pid, one in (all_running(proc=proc) if running is None else running).items():
        children.setdefault(one.parent, []).append(pid)
    found: dict[int, tuple[int, ...]] = {}
    for root in roots:
        tree = [root]
        for pid in tree:
            tree += children.get(pid, [])
        found[root] = tuple(tree)
    return found


def ignores(pid: int, number: int, *, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a signal ignored, so that it will never act on it; False for one that is gone."""
    try:
        lines = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigIgn:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def tree_memory(
    pids: tuple[int, ...], *, with_pss: bool = True, proc: Path = Path("/proc")
) -> TreeMemory | None:
    """Sums over known processes, each after its parent and the root first; None when the root is gone."""
    alive: list[int] = []
    resident, compiling, seconds = 0, 0, 0.0
    shares: dict[int, int | None] = {}
    compilers: set[int] = set()
    for pid in pids:
        folder = proc / str(pid)
        pages, (name, fields) = _resident_pages(folder), _named_stat(folder)
        if pages is None or fields is None:
            if pid == pids[0]:
                return None
            continue
        alive.append(pid)
        resident += pages * _PAGE_BYTES
        if pid != pids[0] and (name in _TOOLCHAIN or int(fields[1]) in compilers):
            compilers.add(pid)
            compiling += pages * _PAGE_BYTES
        seconds += (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
        if with_pss:
            shares[pid] = _pss(folder)
    known = {pid: share for pid, share in shares.items() if share is not None}
    all_known = bool(shares) and len(known) == len(shares)
    return TreeMemory(
        pids=tuple(alive),
        rss_bytes=resident,
        pss_bytes=sum(known.values()) if all_known else None,
        cpu_seconds=seconds,
        compiler_rss_bytes=compiling,
        compiler_pss_bytes=sum(known[pid] for pid in compilers) if all_known else 0,
    )


def _stat(folder: Path) -> list[str] | None:
    """Fields of /proc/PID/stat after the command name: state, parent, ...; None for a dead process."""
    return _named_stat(folder)[1]


def _named_stat(folder: Path) -> tuple[str, list[str] | None]:
    """With the command name before them."""
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    # The command name is in brackets and may itself hold spaces and brackets.
    before, _, after = text.rpartition(")")
    fields = after.split()
    dead = len(fields) < 20 or fields[0] in ("Z", "X")
    return before.partition("(")[2], None if dead else fields


def _resident_pages(folder: Path) -> int | None:
    try:
        return int((folder / "statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return None


def _pss(folder: Path) -> int | None:
    try:
        lines = (folder / "smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)
