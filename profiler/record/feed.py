"""From a run's folder to its state: read every log, merge what is there by time, fold it.

Reading (`RunStream`) and folding (`RunReader`) are apart, so that another source of events, such as
a replay by time stamp, can drive the same fold.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.bookmark import Bookmark, read_bookmark, write_bookmark
from llmtop.profiler.record.clocks import Clocks, clocks_of
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.imported import unended_status
from llmtop.profiler.record.leftovers import Left, Leftovers
from llmtop.profiler.record.recording import Cursor, LogPlace, NoSuchPlace
from llmtop.profiler.record.remote import read_remote
from llmtop.profiler.record.rundir import RunDir

START_GRACE_SECONDS = 60.0
"""A run that has no supervisor this long after it was made never got one."""
WORTH_KEEPING_BYTES = 4 << 20
"""Less than this is read again as fast as a bookmark is."""

MOST_FRESH_STARTS = 50
"""In a row: of many hosts one clock after the other is measured, and a record is thinned part by part."""

_LEAST_ROOM_BYTES = 64 * 1024
"""With less the next line of a log may not fit."""

_PART_EVENTS = 2_000
"""Read before the next look at how many bytes they were."""


class LateLine(Exception):
    """A log has gained an event from before what is folded already, and the order has to be that of time.

    Or it was thinned where somebody was still reading, or a host's clock is found to be another one than was
    taken off.
    """


class FreshStarts:
    """Counts how often in a row a record was begun anew, so that nobody reads it for ever."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._count = 0

    def one_more(self) -> None:
        """Raises LlmtopError after MOST_FRESH_STARTS."""
        self._count += 1
        if self._count > MOST_FRESH_STARTS:
            raise LlmtopError(
                f"the record of run {self._run.run_id} cannot be read to its end",
                why=f"it was begun anew {MOST_FRESH_STARTS} times: each time a host's clock was found to be"
                " another one, or its oldest part was thinned, before the end was reached",
                fix="ask again in a minute; llmtop logs shows meanwhile what the ranks print",
            )

    def arrived(self) -> None:
        """All that is there was read."""
        self._count = 0


def state_before(run: RunDir, clocks: Clocks | None) -> RunState:
    """What is known of a run before its first event."""
    remote, here = read_remote(run.path), run.ranks_here
    state = RunState(
        run_id=run.run_id,
        clocks=clocks.taken_off if clocks is not None else {},
        elsewhere=remote.host if remote is not None else "",
    )
    return state if here is None else replace(state, first_rank=here.start, host_ranks=len(here))


class RunStream:
    """What all the logs of one run hold, in the order of time, from the beginning or a bookmark on."""

    def __init__(self, run: RunDir, bookmark: Bookmark | None = None) -> None:
        """Raises NoSuchPlace where the logs do not reach as far as the bookmark says, or the clocks of hosts
        are not those that it was made with."""
        self._run = run
        self._clocks = clocks_of(run)
        if bookmark is not None and bookmark.state.clocks != self.begin.clocks:
            raise NoSuchPlace(f"other clocks than in the bookmark of {run.path}")
        self._until = self._marked = bookmark.until if bookmark is not None else -math.inf
        """Time of the newest event given, and of the newest in the bookmark."""
        self.in_order = True
        """Whether everything was given in the order of time: of a live run a line may come late."""
        places = bookmark.places if bookmark is not None else {}
        paths = run.event_logs()
        place = tuple(places.get(path, LogPlace()) for path in paths)
        self._cursor = Cursor(paths, place, clocks=self._clocks)
        self._began_bytes = self._cursor.offset_bytes

    @cached_property
    def begin(self) -> RunState:
        """Before the first event."""
        return state_before(self._run, self._clocks)

    def batches(self, until: float | None = None, *, strictly: bool = False) -> Iterator[list[AnyEvent]]:
        """All that is there now, or all of it up to a time.

        Raises LateLine for an event from before the bookmark; `strictly` for one from before any given.
        """
        cursor = self._cursor
        cursor.look_again(self._run.event_logs())
        while batch := self._batch(until):
            self.in_order = self.in_order and cursor.earliest > self._until
            if cursor.earliest <= (self._until if strictly else self._marked):
                raise LateLine
            self._until = max(self._until, cursor.latest)
            yield batch

    def _batch(self, until: float | None) -> list[AnyEvent]:
        try:
            batch = self._cursor.batch(until)
        except NoSuchPlace:
            # Thinned under this reader: what is left of the oldest events has to be read from its beginning.
            raise LateLine from None
        if self._clocks is not None and self._clocks.changed:
            raise LateLine
        return batch

    def poll(self, most_events: int | None = None) -> Iterator[AnyEvent]:
        """The next events, all that are there or about so many; raises LateLine."""
        return chain.from_iterable(self._parts(most_events))

    def _parts(self, most_events: int | None) -> Iterator[list[AnyEvent]]:
        left = most_events
        for batch in self.batches():
            yield batch
            left = None if left is None else left - len(batch)
            if left is not None and left <= 0:
                return

    def bookmark(self, state: RunState) -> Bookmark:
        """Of the state that everything given so far makes."""
        return Bookmark(state=state, until=self._until, places=self._cursor.places)

    @property
    def behind(self) -> bool:
        """Whether there is more than the last poll was asked to read."""
        return self._cursor.behind

    @property
    def given_bytes(self) -> int:
        """Of all logs, since the beginning, the bookmark or `forget_given`."""
        return self.read_bytes - self._began_bytes

    @property
    def read_bytes(self) -> int:
        """Of all logs, with what a bookmark stands for."""
        return self._cursor.offset_bytes

    def forget_given(self) -> None:
        self._began_bytes = self.read_bytes

    @property
    def skipped_lines(self) -> int:
        return self._cursor.skipped_lines


def open_stream(run: RunDir) -> tuple[RunStream, RunState]:
    """A run's stream from its bookmark on, and the state up to there; from the beginning without one."""
    bookmark = read_bookmark(run)
    if bookmark is not None:
        try:
            stream = RunStream(run, bookmark)
            # It may have been kept by whoever has the run.
            return stream, replace(bookmark.state, elsewhere=stream.begin.elsewhere)
        except NoSuchPlace:
            pass  # the log was cut since
    return anew(run)


def anew(run: RunDir) -> tuple[RunStream, RunState]:
    """A run's stream from the beginning."""
    stream = RunStream(run)
    return stream, stream.begin


class RunReader:
    """The state of a run as far as its logs go. `poll` returns the same object while nothing changes."""

    def __init__(
        self, run: RunDir, *, wall: Callable[[], float] = time.time, looks_for_left: bool = True
    ) -> None:
        """`looks_for_left`: among all processes of the machine, where the run is found lost."""
        self.run = run
        self._wall = wall
        self._looks_for_left = looks_for_left
        self._stream, self._folded = open_stream(run)
        self._fresh_starts = FreshStarts(run)
        self._shown = self._of_origin(self._folded)
        self._unended = unended_status(run)
        self._leftovers: Leftovers | None = None
        """Once the run was found lost."""

    @property
    def behind(self) -> bool:
        """Whether the logs hold more than the last poll was asked to read."""
        return self._stream.behind

    @property
    def read_bytes(self) -> int:
        """Of all logs, with what a bookmark stands for; fewer again where it had to begin anew."""
        return self._stream.read_bytes

    def poll_within(self, most_bytes: int) -> int:
        """Poll until all is read or about so many bytes were, and maybe a part more; how many they were."""
        spent_bytes = 0
        while True:
            before_bytes = self.read_bytes
            self.poll(_PART_EVENTS)
            spent_bytes += max(0, self.read_bytes - before_bytes)
            if spent_bytes > most_bytes or not self.behind:
                return spent_bytes

    def poll(self, most_events: int | None = None) -> RunState:
        """With `most_events` about so many more, so that a long run is seen while it is read."""
        # Asked before reading: a supervisor that ends in between has then written its end already.
        before, was_over = self._folded, self._folded.ended is not None
        supervised = was_over or self._supervised()
        folded = self._fold(most_events)
        if was_over and folded.ended is None:
            # It went on again, and nobody was asked: what is written up to the answer is read once more.
            supervised, self._folded = self._supervised(), folded
            folded = self._fold(most_events)
        if self._stream.skipped_lines != folded.skipped_lines:
            folded = replace(folded, skipped_lines=self._stream.skipped_lines)
        lost = folded.ended is None and not supervised and not self._stream.behind
        unwritable = "" if lost or folded.ended is not None else unwritable_words(self.run.path)
        left = self._left() if lost else None
        shown = self._shown
        same = (lost, unwritable, left) == (shown.status == self._unended, shown.unwritable, shown.left)
        self._folded = folded
        if folded is not before or not same:
            shown = replace(folded, unwritable=unwritable) if unwritable else folded
            self._shown = self._of_origin(replace(shown, status=self._unended, left=left) if lost else shown)
        if (lost or folded.ended is not None) and not self._stream.behind:
            self._keep()
        return self._shown

    def _left(self) -> Left | None:
        """None for a run that is or was another machine's."""
        is_ours = not self.run.is_imported and not self._folded.elsewhere and self._unended == "lost"
        if not is_ours or not self._looks_for_left:
            return None
        if self._leftovers is None:
            self._leftovers = Leftovers(self.run)
        return self._leftovers.look()

    def _of_origin(self, state: RunState) -> RunState:
        return replace(state, imported=True) if self.run.is_imported else state

    def _fold(self, most_events: int | None) -> RunState:
        while True:
            try:
                folded = fold(self._folded, self._stream.poll(most_events))
            except LateLine:
                self._fresh_starts.one_more()
                self._stream, self._folded = anew(self.run)
            else:
                if not self._stream.behind:
                    self._fresh_starts.arrived()
                return folded

    def _keep(self) -> None:
        """For the next reader of a long record that nobody adds to; not in the folder of somebody else."""
        if self._stream.given_bytes < WORTH_KEEPING_BYTES or not self._stream.in_order:
            return
        try:
            is_own = self.run.path.stat().st_uid == os.getuid()
        except FileNotFoundError:
            return
        self._stream.forget_given()
        if is_own:
            write_bookmark(self.run, self._stream.bookmark(self._folded))

    def _supervised(self) -> bool:
        if self.run.supervisor_alive():
            return True
        if self.run.supervisor_identity() is not None:
            return False
        created = self.run.created()
        return created is not None and self._wall() - created < START_GRACE_SECONDS


def unwritable_words(folder: Path) -> str:
    """Why nothing can be written there by the look of the file system; empty where something can."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return ""
    if status.f_flag & os.ST_RDONLY:
        return "its file system is mounted to be read only"
    if status.f_bavail * status.f_frsize < _LEAST_ROOM_BYTES:
        return "its disk is full"
    return "its disk has no room for another file" if status.f_files and not status.f_favail else ""


def read_state(run: RunDir, *, looks_for_left: bool = True) -> RunState:
    """Everything that the logs of a run say now; `looks_for_left` as of `RunReader`."""
    return RunReader(run, looks_for_left=looks_for_left).poll()
