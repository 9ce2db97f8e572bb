"""The near half of two folders kept alike: takes what the far half tells, finds what that is to have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from msgspec import Struct

from llmtop.profiler.record.remote import REMOTE_FILE
from llmtop.profiler.record.wholefile import write_atomic

Message = tuple[dict[str, Any], bytes | None]
Mark = tuple[int, int, int]
"""Which of the files that had a name one after the other: time of change, inode, size."""


class Kept(Struct, frozen=True, kw_only=True):
    """Which files go where, as patterns below the folder."""

    grow: tuple[str, ...] = ()
    """Come from the far half as they grow."""
    last: tuple[str, ...] = ()
    """Come as those, each line after what the others had when it was written."""
    whole: tuple[str, ...] = ()
    """Come from the far half whole whenever they were replaced."""
    sent: tuple[str, ...] = ()
    """Go to the far half whole."""
    appended: tuple[str, ...] = ()
    """Go to the far half as they grow."""
    newest: tuple[tuple[str, int, int | None], ...] = ()
    """Logs of whose newest file the end comes, so many lines of it, and what is added from then on; where
    that is more than so many bytes while there is no connection, not all of it."""


class Twin:
    def __init__(self, root: Path, kept: Kept) -> None:
        """`kept` may be replaced at any time; the far half has to be told then."""
        self._root = root
        self.kept = kept
        self._ends: dict[str, int] = {}
        """Of each log of which only the end is kept, how far that goes in the far one."""
        self._began = False
        self._sent: dict[str, Mark] = {}
        self._appended: dict[str, int] = {}

    # --- from the far half --------------------------------------------------------------------------

    def follow_message(self) -> dict[str, Any]:
        """What the far half is to tell: from the bytes on that are here already."""
        kept = self.kept
        have = {name: path.stat().st_size for name, path in self._files(kept.grow + kept.last)}
        for name, path in self._files(tuple(pattern for pattern, *_ in kept.newest)):
            if name in self._ends:
                have[name] = self._ends[name]
            elif not self._began:
                path.unlink()  # from an earlier time: nobody knows where in the far one it ends
        self._began = True
        return {
            "seen": {name: _written(path) for name, path in self._files(kept.whole)},
            "do": "follow",
            "newest": [list(one) for one in kept.newest],
            "grow": list(kept.grow),
            "last": list(kept.last),
            "whole": list(kept.whole),
            "have": have,
        }

    def take(self, message: dict[str, Any], body: bytes) -> None:
        """Raises OSError, and ValueError for a file that was not asked for or bytes that do not go on."""
        said = message["say"]
        if message["path"] == REMOTE_FILE:
            return  # this side alone says what the folder here follows
        path = self._asked_for(message["path"], said)
        if said == "grew":
            self._append(path, message["at"], body)
        elif said == "added":
            self._add(path, message["path"], message["at"], body)
        elif said == "cut":
            os.truncate(path, 0)
        elif said == "whole":
            write_atomic(path, body, lasting=False)
            # By this it is known again, so that it does not come whenever a connection begins.
            os.utime(path, ns=(message["mtime_ns"], message["mtime_ns"]))
        elif said == "gone":
            path.unlink(missing_ok=True)
            self._ends.pop(message["path"], None)

    def _add(self, path: Path, name: str, at: int, body: bytes) -> None:
        """To a log of which only the end is kept; what lies between is not missed."""
        end = self._ends.get(name)
        if end is not None and at > end:
            _cut_torn_line(path)
        with path.open("ab") as file:
            file.write(body if end is None else body[max(0, end - at) :])
        self._ends[name] = max(at + len(body), end or 0)

    def _append(self, path: Path, at: int, body: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            size = os.fstat(descriptor).st_size
            if size < at:
                raise ValueError(f"{path} has {size} bytes, and what comes begins at {at}")
            # What was on its way when the far half was told anew what is here comes twice.
            file.write(body[size - at :])

    def _asked_for(self, name: str, said: str) -> Path:
        """The far half is another machine: nothing else in this folder is its to write."""
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r} is no file of a run")
        ends = tuple(pattern for pattern, *_ in self.kept.newest)
        grow, whole = (*self.kept.grow, *self.kept.last), self.kept.whole
        gone = (*grow, *whole, *ends)
        asked = {"grew": grow, "cut": grow, "added": ends, "whole": whole, "gone": gone}.get(said, ())
        # What begins with a dot is being written by this side.
        if parts[-1][0] == "." or not _is_one_of(name, asked):
            raise ValueError(f"{name!r} is no file that was asked for")
        path = self._root.joinpath(*parts)
        if said != "gone":
            path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        return path

    # --- to the far half ----------------------------------------------------------------------------

    def forget_sent(self) -> None:
        """The far half may have nothing."""
        self._sent, self._appended = {}, {}

    def news(self) -> Iterator[Message]:
        """What the far half is to have. Documents come before lines that were written after them."""
        grown = [(name, path, path.stat().st_size) for name, path in self._files(self.kept.appended)]
        yield from self._documents()
        for name, path, size in grown:
            at = self._appended.get(name, 0)
            if size > at:
                with path.open("rb") as file:
                    file.seek(at)
                    body = file.read(size - at)
                self._appended[name] = at + len(body)
                yield {"do": "append", "path": name, "at": at}, body

    def _documents(self) -> Iterator[Message]:
        present = dict(self._files(self.kept.sent))
        for name, path in present.items():
            try:
                with path.open("rb") as file:
                    status = os.fstat(file.fileno())
                    mark = (status.st_mtime_ns, status.st_ino, status.st_size)
                    if self._sent.get(name) == mark:
                        continue
                    body = file.read()
            except FileNotFoundError:
                continue  # removed since: the next look tells
            self._sent[name] = mark
            yield {"do": "put", "path": name}, body
        for name in [name for name in self._sent if name not in present]:
            del self._sent[name]
            yield {"do": "remove", "path": name}, None

    def _files(self, patterns: tuple[str, ...]) -> list[tuple[str, Path]]:
        """Looked for several times a second, for each host: most patterns are plain names."""
        found: dict[str, Path] = {}
        for pattern in patterns:
            if "*" in pattern:
                top = self._root / pattern.partition("/")[0]
                paths = self._root.glob(pattern) if "*" in top.name or top.is_dir() else ()
                found |= {str(one.relative_to(self._root)): one for one in paths if one.name[0] != "."}
            elif (path := self._root / pattern).exists():
                found[pattern] = path
        return sorted(found.items())


def _written(path: Path) -> tuple[int, int]:
    """When a document was written on the far side, and its length."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, -1
    return status.st_mtime_ns, status.st_size


def _cut_torn_line(path: Path) -> None:
    """What follows in the file begins a line."""
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    """A star stands for no more than one folder's name."""
    parts = name.split("/")
    return any(
        len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
        for wanted in (pattern.split("/") for pattern in patterns)
    )
