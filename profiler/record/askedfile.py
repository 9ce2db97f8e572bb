"""A file in which the supervisor asks something of running ranks, as a rank looks at it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import read_json

_Request = TypeVar("_Request", bound=Struct)


class AskedFile(Generic[_Request]):
    """A rank's view of such a file. Looking at it costs a system call while nothing changes."""

    def __init__(self, path: Path, kind: type[_Request]) -> None:
        self._path = path
        self._name = str(path)
        self._kind: type[_Request] = kind
        self._seen: tuple[int, int] | None = None
        self._newest: _Request | None = None

    def newest(self) -> _Request | None:
        # Between two steps of a training: to raise an error for a file that nobody has yet written, as is
        # most often so, takes longer than the call, and `Path.stat` half as long again as `os.stat`.
        if self._seen is None and not os.access(self._name, os.F_OK):
            return None
        try:
            status = os.stat(self._name)  # noqa: PTH116
            if (status.st_mtime_ns, status.st_ino) != self._seen:
                self._newest = read_json(self._path, self._kind, own=True)
                self._seen = (status.st_mtime_ns, status.st_ino)
        except (OSError, msgspec.MsgspecError):
            # Not there, not readable now, or not the supervisor's: a training does not end for it.
            return self._newest
        return self._newest
