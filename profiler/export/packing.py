"""Writes the members of an archive one after the other, in a thread beside whoever reads the record.

A zip file and not a tar ball: its directory tells every size before anything is unpacked, each member has a
checksum, a cut file is recognised by its missing end, and one member can be read without the others.
"""

from __future__ import annotations

import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from llmtop.profiler.export.contents import Member
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.record.wholefile import document

LEVEL = 1
"""Of deflate: level 6 makes records a third smaller and takes four times as long."""
_CHUNK_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 16 << 20
_ZIP64_FROM = 1 << 30
_NUMBERS_ALONE = tuple(
    f'\n{{"kind":"{kind}"'.encode()
    for kind in (
        *("step_finished", "hardware_sampled", "memory_classified", "outside_measured", "weights_read"),
        *("baseline_measured", "stage_began", "stage_finished"),
    )
)
"""Events that hold nothing that somebody typed: nearly all of a long record."""


class Packer:
    """One archive while it is written. Every method raises OSError where the disk is full."""

    def __init__(self, path: Path, root: str, scrubber: Scrubber) -> None:
        """All names lie under the folder `root` of the archive."""
        self._file = path.open("xb")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL)
        self._root, self._scrubber = root, scrubber
        self.sizes: dict[str, int] = {}
        """Name to bytes before compression."""
        self.gone: list[Path] = []
        """Members that were not there any more."""

    def finish(self) -> None:
        """Write the directory; the file is then whole, and on the disk."""
        self._zip.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Nothing more is written: also no directory, when the archive is let go."""
        self._zip.fp = None
        with suppress(OSError):  # what waits to be written has no room, as is told already
            self._file.close()

    def add_member(self, member: Member) -> None:
        """A file of the run, as far as it is written now; one that has gone since is left out."""
        try:
            with member.path.open("rb") as source:
                if member.how == "document":
                    self.add_bytes(member.name, self._document(source.read()))
                elif member.how == "bytes":
                    self.add_file(member.name, member.path)
                else:
                    self._add_lines(member, source)
        except FileNotFoundError:
            self.gone.append(member.path)

    def add_bytes(self, name: str, content: bytes) -> None:
        """Content that was made without secrets."""
        with self._entry(name, len(content), time.time()) as target:
            target.write(content)
        self.sizes[name] = len(content)

    def add_file(self, name: str, path: Path, *, stored: bool = False) -> None:
        """A file as it is; `stored`: it is compressed already."""
        found = path.stat()
        with (
            path.open("rb") as source,
            self._entry(name, found.st_size, found.st_mtime, stored=stored) as target,
        ):
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
        self.sizes[name] = found.st_size

    def _document(self, content: bytes) -> bytes:
        try:
            value = msgspec.json.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._scrubbed(content)
        return document(self._scrubber.value(value))

    def _add_lines(self, member: Member, source: IO[bytes]) -> None:
        found = member.path.stat()
        written = 0
        clean = self._events if member.how == "events" else self._scrubbed
        with self._entry(member.name, found.st_size, found.st_mtime) as target:
            for lines in whole_lines(source, keep_rest=member.how != "events"):
                kept = clean(lines)
                target.write(kept)
                written += len(kept)
        self.sizes[member.name] = written

    def _events(self, lines: bytes) -> bytes:
        known = (value.encode() for value in self._scrubber.known_values)
        if any(value in lines for value in known):
            return b"\n".join(map(self._event, lines.split(b"\n")))
        begun = b"\n" + lines
        if sum(map(begun.count, _NUMBERS_ALONE)) == lines.count(b"\n"):
            return lines
        starts = tuple(start[1:] for start in _NUMBERS_ALONE)
        return b"\n".join(
            line if line.startswith(starts) else self._event(line) for line in lines.split(b"\n")
        )

    def _event(self, line: bytes) -> bytes:
        """As it was written where nothing had to be taken out."""
        try:
            value = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._scrubbed(line)
        kept = self._scrubber.value(value)
        return line if kept == value else msgspec.json.encode(kept)

    def _scrubbed(self, lines: bytes) -> bytes:
        text = lines.decode("utf-8", "surrogateescape")
        return self._scrubber.text(text).encode("utf-8", "surrogateescape")

    def _entry(self, name: str, size: int, modified: float, *, stored: bool = False) -> IO[bytes]:
        # Zip knows no time before 1980, and none after 2107.
        when = min(max(time.localtime(modified)[:6], (1980, 1, 1, 0, 0, 0)), (2107, 12, 31, 23, 59, 58))
        entry = zipfile.ZipInfo(f"{self._root}/{name}", when)
        entry.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
        entry.external_attr = 0o600 << 16
        _set_level(entry)
        return self._zip.open(entry, "w", force_zip64=size >= _ZIP64_FROM)


def _set_level(entry: Any) -> None:
    """An entry that is opened for writing does not take the archive's level (CPython 3.11 to 3.14)."""
    setattr(entry, "compress_level" if hasattr(entry, "compress_level") else "_compresslevel", LEVEL)


def whole_lines(source: IO[bytes], *, keep_rest: bool) -> Iterator[bytes]:
    """A file in parts that end with a line; `keep_rest`: also what stands behind the last end of a line.

    A progress bar ends its lines with a carriage return. A line that is longer than any real one is cut.
    """
    rest = b""
    while chunk := source.read(_CHUNK_BYTES):
        content = rest + chunk
        end = max(content.rfind(b"\n"), content.rfind(b"\r") if keep_rest else -1) + 1
        if not end and len(content) >= _LONGEST_LINE_BYTES:
            end = len(content)
        rest = content[end:]
        if end:
            yield content[:end]
    if rest and keep_rest:
        yield rest
