"""Whether the kernel killed a rank because host memory ran out: what proves it, what only speaks for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec import Struct

from llmtop.profiler.hardware.cgroup import oom_kills
from llmtop.profiler.hardware.kernellog import KernelLog
from llmtop.profiler.record.deviceevents import HostSample

_NEARLY_FULL = 0.95


class Evidence(Struct, frozen=True, kw_only=True):
    kind: Literal["proof", "likely", "possible"]
    """`likely`: memory was full, and nothing says who sent the signal. `possible`: the kernel has killed some
    process of this machine, which may have been another one."""
    words: str


class OomWatch:
    """Counts the kernel's kills since it was made."""

    def __init__(self, proc: Path = Path("/proc"), log: KernelLog | None = None) -> None:
        self._proc = proc
        self._log = log if log is not None else KernelLog(proc=proc)
        self._own = oom_kills(proc=proc)
        self._machine = _machine_kills(proc)

    def evidence(self, host: HostSample | None, pids: Iterable[int] = ()) -> Evidence | None:
        """What says that a SIGKILL of one of these processes was for memory; None where nothing does."""
        killed = self._log.killed()
        for pid in pids:
            if pid in killed:
                return Evidence(kind="proof", words=f"its log names {killed[pid]}")
        own = oom_kills(proc=self._proc)
        if _rose(self._own, own):
            words = "it counts an out-of-memory kill in this run's memory cgroup"
            return Evidence(kind="proof", words=words)
        full = _nearly_full(host)
        if full is not None:
            return Evidence(kind="likely", words=full)
        # Where the kernel counts for this cgroup and has counted none, the machine's kill was another's.
        if own is None and _rose(self._machine, _machine_kills(self._proc)):
            words = (
                "the kernel has killed a process of this machine for memory, which may have been another one"
            )
            return Evidence(kind="possible", words=words)
        return None


def _rose(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None and now > before


def _machine_kills(proc: Path) -> int | None:
    try:
        lines = (proc / "vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _nearly_full(host: HostSample | None) -> str | None:
    """The newest sample is a second old at most; memory that was full then is what killed."""
    if host is None:
        return None
    total, available = host.memory_total_bytes, host.memory_available_bytes
    if total and available is not None and available < (1 - _NEARLY_FULL) * total:
        return f"{100 * (1 - available / total):.0f} % of host memory was in use"
    limit, used = host.cgroup_limit_bytes, host.cgroup_used_bytes
    if limit and used is not None and used > _NEARLY_FULL * limit:
        return f"{100 * used / limit:.0f} % of the memory limit of this run's cgroup was in use"
    return None
