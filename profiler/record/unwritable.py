"""What to do about a file that cannot be written, by what the system says is wrong with its place."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

from llmtop.presets.errors import LlmtopError, UsageError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM})


def unwritable(path: Path, error: OSError, elsewhere: str) -> LlmtopError:
    """The error for `path`; `elsewhere` says how another place is named, as the end of a sentence."""
    why, fix = _told(path.absolute().parent, error)
    return LlmtopError(f"{path} cannot be written", why=why, fix=f"{fix}, or {elsewhere}")


def require_folder(path: Path) -> None:
    """Raise UsageError where the folder that `path` shall lie in is missing: a slip would make another."""
    folder = path.absolute().parent
    if not os.path.lexists(folder):
        raise UsageError(f"the folder {path.parent} is not there", fix=_make(path.parent))


def _make(folder: Path) -> str:
    return f"make it: mkdir -p {shlex.quote(str(folder))}"


def _told(folder: Path, error: OSError) -> tuple[str, str]:
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        return reason, "free some space there"
    if error.errno == errno.ENOENT:
        return f"there is no folder {folder}", _make(folder)
    if error.errno == errno.ENOTDIR:
        return f"{folder} is not a folder, or lies below a file", "move that file away"
    if error.errno in _NOT_ALLOWED:
        return f"{folder} is not writable for you ({reason})", "make it writable"
    if error.errno == errno.EROFS:
        return f"{folder} is on a file system that is only read ({reason})", "mount it for writing"
    return reason, "look at that place"
