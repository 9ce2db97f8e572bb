"""A log as it was at a time of the run: as many of its bytes as there were then."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.rundir import SUPERVISOR
from llmtop.tui.feeds.monitorfeed import KEPT_LINES
from llmtop.tui.feeds.view import LogText
from llmtop.tui.widgets.paint import harmless

_FIRST_READ_BYTES = 512 * 1024
"""Of a long log, before the place: more than is kept."""
_WHOLE = "whole, as its times were not recorded"


def log_bytes(state: RunState, source: int | str) -> int | None:
    """How long a log was by the newest sample of a state; None: the record does not tell."""
    if not state.hardware_history:
        return 0
    if source == SUPERVISOR:
        return state.hardware_history[-1].host.log_bytes
    # A rank that has ended is in no sample any more.
    for sample in reversed(state.hardware_history):
        for process in sample.processes:
            if process.rank == source:
                return process.log_bytes
    return None


class LogAtTime:
    """The newest lines of a finished file up to a place in it. Going on reads what is new alone."""

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._total = 0
        self._offset = 0
        self._rest = b""
        self._told: tuple[int, str] | None = None

    def poll(self, size: int | None) -> LogText | None:
        """The lines up to `size` bytes, or all of them; None when that is what was told last."""
        try:
            there = self._path.stat().st_size
            end = there if size is None else min(size, there)
            source = self._source if size is not None else f"{self._source}, {_WHOLE}"
            if self._told == (end, source):
                return None
            self._read_to(end)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LlmtopError(f"cannot read {self._path}", why=error.strerror or str(error)) from error
        self._told = (end, source)
        rest = (harmless(self._rest.decode("utf-8", "replace")),) if self._rest else ()
        return LogText(source=source, lines=(*self._lines, *rest), total_lines=self._total + len(rest))

    def forget(self) -> None:
        """Tell it again at the next poll: another log was shown in between."""
        self._told = None

    def _read_to(self, end: int) -> None:
        if end < self._offset:
            self._lines.clear()
            self._total, self._offset, self._rest = 0, 0, b""
        if end - self._offset > _FIRST_READ_BYTES:
            self._offset, self._rest = end - _FIRST_READ_BYTES, b""
            self._lines.clear()
        with self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read(end - self._offset)
        self._offset += len(added)
        *whole, self._rest = (self._rest + added).split(b"\n")
        self._lines.extend(harmless(line.decode("utf-8", "replace")) for line in whole)
        self._total += len(whole)
