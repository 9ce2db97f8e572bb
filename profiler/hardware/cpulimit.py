"""The processor time that the kernel lets a group of processes have: cgroup version 1 and 2."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from llmtop.profiler.hardware.cgroup import groups_of

_USED_UP, _PERIODS = "nr_throttled", "nr_periods"
"""Of `cpu.stat`, in both versions: periods in which the limit was used up before the end, and all."""


class CpuLimit(Struct, frozen=True, kw_only=True):
    cores: float | None = None
    """The tightest limit of the process's group and all above it; None where there is none."""
    throttled_percent: float | None = None
    """Of the periods since the reading before, those in which the group had used it up and stood still."""


class CpuLimitReader:
    """The group is looked up once: a process seldom changes it, and the limit is read each time."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._folders = tuple(groups_of(proc / "self", "cpu"))
        self._counted: tuple[Path, int, int] | None = None

    def read(self) -> CpuLimit:
        limits = [(cores, folder) for folder, _ in self._folders if (cores := _cores(folder)) is not None]
        if not limits:
            return CpuLimit()
        cores, folder = min(limits)
        return CpuLimit(cores=cores, throttled_percent=self._throttled(folder))

    def _throttled(self, folder: Path) -> float | None:
        counts = _counts(folder / "cpu.stat")
        before = self._counted
        self._counted = (folder, *counts) if counts is not None else None
        if counts is None or before is None or before[0] != folder or counts[1] <= before[2]:
            return None
        return 100.0 * max(0, counts[0] - before[1]) / (counts[1] - before[2])


def _cores(folder: Path) -> float | None:
    """`cpu.max` of version 2 holds quota and period, version 1 has a file for each; no limit: `max`, -1."""
    words = _words(folder / "cpu.max") or [
        *_words(folder / "cpu.cfs_quota_us"),
        *_words(folder / "cpu.cfs_period_us"),
    ]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


def _counts(path: Path) -> tuple[int, int] | None:
    words = _words(path)
    found = dict(zip(words[::2], words[1::2], strict=False))
    try:
        return int(found[_USED_UP]), int(found[_PERIODS])
    except (KeyError, ValueError):
        return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
