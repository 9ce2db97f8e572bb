"""Small file systems of a test to fill, to forbid, to freeze. Where none can be mounted, tests skip."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20


class Disk:
    """A mounted file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self) -> None:
        """Leave not a byte."""
        with (self.path / "ballast").open("ab", buffering=0) as file:
            for size in (MIB, 4096, 1):
                try:
                    while True:
                        file.write(b"\0" * size)
                except OSError:
                    continue

    def make_room(self) -> None:
        (self.path / "ballast").unlink()

    def forbid(self) -> None:
        """Readers only, as a file system becomes whose drive fails. Nothing may be open for writing."""
        _call("mount", "-o", "remount,ro", str(self.path))

    def allow(self) -> None:
        _call("mount", "-o", "remount,rw", str(self.path))

    def freeze(self) -> None:
        """Every write waits."""
        _call("fsfreeze", "-f", str(self.path))

    def thaw(self) -> None:
        _call("fsfreeze", "-u", str(self.path))


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def memory_disk(path: Path, size_bytes: int) -> Iterator[Disk]:
    """A tmpfs."""
    path.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))
    try:
        yield Disk(path)
    finally:
        _call("umount", "-l", str(path))


@contextmanager
def ext4_disk(path: Path, size_bytes: int) -> Iterator[Disk]:
    """An ext4 in a file, which can be frozen."""
    image = path.with_name(f"{path.name}.img")
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    try:
        _call("mkfs.ext4", "-q", str(image))
    except (OSError, FileNotFoundError) as error:
        pytest.skip(f"no ext4 can be made here: {error}")
    _mount("-o", "loop", str(image), str(path))
    try:
        yield Disk(path)
    finally:
        _call("umount", "-l", str(path))


def _mount(*words: str) -> None:
    try:
        _call("mount", *words)
    except (OSError, FileNotFoundError) as error:
        pytest.skip(f"nothing can be mounted here: {error}")
