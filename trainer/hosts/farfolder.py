"""Part of the far end of a link (`remote.py`): a folder that is followed, and what is told of it.

Any Python 3.8 runs this, with its library alone.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from pathlib import Path
from typing import Any

PART_BYTES = 1 << 18
_FILE = re.compile(r"(?P<stem>.+?)(?:\.(?P<number>[1-9]\d*))?\.(?P<end>jsonl|log)")


class Followed:
    """A folder whose files are told of as they grow or are replaced."""

    def __init__(
        self,
        root: Path,
        grow: list[str],
        last: list[str],
        whole: list[str],
        have: dict[str, int],
        newest: list[list[Any]] | None = None,
        seen: dict[str, list[int]] | None = None,
    ) -> None:
        """`newest`: patterns of logs of which only the end is told, each with how many lines of it, and from
        how many bytes on what was added while nobody was connected is passed over (None: never). `seen`:
        documents that the other side has, each with when it was written and its length."""
        self.root = root
        self.grow, self.last, self.whole = grow, last, whole
        self.newest = newest or []
        self.sent = dict(have)
        """Of each file that grows, how many bytes the other side has."""
        self.ends: set[str] = set()
        """Logs of which only the end is told."""
        self.had = seen or {}
        self.seen: dict[str, tuple[int, int, int]] = {}
        """Of each file that is replaced, which one was told."""

    def look(self, say: Any, full: Any) -> bool:
        """Tell what is new until there is no room; whether everything was told."""
        # Who writes these tells of what others had written by then, so that has to be there before.
        ends = {name: self.size(name) for name in self._names(self.last)}
        growing = [name for name in self._names(self.grow) if name not in ends]
        ending = self._look_at_ends(say, full)
        if ending is None:
            return False
        for name in [*growing, *ends]:
            if not self._tell_growth(name, say, full, ends.get(name)):
                return False
        for name in sorted(set(self.sent) - {*growing, *ends, *ending}):
            del self.sent[name]
            self.ends.discard(name)
            say({"say": "gone", "path": name})
        present = set(self._names(self.whole))
        for name in sorted(present):
            if full():
                return False
            self._tell_whole(name, say)
        for name in sorted(set(self.seen) - present):
            del self.seen[name]
            say({"say": "gone", "path": name})
        return True

    def left_bytes(self) -> int:
        """How much of what grows the other side has not."""
        names = {*self._names(self.grow), *self._names(self.last)}
        return sum(max(0, self.size(name) - self.sent.get(name, 0)) for name in names)

    def _names(self, patterns: list[str]) -> list[str]:
        """A folder is listed once, however many patterns ask for files of it."""
        by_folder: dict[str, list[str]] = {}
        for pattern in patterns:
            folder, _, name = pattern.rpartition("/")
            by_folder.setdefault(folder, []).append(fnmatch.translate(name))
        found = set()
        for folder, names in by_folder.items():
            matches = re.compile("|".join(names)).match
            for place in self.root.glob(folder) if "*" in folder else [self.root / folder]:
                with contextlib.suppress(OSError):
                    # What begins with a dot is being written.
                    present = [one for one in os.listdir(place) if one[0] != "." and matches(one)]  # noqa: PTH208
                    prefix = str(place.relative_to(self.root)) + "/" if place != self.root else ""
                    found |= {prefix + one for one in present}
        return sorted(found)

    def size(self, name: str) -> int:
        try:
            return os.stat(f"{self.root}/{name}").st_size  # noqa: PTH116 - thousands of them, again and again
        except OSError:
            return 0

    def _tell_growth(self, name: str, say: Any, full: Any, end: int | None) -> bool:
        """As far as it goes, or to a byte."""
        if end is None and name in self.sent and self.size(name) == self.sent[name]:
            return True
        try:
            with (self.root / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size if end is None else end
                if size < self.sent.get(name, 0):
                    say({"say": "gone" if name in self.ends else "cut", "path": name})
                    self.sent[name] = 0
                while self.sent.get(name, -1) < size:
                    if full():
                        return False
                    at = self.sent.get(name, 0)
                    file.seek(at)
                    part = file.read(min(PART_BYTES, size - at))
                    said = "added" if name in self.ends else "grew"
                    say({"say": said, "path": name, "at": at}, part)
                    self.sent[name] = at + len(part)
                    if not part:
                        break
        except OSError:
            return True  # gone, or not ours to read
        return True

    # --- of some logs only the end ------------------------------------------------------------------

    def _look_at_ends(self, say: Any, full: Any) -> set[str] | None:
        """The files that are told of; None where there was no room for all."""
        files: set[str] = set()
        for pattern, lines, most_bytes in self.newest:
            for name in newest_of(self._names([pattern])):
                files.add(name)
                if name not in self.ends:
                    self.ends.add(name)
                    missed = self.size(name) - self.sent.get(name, 0)
                    too_many = most_bytes is not None and missed > most_bytes
                    if name not in self.sent or missed < 0 or too_many:
                        self.sent[name] = self._begin(name, lines)
        for name in sorted({*self.ends, *files}):
            # One that was gone on from in another file is told to its end first.
            if not self._tell_growth(name, say, full, None):
                return None
        return files

    def _begin(self, name: str, lines: int) -> int:
        try:
            with (self.root / name).open("rb") as file:
                return begin_of_last(file, lines)
        except OSError:
            return 0

    def _tell_whole(self, name: str, say: Any) -> None:
        try:
            with (self.root / name).open("rb") as file:
                status = os.fstat(file.fileno())
                mark = (status.st_mtime_ns, status.st_ino, status.st_size)
                has_it = name not in self.seen and self.had.get(name) == [mark[0], mark[2]]
                if self.seen.get(name) != mark and not has_it:
                    say({"say": "whole", "path": name, "mtime_ns": mark[0]}, file.read())
                self.seen[name] = mark
        except OSError:
            return


def newest_of(names: list[str]) -> list[str]:
    """Of each log the file that is written to: of those that are numbered the one with the highest number."""
    found: dict[tuple[str, str], tuple[int, str]] = {}
    for name in names:
        match = _FILE.fullmatch(name)
        if match is None or ".until-" in name:
            continue
        log, number = (match["stem"], match["end"]), int(match["number"] or 0)
        if log not in found or found[log][0] < number:
            found[log] = (number, name)
    return sorted(name for _, name in found.values())


def begin_of_last(file: Any, lines: int) -> int:
    """Where the last so many lines begin, one without an end among them; read backwards."""
    end = at = file.seek(0, os.SEEK_END)
    while at > 0 and lines > 0:
        begin = max(0, at - PART_BYTES)
        file.seek(begin)
        part = file.read(at - begin)
        found = len(part)
        while (found := part.rfind(b"\n", 0, found)) >= 0:
            if begin + found + 1 == end:
                continue  # what ends the last line begins none
            lines -= 1
            if lines == 0:
                return int(begin + found + 1)
        at = begin
    return int(at)
