"""Reads files that anybody may have made: regular ones of bounded size, as JSON of a known form.

Whatever is wrong with one is an `OSError` or a `msgspec.DecodeError` that says it in words, so that a reader
who expects these two can be stopped by no file: not by a pipe that nobody writes to, a device without end, a
folder, a link to itself, a name that no file can have, text in another encoding or brackets without end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

DOCUMENT_BYTES = 64 << 20
"""No document of a run comes near this."""
_SUPERUSER = 0
_T = TypeVar("_T")


def read_bytes(path: Path, most_bytes: int = DOCUMENT_BYTES, *, own: bool = False) -> bytes:
    """The content of a regular file. Raises OSError, also for one that is no regular file or is larger.

    `own`: only of one that is the caller's own or the superuser's, and no link to it; for files that decide
    what a process of the caller does.
    """
    descriptor = open_regular(path, most_bytes, own=own)
    try:
        return _all_of(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def open_regular(path: Path, most_bytes: int | None = None, *, own: bool = False) -> int:
    """A descriptor of a regular file, to be read and closed by the caller. Raises OSError as `read_bytes`."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        # Asked before it is opened: to open some devices does something.
        _check(os.stat(path, follow_symlinks=not own), most_bytes, own=own)  # noqa: PTH116
        descriptor = os.open(path, flags | (os.O_NOFOLLOW if own else 0))
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file can have such a name") from error
    try:
        _check(os.fstat(descriptor), most_bytes, own=own)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def decode_json(content: bytes | memoryview | msgspec.Raw, kind: type[_T]) -> _T:
    """The value of a JSON text. Raises msgspec.DecodeError."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason} at byte {error.start:,}") from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error


def read_json(path: Path, kind: type[_T], most_bytes: int = DOCUMENT_BYTES, *, own: bool = False) -> _T:
    """The value of a JSON file. Raises OSError and msgspec.DecodeError; `own` as of `read_bytes`."""
    return decode_json(read_bytes(path, most_bytes, own=own), kind)


def why_unreadable(error: OSError | msgspec.MsgspecError | ValueError) -> str:
    """What stands in the way of a file, in words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _check(status: os.stat_result, most_bytes: int | None, *, own: bool) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if own and status.st_uid not in (os.geteuid(), _SUPERUSER):
        raise PermissionError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})")
    if most_bytes is not None and status.st_size > most_bytes:
        raise _too_large(most_bytes)


def _too_large(most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20:,} MiB")


def _all_of(descriptor: int, most_bytes: int) -> bytes:
    """A file of the kernel's has no size, and another may grow meanwhile."""
    parts: list[bytes] = []
    left = most_bytes + 1
    while left and (part := os.read(descriptor, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    if not left:
        raise _too_large(most_bytes)
    return parts[0] if len(parts) == 1 else b"".join(parts)
