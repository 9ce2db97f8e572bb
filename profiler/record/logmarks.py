"""The line in a rank's log above which an earlier process of it wrote."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_MARK = "--- llmtop: what is above is of an earlier process of this rank; a new one began at "


def mark_new_process(log: Path) -> None:
    """Before a rank is started again that has written; raises OSError where its log cannot be written."""
    try:
        if not log.stat().st_size:
            return
    except FileNotFoundError:
        return
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    # A process that was killed may have left half a line.
    descriptor = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        gap = b"" if end and os.pread(descriptor, 1, end - 1) == b"\n" else b"\n"
        os.write(descriptor, gap + f"{_MARK}{began}\n".encode())
    finally:
        os.close(descriptor)


def of_newest_process(lines: Sequence[str]) -> Sequence[str]:
    """From the newest such line on; all of them where there is none."""
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith(_MARK):
            return lines[at:]
    return lines
