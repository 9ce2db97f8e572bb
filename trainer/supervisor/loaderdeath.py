"""The death of a worker of torch's DataLoader, as the rank that waited for it tells it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from llmtop.profiler.units import format_bytes

SHARED = Path("/dev/shm")
"""Workers hand their batches over through files in it."""
DIED = r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal)"
"""torch 2.x `utils/data/dataloader.py` and `csrc/DataLoader.cpp`."""
FIX = (
    "most often host memory or /dev/shm was full: fewer num_workers, a smaller prefetch_factor, more memory,"
    " or a larger /dev/shm (shm-size of a container); dmesg names what the kernel killed"
)
_DIED = re.compile(DIED, re.IGNORECASE)


def dead_workers(message: str) -> Iterator[int]:
    """Their process ids."""
    for found in _DIED.finditer(message):
        yield from (int(pid) for pid in re.findall(r"\d+", found.group(1)))


def shared_memory_words(folder: Path = SHARED) -> str:
    """How much of it is in use; empty where the machine has none."""
    try:
        use = shutil.disk_usage(folder)
    except OSError:
        return ""
    return f"{folder} holds {format_bytes(use.total)}, of which {format_bytes(use.free)} are free now"
