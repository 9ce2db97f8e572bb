"""The monitor on a recorded run: the same panels, fed by what was written, at any time of the run."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType

from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.asking.requests import ReplayWish
from llmtop.tui.feeds.feed import ViewArrived
from llmtop.tui.feeds.replaying import Place, PositionArrived, ReplayFeed, ReplayPosition, follow_replay
from llmtop.tui.keys import REPLAY_KEYS, bindings, changes_something
from llmtop.tui.screens.monitor import MonitorScreen
from llmtop.tui.widgets.asknumber import AskNumber
from llmtop.tui.widgets.replaybar import ReplayBar
from llmtop.tui.widgets.runheader import RunHeader


class ReplayScreen(MonitorScreen):
    """Nothing here reaches a run: what would change one is gone."""

    HELP_TITLE: ClassVar[str] = "Replay"
    BINDINGS: ClassVar[list[BindingType]] = bindings(REPLAY_KEYS)
    IS_LIVE: ClassVar[bool] = False

    def __init__(self, run: RunDir, wish: ReplayWish | None = None) -> None:
        self._replay = ReplayFeed(run, wish)
        super().__init__(run, self._replay)
        self.position: ReplayPosition | None = None

    def compose_head(self) -> ComposeResult:
        yield RunHeader(self._recorded_time).data_bind(MonitorScreen.view)
        yield ReplayBar()

    def _recorded_time(self) -> float:
        return self.position.at if self.position is not None else 0.0

    def follow(self) -> None:
        follow_replay(self._replay, self.post_message, self._stop, self._wake)

    def on_view_arrived(self, message: ViewArrived) -> None:
        # Nothing has happened just now: the app is not told.
        message.stop()

    def on_position_arrived(self, message: PositionArrived) -> None:
        self.position = message.position
        self.query_one(ReplayBar).show(message.position)
        self.query_one(RunHeader).repaint()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        hidden = action == "leave" or changes_something(action)
        return False if hidden else super().check_action(action, parameters)

    def on_key(self, event: events.Key) -> None:
        if event.key == "s":
            self.notify("This is a replay: what it shows is over.")

    def action_play(self) -> None:
        self._replay.play()
        self._wake.set()

    def action_faster(self, by: int) -> None:
        self._replay.faster(by)
        self._wake.set()

    def action_go(self, place: Place) -> None:
        self._replay.go(place)
        self._wake.set()

    def action_to_step(self) -> None:
        def answered(step: int | None) -> None:
            if step is not None:
                self._replay.to_step(step)
                self._wake.set()

        steps = self.run.spec().steps_planned
        words = "A number from 1 on" if steps is None else f"A number from 1 to {steps}"
        self.app.push_screen(AskNumber("Go to a step", words), answered)
