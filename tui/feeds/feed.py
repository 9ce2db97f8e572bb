"""The only bridge from run folders to the screens: readers that live in a thread and give immutable values.

A reader here touches files and never a widget. `MonitorScreen` and `RunsScreen` run one of the
`follow_*` functions in a thread worker; what it finds travels as one message that carries one value,
and a newer message of a kind takes the place of an older one that nobody has handled yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.breakdown import process_peaks
from llmtop.profiler.fleet.part import telling_part
from llmtop.profiler.fold.modelname import model_name
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.gpuwords import NO_ANSWER
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.rundir import RunDir, list_runs
from llmtop.tui.feeds.leftrun import LeftRun
from llmtop.tui.feeds.link import Link
from llmtop.tui.feeds.monitorfeed import MonitorFeed
from llmtop.tui.feeds.view import LogText, RunRow, RunView, steady_speed

if TYPE_CHECKING:
    from llmtop.profiler.effects.switches import Measured

LOOK_SECONDS = 0.5
"""Between two looks at a run that goes on."""
LOG_SECONDS = 0.5
IDLE_POLL_SECONDS = 2.0
"""Between looks at a run that has ended, and at the list of runs."""
_ROWS_A_BATCH = 16


class Replaceable(Message):
    """A message of which only the newest counts."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, type(self))


class ViewArrived(Replaceable):
    def __init__(self, view: RunView) -> None:
        super().__init__()
        self.view = view


class LogArrived(Replaceable):
    def __init__(self, text: LogText) -> None:
        super().__init__()
        self.text = text


class OthersArrived(Replaceable):
    """Runs that differ from the watched one in one switch, as they were when they were read."""

    def __init__(self, others: tuple[Measured, ...]) -> None:
        super().__init__()
        self.others = others


class RunsArrived(Replaceable):
    def __init__(self, rows: tuple[RunRow, ...]) -> None:
        super().__init__()
        self.rows = rows


class FeedFailed(Replaceable):
    """The run cannot be read; the screen says so and stays."""

    def __init__(self, error: LlmtopError) -> None:
        super().__init__()
        self.error = error


class RunsFeed:
    """The table of runs; a run that has ended is read once, and again when it goes on."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rows: dict[str, RunRow] = {}
        self._readers: dict[str, RunReader] = {}
        self._left: dict[str, LeftRun] = {}
        self._anew = False

    def read_anew(self) -> None:
        """The next scan takes nothing for known. Any thread may call."""
        self._anew = True

    def scan(self) -> Iterator[tuple[RunRow, ...]]:
        """Read what has changed, newest run first; long lists come in growing parts."""
        runs = list_runs(self._root)
        for gone in self._rows.keys() - {run.run_id for run in runs}:
            del self._rows[gone]
            self._readers.pop(gone, None)
            self._left.pop(gone, None)
        if self._anew:
            self._anew = False
            self._readers.clear()
            self._left.clear()
        fresh, batch = 0, _ROWS_A_BATCH
        for run in runs:
            known, left = self._rows.get(run.run_id), self._left.get(run.run_id)
            if left is not None and not left.goes_on():
                continue
            self._read(run)
            fresh += known is None
            if fresh >= batch:
                # Each part is painted anew: parts that grow keep a long list linear.
                fresh, batch = 0, batch * 2
                yield self._listed(runs)
        yield self._listed(runs)

    def _listed(self, runs: tuple[RunDir, ...]) -> tuple[RunRow, ...]:
        return tuple(self._rows[run.run_id] for run in runs if run.run_id in self._rows)

    def _read(self, run: RunDir) -> None:
        left = LeftRun(run)  # before it is read: what comes meanwhile is news at the next look
        try:
            reader = self._readers.get(run.run_id) or RunReader(telling_part(run), looks_for_left=False)
            row = run_row(run, reader.poll())
        except LlmtopError as error:
            row = RunRow(run_id=run.run_id, name=run.run_id, status="lost", problem=error.what)
        self._rows[run.run_id] = row
        if row.status in ENDED:
            self._readers.pop(run.run_id, None)
            self._left[run.run_id] = left
        else:
            self._readers[run.run_id] = reader
            self._left.pop(run.run_id, None)


def run_row(run: RunDir, state: RunState) -> RunRow:
    """One line of the table."""
    spec = run.spec()
    held = process_peaks(state, spec) if spec.on_cpu else state.peak_device_bytes
    return RunRow(
        run_id=run.run_id,
        name=spec.name,
        model=model_name(spec, state),
        device=f"{spec.world_size}x{spec.gpu.name}" if spec.knows("gpu") else NO_ANSWER,
        status=state.status,
        step=state.present_step,
        steps=spec.steps_planned,
        loss=state.present_loss,
        tokens_per_second=steady_speed(state.speed_series),
        memory_bytes=max(held.values(), default=None),
        started=state.started if state.started is not None else run.created(),
        unsaved=state.unsaved is not None,
    )


Post = Callable[[Message], object]


def follow_run(
    feed: MonitorFeed, post: Post, stop: threading.Event, wake: threading.Event, link: Link | None = None
) -> None:
    """Poll until `stop`; `wake` makes the next poll come at once. A slow link gets fewer views."""
    view_due = log_due = 0.0
    status, woken = "", False
    while not stop.is_set():
        failed, factor = False, link.factor if link is not None else 1
        try:
            newest, now = feed.read().status, time.monotonic()
            view = feed.view() if now >= view_due or newest != status else None
            if view is not None:
                post(ViewArrived(view))
                status, view_due = newest, now + factor * feed.paint_seconds
            # A log waits for the view that is due within a second, and both are painted at once: to send what
            # has changed of the screen costs as much for one panel as for many.
            is_due = view is not None or (now >= log_due and not feed.has_news)
            if (is_due or woken) and (text := feed.poll_log()) is not None:
                post(LogArrived(text))
                log_due = now + factor * LOG_SECONDS
        except LlmtopError as error:
            post(FeedFailed(error))
            failed = True
        woken = False
        if failed or not feed.reading:
            woken = wake.wait(IDLE_POLL_SECONDS if feed.ended else LOOK_SECONDS)
            wake.clear()


def follow_runs(feed: RunsFeed, post: Post, stop: threading.Event, wake: threading.Event) -> None:
    """Scan until `stop`; a list that has not changed is not posted again."""
    told: tuple[RunRow, ...] | None = None
    while not stop.is_set():
        for rows in feed.scan():
            if rows != told and not stop.is_set():
                post(RunsArrived(rows))
                told = rows
        wake.wait(IDLE_POLL_SECONDS)
        wake.clear()
