"""Keeps a folder for one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtop.presets.errors import LlmtopError


@contextmanager
def hold(folder: Path, taken: Callable[[], LlmtopError]) -> Iterator[None]:
    """Hold a folder for as long as this lasts, and not beyond this process; `taken()` where another does.

    Raises OSError for a folder that is not there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken() from None
        yield
    finally:
        os.close(descriptor)
