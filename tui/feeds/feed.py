"""The only bridge from run folders to the screens: readers that live in a thread and give immutable values.

A reader here touches files and never a widget. `MonitorScreen` and `RunsScreen` run one of the
`follow_*` functions in a thread worker; what it finds travels as one message that carries one value,
and a newer message of a kind takes the place of an older one that nobody has handled yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.message import Message

from llmtop.presets.errors import LlmtopError
from llmtop.tui.feeds.link import Link
from llmtop.tui.feeds.monitorfeed import MonitorFeed
from llmtop.tui.feeds.runsfeed import RunsFeed
from llmtop.tui.feeds.view import LogText, RunRow, RunView

if TYPE_CHECKING:
    from llmtop.profiler.effects.switches import Measured

LOOK_SECONDS = 0.5
"""Between two looks at a run that goes on."""
LOG_SECONDS = 0.5
IDLE_POLL_SECONDS = 2.0
"""Between looks at a run that has ended, and at the list of runs."""


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
    def __init__(self, rows: tuple[RunRow, ...], total: int) -> None:
        """`total`: how many runs there are; more than `rows` while the others are still read."""
        super().__init__()
        self.rows = rows
        self.total = total


class FeedFailed(Replaceable):
    """The run cannot be read; the screen says so and stays."""

    def __init__(self, error: LlmtopError) -> None:
        super().__init__()
        self.error = error


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
                post(RunsArrived(rows, feed.total))
                told = rows
        wake.wait(IDLE_POLL_SECONDS)
        wake.clear()
