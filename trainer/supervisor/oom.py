"""Evidence that the kernel killed a process because host memory ran out."""

from __future__ import annotations

from pathlib import Path

from llmtop.profiler.hardware.cgroup import oom_kills
from llmtop.profiler.record.deviceevents import HostSample

_NEARLY_FULL = 0.95


class OomWatch:
    """Counts the kernel's kills since it was made."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._own = oom_kills(proc=proc)
        self._machine = _machine_kills(proc)

    def evidence(self, host: HostSample | None) -> str | None:
        """Why a SIGKILL was the kernel's out-of-memory killer, in words; None where nothing says so."""
        if _rose(self._own, oom_kills(proc=self._proc)):
            return "the kernel counts an out-of-memory kill in this run's memory cgroup"
        if _rose(self._machine, _machine_kills(self._proc)):
            return "the kernel counts an out-of-memory kill on this machine"
        return _nearly_full(host)


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
