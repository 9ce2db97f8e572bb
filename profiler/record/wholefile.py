"""Files that a reader sees whole or not at all, also after a crash."""

from __future__ import annotations

import os
from pathlib import Path

PRIVATE_MODE = 0o600
SHARED_MODE = 0o666
"""What is made to be handed on: the umask decides, as for any file."""


def write_atomic(path: Path, content: bytes, *, lasting: bool = True, mode: int = PRIVATE_MODE) -> None:
    """Write a file so that a reader sees the old content or all of the new, and a crash loses neither.

    A file that need not last through a crash is there sooner. The umask is taken off `mode`.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.{random_hex(3)}.new")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if lasting:
        sync_folder(path.parent)


def document(value: object) -> bytes:
    """What a file holds that a person may open: JSON of one value, indented."""
    # Whoever writes no document need not have it.
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def random_hex(size: int) -> str:
    """So many random bytes. `secrets`, which does the same, takes milliseconds to import."""
    return os.urandom(size).hex()


def sync_file(path: Path) -> None:
    """Make what another library wrote last through a power cut."""
    _sync(path, 0)


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
