"""Which hosts of a run do not answer and answer again, in words, for who follows it without the app."""

from __future__ import annotations

import time
from collections.abc import Iterator

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import RunStarted
from llmtop.profiler.record.hostevents import HostFound, HostLost
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.remote import Remote, read_remote
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.units import counted, format_seconds

_AWAY_SECONDS = 5.0
"""A connection that is mended sooner is not worth a line."""
_MOST_TOLD = 6
"""Lines at a time: when a switch goes, all hosts go together."""


class LinkNarrator:
    """Of a run on another machine: when nothing comes from there any more, and when something does again."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.path
        self._told: Remote | None = None
        """Since when nothing comes, as it was told."""

    def lines(self) -> Iterator[str]:
        remote, told, now = read_remote(self._folder), self._told, time.time()
        if remote is None:
            return
        if told is None and remote.lost_at is not None and now - remote.lost_at >= _AWAY_SECONDS:
            self._told = remote
            yield f"{remote.away_words(now)}; it is reached for again"
        elif told is not None and told.lost_at is not None and remote.connected:
            self._told = None
            yield f"{remote.host} answers again, after {format_seconds(now - told.lost_at)}"


class HostNarrator:
    def __init__(self, run: RunDir) -> None:
        """Of a run on one machine there is nothing to say."""
        self._tail = EventTail(run.events_path(SUPERVISOR)) if read_hosts(run) is not None else None

    def lines(self) -> Iterator[str]:
        """What has come since the last call, of the run's newest start."""
        news: list[HostLost | HostFound] = []
        for event in self._tail.poll() if self._tail is not None else ():
            if isinstance(event, RunStarted):
                news = []
            elif isinstance(event, HostLost | HostFound):
                news.append(event)
        yield from map(_line, news[:_MOST_TOLD])
        if len(news) > _MOST_TOLD:
            yield f"and so with {counted(len(news) - _MOST_TOLD, 'more host')}"


def _line(event: HostLost | HostFound) -> str:
    if isinstance(event, HostFound):
        return f"host {event.host} answers again, after {format_seconds(event.away_seconds)}"
    return f"host {event.host} does not answer" + (f": {event.reason}" if event.reason else "")
