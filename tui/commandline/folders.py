"""Failures of the file system that are a person's to mend wherever they come up, in words."""

from __future__ import annotations

import errno
from pathlib import Path

from llmtop.presets.errors import LlmtopError, UsageError

_SHOWN = 60
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)


def in_words(error: OSError) -> LlmtopError | None:
    """A path that can lead nowhere, as it was typed or stands in a variable; a current folder that is gone,
    which only what needs it comes upon. None for every other: whoever met it says what it means there."""
    if error.errno in _NO_PATH and error.filename is not None:
        name = str(error.filename)
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}... ({len(name):,} characters)"
        return UsageError(f"{shown} leads nowhere", why=error.strerror or str(error), fix="give another path")
    if isinstance(error, FileNotFoundError) and not _has_current_folder():
        return UsageError(
            "the current folder is gone",
            why="it was removed while this terminal stood in it",
            fix="go to another folder: cd ~",
        )
    return None


def _has_current_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True
