"""The bridge from a run over hosts to its screens: a reader in a thread that gives immutable values."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from textual.message import Message

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.record.hosts import Hosts
from llmtop.profiler.record.rundir import RunDir, short_id
from llmtop.tui.feeds.feed import IDLE_POLL_SECONDS, FeedFailed, Replaceable
from llmtop.tui.feeds.fleetview import FleetView, fleet_view
from llmtop.tui.feeds.link import Link

POLL_SECONDS = 1.0
AGE_SECONDS = 5.0
"""A view is made anew as often as that, though nobody has told anything: that too is to be seen."""


class FleetArrived(Replaceable):
    def __init__(self, view: FleetView) -> None:
        super().__init__()
        self.view = view


class FleetFeed:
    """All hosts of one run."""

    def __init__(self, run: RunDir, hosts: Hosts, reader: FleetReader | None = None) -> None:
        self.run = run
        self._reader = reader if reader is not None else FleetReader(run, hosts)
        self._short_id = short_id(run)
        self._made = 0.0
        self.ended = False

    def poll(self) -> FleetView | None:
        """The hosts now; None when there is nothing to tell anew."""
        news, now = self._reader.poll(), time.monotonic()
        if not news and now - self._made < AGE_SECONDS:
            return None
        self._made = now
        view = fleet_view(self._reader, self.run.spec(self._reader.state.changes.setting), self._short_id)
        self.ended = not view.going_on
        return view


def follow_fleet(
    feed: FleetFeed,
    post: Callable[[Message], object],
    stop: threading.Event,
    wake: threading.Event,
    link: Link | None = None,
) -> None:
    """Poll until `stop`; `wake` makes the next poll come at once. A slow link gets fewer views."""
    while not stop.is_set():
        try:
            view = feed.poll()
        except LlmtopError as error:
            post(FeedFailed(error))
        else:
            if view is not None:
                post(FleetArrived(view))
        factor = link.factor if link is not None else 1
        wake.wait(IDLE_POLL_SECONDS if feed.ended else factor * POLL_SECONDS)
        wake.clear()
