"""What a supervisor says in its own log, `supervisor.log`."""

from __future__ import annotations

import sys
import time
from contextlib import suppress


def log_line(line: str) -> None:
    """A full disk must not end what the line tells of: it is then left out."""
    with suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        sys.stderr.flush()
