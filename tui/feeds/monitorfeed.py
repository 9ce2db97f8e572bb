"""One run's record as the monitor shows it: views and the newest lines of a log."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.remote import Remote, read_remote
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir, short_id
from llmtop.tui.feeds.view import LogText, RunView
from llmtop.tui.widgets.paint import harmless

POLL_SECONDS = 0.25
"""Of a record that is long behind: how much of it is read between two views."""
PAINT_SECONDS = 1.0
KEPT_LINES = 2000
_FIRST_READ_BYTES = 512 * 1024
_FIRST_EVENTS = 2_000
_PART_EVENTS = 8_000
"""Of a long record, before the next look at the clock."""


class LogTail:
    """The newest lines of a file that somebody else writes. It need not exist yet."""

    def __init__(self, path: Path, source: str) -> None:
        self._path = path
        self._source = source
        self._offset = 0
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._total = 0

    def poll(self) -> LogText | None:
        """The lines now; None when nothing was added."""
        try:
            size = self._path.stat().st_size
            if size < self._offset:
                self._offset, self._rest = 0, b""
            if size == self._offset:
                return None
            if self._offset == 0 and size > _FIRST_READ_BYTES:
                self._offset = size - _FIRST_READ_BYTES
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read(_FIRST_READ_BYTES * 4)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LlmtopError(f"cannot read {self._path}", why=error.strerror or str(error)) from error
        self._offset += len(added)
        *whole, self._rest = (self._rest + added).split(b"\n")
        self._lines.extend(harmless(line.decode("utf-8", "replace")) for line in whole)
        self._total += len(whole)
        return self.text()

    def text(self) -> LogText:
        """What has been read so far, with the unfinished last line."""
        rest = (harmless(self._rest.decode("utf-8", "replace")),) if self._rest else ()
        return LogText(source=self._source, lines=(*self._lines, *rest), total_lines=self._total + len(rest))


class MonitorFeed:
    """One run as the monitor shows it."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._reader = RunReader(run)
        self._newest: RunState | None = None
        self._seen: RunState | None = None
        """Of the last view."""
        self._remote: Remote | None = None
        self._seen_remote: Remote | None = None
        self._tails: dict[int | str, LogTail] = {}
        self._source: int | str = 0
        self._told: int | str | None = None
        self._short_id = short_id(run)

    def choose_log(self, source: int | str) -> None:
        """Which log to follow from the next poll on: a rank's number or `supervisor`. Any thread may call."""
        self._source = source

    def poll(self) -> RunView | None:
        """The run now; None when nothing has changed since the last view."""
        self.read()
        return self.view()

    def read(self) -> RunState:
        """What the record says now. Cheap: what all of it means is for `view`."""
        self._newest = self._read()
        self._remote = read_remote(self.run.path)
        return self._newest

    @property
    def has_news(self) -> bool:
        """Whether `view` has not given yet what was read last."""
        return self._newest is not self._seen or self._remote != self._seen_remote

    def view(self) -> RunView | None:
        """Of what was read last; None where it was given already."""
        state = self._newest
        if state is None or not self.has_news:
            return None
        self._seen, self._seen_remote = state, self._remote
        # What was measured since the last change is compared with what was predicted for it.
        setting = state.changes.setting
        spec, prediction = self.run.spec(setting), self.run.prediction(setting)
        return RunView(
            state=state,
            spec=spec,
            prediction=prediction,
            breakdown=breakdown(state, spec, prediction),
            findings=findings(state, spec, prediction),
            reading=self.reading,
            remote=self._remote,
            short_id=self._short_id,
        )

    @property
    def paint_seconds(self) -> float:
        """Between two views, unless the run's status changes: steps and samples come apart, and each view is
        painted."""
        return POLL_SECONDS if self.reading else PAINT_SECONDS

    @property
    def reading(self) -> bool:
        """Whether the record goes on behind what was read."""
        return self._reader.behind

    def _read(self) -> RunState:
        """What is new; of a long record the next part, the first of them small so that it is soon shown."""
        if self._newest is None:
            return self._reader.poll(_FIRST_EVENTS)
        state, until = self._newest, time.monotonic() + POLL_SECONDS
        while True:
            state = self._reader.poll(_PART_EVENTS)
            if not self._reader.behind or time.monotonic() >= until:
                return state

    def poll_log(self) -> LogText | None:
        """The chosen log now; None when nothing was added to it."""
        source = self._source
        if source not in self._tails:
            words = SUPERVISOR if source == SUPERVISOR else f"rank {source}"
            self._tails[source] = LogTail(self.run.log_path(source), words)
        tail = self._tails[source]
        added = tail.poll()
        if added is None and source != self._told:
            added = tail.text()
        self._told = source
        return added

    @property
    def ended(self) -> bool:
        return self._newest is not None and self._newest.status in ENDED
