"""A folder's file system, room and speed, for those who mean to keep training state in it."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "afs",
        "9p", "ncpfs", "orangefs", "pvfs2", "wekafs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse",
        "fuse.rclone", "fuse.glusterfs", "fuse.ceph", "fuse.mount-s3", "fuse.juicefs", "fuse.blobfuse2",
    }
)  # fmt: skip
_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK_BYTES = 4 << 20
_THREADS = 4
"""Blocks in flight: one alone does not show what a drive can do."""
TRIAL_BYTES = 256 << 20
TRIAL_SECONDS = 2.0
"""For writing, and again for reading."""


class FileSystem(Struct, frozen=True, kw_only=True):
    kind: str
    """As the kernel names it: ext4, xfs, nfs4, ..."""
    mount: str


class DiskSpeed(Struct, frozen=True, kw_only=True):
    """None where a trial could not be made."""

    write_bytes_per_second: float | None
    read_bytes_per_second: float | None
    direct: bool
    """Past the page cache."""


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))


def file_system(folder: Path, *, mounts: Path = _MOUNTS) -> FileSystem | None:
    """What a folder lies on, or would if it were made; None where the kernel does not tell."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    place = existing(folder).resolve()
    found: FileSystem | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        mount = Path(_unescaped(fields[4]))
        # Of several on one point the last one is seen.
        if place.is_relative_to(mount) and (found is None or len(str(mount)) >= len(found.mount)):
            found = FileSystem(kind=after.split()[0], mount=str(mount))
    return found


def free_bytes(folder: Path) -> int | None:
    """What this user may still write there."""
    try:
        room = os.statvfs(existing(folder))
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def measure(
    folder: Path,
    *,
    size_bytes: int = TRIAL_BYTES,
    seconds: float = TRIAL_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> DiskSpeed:
    """Write and read a file of at most `size_bytes`, each for at most `seconds`; the file is gone afterwards.

    Raises OSError where the folder cannot be written.
    """
    blocks = max(_THREADS, size_bytes // _BLOCK_BYTES)
    lanes = [range(lane, blocks, _THREADS) for lane in range(_THREADS)]
    with _trial_file(folder) as (descriptor, direct):
        written, write_seconds = _pass(
            lambda block, number: os.pwritev(descriptor, [block], number * _BLOCK_BYTES),
            lanes,
            seconds,
            clock,
            finish=lambda: os.fsync(descriptor),
        )
        # Without direct access what was written would come back from memory.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        lanes = [lane[: done // _BLOCK_BYTES] for lane, done in zip(lanes, written, strict=True)]
        read, read_seconds = _pass(
            lambda block, number: os.preadv(descriptor, [block], number * _BLOCK_BYTES),
            lanes,
            seconds,
            clock,
        )
    return DiskSpeed(
        write_bytes_per_second=_rate(sum(written), write_seconds),
        read_bytes_per_second=_rate(sum(read), read_seconds),
        direct=direct,
    )


def _pass(
    move: Callable[[mmap.mmap, int], int],
    lanes: Sequence[range],
    seconds: float,
    clock: Callable[[], float],
    finish: Callable[[], None] = lambda: None,
) -> tuple[list[int], float]:
    """Bytes that each lane moved, block after block through a buffer of its own, and the time of all."""
    buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in lanes]
    for buffer in buffers:
        # Zeros would be compressed away by some file systems.
        buffer.write(os.urandom(_BLOCK_BYTES))
    began = clock()

    def run(lane: int) -> int:
        moved = 0
        for number in lanes[lane]:
            moved += move(buffers[lane], number)
            if clock() - began >= seconds:
                break
        return moved

    with ThreadPoolExecutor(len(lanes)) as pool:
        moved = list(pool.map(run, range(len(lanes))))
    finish()
    return moved, clock() - began


@contextmanager
def _trial_file(folder: Path) -> Iterator[tuple[int, bool]]:
    """A file without a name, open past the page cache where the file system can do that."""
    descriptor, name = tempfile.mkstemp(prefix=".llmtop-trial-", dir=existing(folder))
    direct = False
    try:
        try:
            through = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            os.close(descriptor)
            descriptor, direct = through, True
        Path(name).unlink()
        yield descriptor, direct
    finally:
        os.close(descriptor)
        Path(name).unlink(missing_ok=True)


def _rate(moved: int, seconds: float) -> float | None:
    return moved / seconds if moved and seconds > 0 else None


def _unescaped(path: str) -> str:
    """Mount points have spaces as octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path
