"""Tells a process from a later one that was given its pid."""

import os
import time
from pathlib import Path

from msgspec import Struct


class ProcessIdentity(Struct, frozen=True, kw_only=True):
    """One process for good: the kernel may give its pid to another one later, but not its start time."""

    pid: int
    started_ticks: int
    """Clock ticks after boot, as /proc/PID/stat tells."""
    boot_id: str = ""

    @property
    def alive(self) -> bool:
        """Whether it is still there, and not another one with its pid."""
        return process_identity(self.pid) == self

    @property
    def began(self) -> float:
        """Wall clock, by the kernel's ticks since the machine was started."""
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot + self.started_ticks / os.sysconf("SC_CLK_TCK")


def process_identity(pid: int) -> ProcessIdentity | None:
    """Who has this pid now; None when nobody does, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    # The command name is in brackets and may itself hold spaces and brackets.
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return None
    return ProcessIdentity(pid=pid, started_ticks=int(fields[19]), boot_id=boot_id)
