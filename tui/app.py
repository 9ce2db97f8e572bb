"""The app: which screen is shown, and what the screens may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from textual import work
from textual.app import App
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen

from llmtop.presets.errors import ExitCode, LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.rundir import RunDir, runs_root
from llmtop.profiler.runstate import Status
from llmtop.profiler.units import format_bytes
from llmtop.tui.deeds import Deeds
from llmtop.tui.feed import RunsArrived, ViewArrived
from llmtop.tui.keys import APP_KEYS, bindings
from llmtop.tui.requests import LaunchAsked, MonitorAsked, StopAsked
from llmtop.tui.theme import THEME
from llmtop.tui.view import ENDED, RunView
from llmtop.tui.widgets.dialog import Choice, ChoiceDialog
from llmtop.tui.widgets.paint import harmless

Start = Literal["runs", "plan", "monitor"]

EXIT_CODES: dict[Status, ExitCode] = {
    "failed": ExitCode.JOB_FAILED,
    "lost": ExitCode.JOB_FAILED,
    "out_of_memory": ExitCode.OUT_OF_MEMORY,
}
"""Of a run that was watched to its end; any other state is 0."""


class Launched(Message):
    """A run was started, or could not be."""

    def __init__(self, run: RunDir | None, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.run = run
        self.error = error


class StopAnswered(Message):
    """A run's supervisor was asked to end it."""

    def __init__(self, refusal: str | None, error: LlmtopError | None = None) -> None:
        super().__init__()
        self.refusal = refusal
        self.error = error


class StopDialog(ChoiceDialog):
    """Goes away by itself when its run has ended."""

    def __init__(self, run_id: str, text: Sequence[str], choices: Sequence[Choice]) -> None:
        super().__init__("Stop this run?", text, choices, "go back, the run goes on")
        self.run_id = run_id


class LlmtopApp(App[int]):
    """Runs, plan and monitor; `deeds` is what touches the machine."""

    TITLE = "llmtop"
    CSS_PATH = "theme.tcss"
    ENABLE_COMMAND_PALETTE = False
    NOTIFICATION_TIMEOUT = 3
    """Seconds: a note lies over panels."""
    BINDINGS: ClassVar[list[BindingType]] = bindings(APP_KEYS)

    def __init__(
        self,
        start: Start = "runs",
        run: RunDir | None = None,
        root: Path | None = None,
        recipe: str | None = None,
        *,
        deeds: Deeds | None = None,
    ) -> None:
        super().__init__()
        self.register_theme(THEME)
        self.theme = THEME.name
        self._start = start
        self._run = run
        self._root = root if root is not None else runs_root()
        self._recipe = recipe
        self._watched: RunView | None = None
        """Newest view of the run that was watched last."""
        self.farewell = ""
        """What is printed below the prompt after leaving."""
        self._deeds = deeds if deeds is not None else Deeds()

    def on_mount(self) -> None:
        if self._start == "monitor" and self._run is not None:
            self._watch(self._run)
        elif self._start == "plan":
            self.action_plan()
        else:
            self.action_runs()

    @property
    def settled(self) -> bool:
        """Whether the screen has got the data that it waits for."""
        return bool(getattr(self.screen, "settled", True))

    # --- which screen --------------------------------------------------------------------------

    def _show(self, screen: Screen[None] | str) -> None:
        """In place of what is shown; a dialog over it and notes about it go too."""
        self.clear_notifications()
        while len(self.screen_stack) > 2:
            self.pop_screen()
        if len(self.screen_stack) == 2:
            self.switch_screen(screen)
        else:
            self.push_screen(screen)

    def action_runs(self) -> None:
        if not self.is_screen_installed("runs"):
            from llmtop.tui.screens.runs import RunsScreen

            self.install_screen(RunsScreen(self._root), "runs")
        self._show("runs")

    def action_plan(self) -> None:
        if not self.is_screen_installed("plan"):
            from llmtop.tui.screens.plan import PlanScreen

            self.install_screen(PlanScreen(self._recipe, self._deeds.detect), "plan")
        self._show("plan")

    def action_help(self) -> None:
        from llmtop.tui.screens.help import HelpScreen

        self.push_screen(HelpScreen(getattr(self.screen, "HELP_TITLE", "")))

    def _watch(self, run: RunDir) -> None:
        from llmtop.tui.screens.monitor import MonitorScreen

        self._run = run
        self._show(MonitorScreen(run))

    # --- what screens ask for ------------------------------------------------------------------

    def on_runs_asked(self) -> None:
        self.action_runs()

    def on_monitor_asked(self, message: MonitorAsked) -> None:
        try:
            self._watch(RunDir.open(self._root / message.run_id))
        except LlmtopError as error:
            self.say(error)

    def on_stop_asked(self, message: StopAsked) -> None:
        run = message.run

        def answered(choice: str | None) -> None:
            if choice is not None:
                self._stop(run, choice == "save")

        # Not `s`: a key that is pressed twice must not end a run.
        choices = (
            Choice("c", "save a checkpoint, then stop", "save"),
            Choice("n", "stop without saving", "drop"),
        )
        text = (harmless(run.run_id), "The run ends after the step that it is in.")
        self.push_screen(StopDialog(run.run_id, text, choices), answered)

    @work(thread=True, group="stop")
    def _stop(self, run: RunDir, save: bool) -> None:
        try:
            answered = StopAnswered(self._deeds.stop(run, save))
        except LlmtopError as error:
            answered = StopAnswered(None, error)
        self.post_message(answered)

    def on_stop_answered(self, message: StopAnswered) -> None:
        if message.error is not None:
            self.say(message.error)
        elif message.refusal is not None:
            self.notify(
                harmless(message.refusal), title="Stop refused", severity="error", timeout=8, markup=False
            )
        else:
            self.notify("It ends after the step that it is in.", title="Stop requested")

    def on_launch_asked(self, message: LaunchAsked) -> None:
        spec, prediction = message.spec, message.prediction
        if prediction.fits is not False:
            self._launch(spec, prediction)
            return

        def answered(choice: str | None) -> None:
            if choice == "launch":
                self._launch(spec, prediction)

        text = (
            f"Predicted: needs up to {format_bytes(prediction.needed_bytes)}"
            f" of {format_bytes(prediction.device_memory_bytes)}.",
            "It will most likely run out of memory.",
        )
        choices = (Choice("y", "launch it all the same", "launch"),)
        dialog = ChoiceDialog("This run is not predicted to fit", text, choices, "go back to the plan")
        self.push_screen(dialog, answered)

    @work(thread=True, exclusive=True, group="launch")
    def _launch(self, spec: RunSpec, prediction: Prediction) -> None:
        try:
            launched = Launched(self._deeds.launch(spec, prediction, self._root))
        except LlmtopError as error:
            launched = Launched(None, error)
        self.post_message(launched)

    def on_launched(self, message: Launched) -> None:
        if message.error is not None:
            self.say(message.error)
        elif message.run is not None:
            self._watch(message.run)

    def say(self, error: LlmtopError) -> None:
        """Show what a person can act on."""
        words = "\n".join(harmless(line) for line in str(error).splitlines())
        self.notify(words, severity="error", timeout=8, markup=False)

    # --- the end -------------------------------------------------------------------------------

    def on_view_arrived(self, message: ViewArrived) -> None:
        self._watched = message.view
        self._note_end(message.view.state.run_id, message.view.state.status)

    def on_runs_arrived(self, message: RunsArrived) -> None:
        for row in message.rows:
            self._note_end(row.run_id, row.status)

    def _note_end(self, run_id: str, status: Status) -> None:
        """There is nothing left to ask about a run that has ended."""
        dialog = self.screen
        if status in ENDED and isinstance(dialog, StopDialog) and dialog.run_id == run_id:
            dialog.dismiss(None)
            self.notify(f"The run {_in_words(status)}.")

    def action_help_quit(self) -> None:
        """Control and C by habit: it ends nothing, and says what does."""
        self.clear_notifications()
        if self._watched_goes_on:
            self.notify("The run goes on, also without llmtop.\nq leaves, s stops the run.", timeout=5)
        else:
            self.notify("q leaves llmtop.\nRuns go on without it.", timeout=5)

    @property
    def _watched_goes_on(self) -> bool:
        return self._watched is not None and self._watched.state.status not in ENDED

    async def action_quit(self) -> None:
        """Leave; what was watched goes on."""
        state = self._watched.state if self._watched is not None else None
        if state is not None and self._watched_goes_on:
            self.farewell = f"The run goes on.\nSee it again: llmtop attach {state.run_id}"
            self.exit(int(ExitCode.DONE), message=self.farewell)
        elif state is not None:
            run_id = state.run_id
            self.farewell = f"The run {_in_words(state.status)}.\nIts report: llmtop report {run_id}"
            code = EXIT_CODES.get(state.status, ExitCode.DONE) if self._start == "monitor" else ExitCode.DONE
            self.exit(int(code), message=self.farewell)
        else:
            self.exit(int(ExitCode.DONE))


def _in_words(status: Status) -> str:
    """After `the run`."""
    words = {"out_of_memory": "ran out of memory", "lost": "is lost", "stopped": "was stopped"}
    return words.get(status, status)


def run_app(
    start: Start = "runs", run: RunDir | None = None, root: Path | None = None, recipe: str | None = None
) -> int:
    """Show the app until a person leaves it; the exit code of the run that was watched, or 0."""
    code = LlmtopApp(start, run, root, recipe).run()
    return code if code is not None else int(ExitCode.INTERRUPTED)
