"""Whom the kernel killed for memory, by its own log (`/dev/kmsg`), where this user may read it."""

from __future__ import annotations

import os
import re
from pathlib import Path

_KILLED = re.compile(r"Killed process (\d+) \((.*?)\)(.*)")
"""`mm/oom_kill.c:__oom_kill_process`, after a kill for the machine's memory or a cgroup's."""
_RESIDENT = re.compile(r"anon-rss:(\d+)kB")
_FIRST_NAMESPACE = "pid:[4026531836]"
"""`include/linux/proc_ns.h:PROC_PID_INIT_INO`: elsewhere the log's numbers of processes are not ours."""
_RECORD_BYTES = 8192


class KernelLog:
    """What comes after it was made. Without the right to read, or inside a container, it stays empty."""

    def __init__(self, path: Path = Path("/dev/kmsg"), *, proc: Path = Path("/proc")) -> None:
        self._descriptor: int | None = None
        self._killed: dict[int, str] = {}
        if _namespace(proc) != _FIRST_NAMESPACE:
            return
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:
            self.close()

    def killed(self) -> dict[int, str]:
        """Process to what the log says of its end, in words."""
        for line in self._new_lines():
            match = _KILLED.search(line)
            if match is not None:
                resident = _RESIDENT.search(match.group(3))
                held = f", {int(resident.group(1)) / (1 << 20):.1f} GiB resident" if resident else ""
                self._killed[int(match.group(1))] = f"process {match.group(1)} ({match.group(2)}){held}"
        return self._killed

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _new_lines(self) -> list[str]:
        lines: list[str] = []
        while self._descriptor is not None:
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # older records were overwritten meanwhile; the next read goes on behind them
            except OSError:
                break  # nothing more for now
            if not record:
                break
            lines += record.decode("utf-8", "replace").splitlines()
        return lines


def _namespace(proc: Path) -> str | None:
    try:
        return str((proc / "self" / "ns" / "pid").readlink())
    except OSError:
        return None
