"""The end of a log that a program writes as it likes, read without what comes before it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

END_BYTES = 16 * 1024
"""Read of the end where a few last lines are wanted, however long the log is."""
LINE_END = re.compile(rb"\r\n|\n|\r")
"""A progress bar writes its lines one over the other: each of them ends in a carriage return."""
_BLOCK_BYTES = 256 * 1024


def end_lines(log: Path | BinaryIO | None, most_bytes: int = END_BYTES) -> list[str]:
    """The last lines that are not empty, without space around them; none of a log that cannot be read.

    The first of them may have lost its beginning.
    """
    if log is None:
        return []
    try:
        if isinstance(log, Path):
            with log.open("rb") as file:
                content = _end_of(file, most_bytes)
        else:
            content = _end_of(log, most_bytes)
    except OSError:
        return []
    lines = (line.strip() for line in content.decode("utf-8", "replace").splitlines())
    return [line for line in lines if line]


def _end_of(file: BinaryIO, most_bytes: int) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
    return file.read(most_bytes)


def offset_of_last(file: BinaryIO, lines: int) -> int:
    """Where the last so many lines begin, one without an end among them. Raises OSError as reading does.

    It is read backwards, a block at a time.
    """
    end = begin = counted = file.seek(0, os.SEEK_END)
    after = b""
    while lines > 0 and begin > 0:
        at = max(0, begin - _BLOCK_BYTES)
        file.seek(at)
        block = file.read(begin - at)
        # The pair of characters that ends a line may lie in two blocks: it is found in both, and counts once.
        for found in reversed(list(LINE_END.finditer(block + after[:1]))):
            following = at + found.end()
            if following in (counted, end) or found.start() >= len(block):
                continue  # what ends the last line begins none
            counted = following
            lines -= 1
            if lines == 0:
                return following
        begin, after = at, block
    return begin
