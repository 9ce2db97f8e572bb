"""A recorded run as the monitor's feed: it plays, holds and goes elsewhere when another thread says so."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.imported import unended_status
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.replay import Mark, Replay
from llmtop.tui.asking.requests import ReplayWish
from llmtop.tui.feeds.feed import FeedFailed, LogArrived, Post, Replaceable, ViewArrived
from llmtop.tui.feeds.monitorfeed import MonitorFeed
from llmtop.tui.feeds.replaylog import LogAtTime, log_bytes
from llmtop.tui.feeds.view import LogText

SPEEDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Seconds of the run in one of the viewer."""
Place = Literal["begin", "end", "step_before", "step_after", "mark_before", "mark_after"]

_PLAYING_POLL_SECONDS = 0.1
_HELD_POLL_SECONDS = 2.0
_READING_POLL_SECONDS = 0.005
"""Between two parts of the first reading: keys are answered there."""
_READ_SECONDS = 0.1
_ALL_BYTES = 1 << 62
_MOST_EVENTS_A_POLL = 20_000
"""A run of many fast steps that is played fast goes as fast as it can be folded."""


class ReplayPosition(Struct, frozen=True, kw_only=True):
    """Where a replay stands, for the screen."""

    at: float
    """Wall clock of the recorded run."""
    begin: float
    end: float
    """As far as it was read."""
    step: int | None
    """At which it stood; None where it had gone on and not told from where."""
    speed: int
    playing: bool
    read_share: float = 1.0
    going_to: str = ""
    """A place that is not read yet."""
    note: str = ""
    """What a person should know of the last key."""
    marks: tuple[Mark, ...] = ()


class PositionArrived(Replaceable):
    def __init__(self, position: ReplayPosition) -> None:
        super().__init__()
        self.position = position


class ReplayFeed(MonitorFeed):
    """One run, played back. All but `poll` and the reading of the log may be called from any thread."""

    def __init__(
        self, run: RunDir, wish: ReplayWish | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(run)
        wish = wish or ReplayWish()
        self._clock = clock
        self._replay = Replay(run, self._find)
        self._logs: dict[int | str, LogAtTime] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._speed = wish.speed
        self._playing = wish.step is None
        self._last = clock()
        self._note = ""
        self._lost: RunState | None = None
        """The last state of a run that is lost; the same object while nothing changes."""
        self._pending: Callable[[], float | None] | None = None
        self._going_to = ""
        if wish.step is not None:
            self.to_step(wish.step)

    # --- orders, from any thread -------------------------------------------------------------------

    def play(self) -> None:
        self._orders.append(self._turn)

    def faster(self, by: int) -> None:
        self._orders.append(lambda: self._change_speed(by))

    def go(self, place: Place) -> None:
        self._orders.append(lambda: self._go(place))

    def to_step(self, step: int) -> None:
        self._orders.append(lambda: self._to(f"step {step}", lambda: self._replay.step_time(step)))

    # --- in the feed's thread ----------------------------------------------------------------------

    def _find(self, state: RunState) -> dict[str, str]:
        setting = state.changes.setting
        spec, prediction = self.run.spec(setting), self.run.prediction(setting)
        return {found.key: found.title for found in findings(state, spec, prediction)}

    def _turn(self) -> None:
        if not self._playing and self._at_end:
            self._replay.seek(self._replay.begin or 0.0)
        self._playing = not self._playing
        self._note = ""

    def _change_speed(self, by: int) -> None:
        nearest = min(range(len(SPEEDS)), key=lambda at: abs(SPEEDS[at] - self._speed))
        self._speed = SPEEDS[min(max(nearest + by, 0), len(SPEEDS) - 1)]

    def _go(self, place: Place) -> None:
        replay, at = self._replay, self._replay.at
        if place == "begin":
            self._to("the beginning", lambda: replay.begin)
        elif place == "end":
            self._to("the end", lambda: replay.end if replay.complete else None)
        elif place == "step_before":
            self._to("the step before", lambda: replay.step_before(at) or replay.begin)
        elif place == "step_after":
            self._to("the next step", lambda: replay.step_after(at))
        elif place == "mark_before":
            self._to_mark("the finding before", replay.mark_before(at))
        else:
            self._to("the next finding", lambda: self._mark_time(at))

    def _mark_time(self, at: float) -> float | None:
        mark = self._replay.mark_after(at)
        if mark is not None:
            self._note = mark.title
        return mark.t if mark is not None else None

    def _to_mark(self, words: str, mark: Mark | None) -> None:
        if mark is None:
            self._note = f"there is no {words.removeprefix('the ')}"
            return
        self._to(words, lambda: mark.t)
        self._note = mark.title

    def _to(self, words: str, target: Callable[[], float | None]) -> None:
        """Go there, held; as soon as the run has been read so far."""
        self._playing, self._note = False, ""
        self._going_to, self._pending = words, target

    def _arrive(self) -> None:
        if self._pending is None:
            return
        target = self._pending()
        if target is not None and self._replay.can_reach(target):
            self._replay.seek(target)
        elif self._replay.complete:
            words = self._going_to.removeprefix("the ")
            self._note = f"there is no {words}"
        else:
            return
        self._pending, self._going_to = None, ""

    @property
    def _at_end(self) -> bool:
        return self._replay.complete and self._replay.at >= self._replay.end

    def _read(self) -> RunState:
        replay, now = self._replay, self._clock()
        while self._orders:
            self._orders.popleft()()
        if not replay.complete:
            # The first part at once, so that there is something to show.
            replay.read_on(0.0 if replay.begin is None else _READ_SECONDS)
        self._arrive()
        if self._playing and self._pending is None and replay.begin is not None:
            target = replay.at + (now - self._last) * self._speed
            replay.play_to(min(target, replay.end) if replay.complete else target, _MOST_EVENTS_A_POLL)
            self._playing = not self._at_end
        self._last = now
        return self._with_loss(replay.state)

    def _with_loss(self, state: RunState) -> RunState:
        """At the end of a record without an end: the supervisor is gone, or the run was exported before."""
        if self._at_end and state.ended is None and not self.run.supervisor_alive():
            if self._lost is None or self._lost.now != state.now:
                self._lost = replace(state, status=unended_status(self.run), imported=self.run.is_imported)
            return self._lost
        return state

    def poll_log(self) -> LogText | None:
        """As far as it had been written where the replay stands; whole at the end of the run."""
        source = self._source
        if source not in self._logs:
            words = SUPERVISOR if source == SUPERVISOR else f"rank {source}"
            self._logs[source] = LogAtTime(self.run.log_path(source), words)
        log = self._logs[source]
        if source != self._told:
            log.forget()
        self._told = source
        return log.poll(_ALL_BYTES if self._at_end else log_bytes(self._replay.state, source))

    def position(self) -> ReplayPosition:
        replay = self._replay
        return ReplayPosition(
            at=replay.at,
            begin=replay.begin or 0.0,
            end=replay.end,
            step=replay.state.present_step,
            speed=self._speed,
            playing=self._playing,
            read_share=replay.read_share,
            going_to=self._going_to,
            note=self._note,
            marks=replay.marks,
        )

    @property
    def ended(self) -> bool:
        return self._seen is not None and self._seen.status in ENDED

    @property
    def poll_seconds(self) -> float:
        if not self._replay.complete:
            return _READING_POLL_SECONDS
        return _PLAYING_POLL_SECONDS if self._playing else _HELD_POLL_SECONDS


def follow_replay(feed: ReplayFeed, post: Post, stop: threading.Event, wake: threading.Event) -> None:
    """Poll until `stop`; `wake` makes the next poll come at once."""
    told: ReplayPosition | None = None
    while not stop.is_set():
        try:
            view, text = feed.poll(), feed.poll_log()
        except LlmtopError as error:
            post(FeedFailed(error))
            return
        position = feed.position()
        if view is not None:
            post(ViewArrived(view))
        if text is not None:
            post(LogArrived(text))
        if position != told:
            post(PositionArrived(position))
            told = position
        wake.wait(feed.poll_seconds)
        wake.clear()
