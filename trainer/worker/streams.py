"""A rank's output, which a full disk must not turn into the end of its training."""

from __future__ import annotations

import errno
import io
import sys

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


class ForgivingFile(io.FileIO):
    """Output for which there is no room is left out; every other error is raised as ever."""

    def write(self, content: object) -> int:
        try:
            return super().write(content)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return memoryview(content).nbytes  # type: ignore[arg-type]


def forgive_full_disk() -> None:
    """From now on what Python prints here is lost where the disk is full, instead of raised."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            continue
        stream.flush()
        raw = ForgivingFile(descriptor, "w", closefd=False)
        # With a buffer that can be flushed at any time, as the interpreter's own has.
        buffered = io.BufferedWriter(raw)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                buffered,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=True,
                write_through=True,
            ),
        )
