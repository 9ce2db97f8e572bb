"""What the app does about what its screens ask for: questions where they matter, then deeds in threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from textual import work

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.asking.answers import (
    ChangeAnswered,
    Compared,
    Deleted,
    FixAnswered,
    GoingOnAnswered,
    Launched,
    StopAnswered,
    Weighed,
)
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.asking.requests import (
    ChangeWanted,
    CompareAsked,
    DeleteAsked,
    FixAsked,
    LaunchAsked,
    ResumeWanted,
    RunsChanged,
    SnapshotWanted,
    StopAsked,
)
from llmtop.tui.asking.stackrequests import StacksArrived, StacksAsked
from llmtop.tui.looks.dressing import Dress, Dressed
from llmtop.tui.widgets.dialog import Choice, ChoiceDialog
from llmtop.tui.widgets.paint import harmless

if TYPE_CHECKING:
    from llmtop.profiler.record.snapshotevents import SnapshotParams
    from llmtop.trainer.control import SetParams
    from llmtop.tui.asking.resuming import ResumeWish
    from llmtop.tui.asking.snapshots import SnapshotAnswered


class StopDialog(ChoiceDialog):
    """Goes away by itself when its run has ended."""

    def __init__(self, run_id: str, text: Sequence[str], choices: Sequence[Choice]) -> None:
        super().__init__("Stop this run?", text, choices, "go back, the run goes on")
        self.run_id = run_id


class Answering(Dressed):
    """The app without its screens; `deeds` is what touches the machine."""

    def __init__(self, root: Path, deeds: Deeds, dress: Dress) -> None:
        super().__init__(dress)
        self._root = root
        self._deeds = deeds

    def watch_run(self, run: RunDir) -> None:
        """Show the monitor on a run."""
        raise NotImplementedError

    def on_stop_asked(self, message: StopAsked) -> None:
        from llmtop.tui.asking.stopping import at_the_latest, stop_words

        run = message.run

        def answered(choice: str | None) -> None:
            if choice is not None:
                self._stop(run, choice == "save")

        # Not `s`: a key that is pressed twice must not end a run.
        choices = (
            Choice("c", "save a checkpoint, then stop", "save"),
            Choice("n", f"stop without saving{at_the_latest(run)}", "drop"),
        )
        text = (harmless(run.run_id), f"The run {stop_words(run)}.")
        self.push_screen(StopDialog(run.run_id, text, choices), answered)

    @work(thread=True, group="stop")
    def _stop(self, run: RunDir, save: bool) -> None:
        from llmtop.tui.asking.stopping import stop_words

        try:
            answered = StopAnswered(self._deeds.stop(run, save), words=f"It {stop_words(run)}.")
        except LlmtopError as error:
            answered = StopAnswered(None, error)
        self.post_message(answered)

    @work(thread=True, exclusive=True, group="stacks")
    def on_stacks_asked(self, message: StacksAsked) -> None:
        try:
            text = self._deeds.stacks(message.run, message.state)
        except LlmtopError as error:
            text = str(error)
        message.reply(StacksArrived(text))

    def on_snapshot_wanted(self, message: SnapshotWanted) -> None:
        from llmtop.tui.asking.snapshots import choices, params_of

        run = message.run

        def answered(choice: str | None) -> None:
            if choice is not None:
                self._snapshot(run, params_of(choice))

        try:
            found = choices(run, message.state)
        except LlmtopError as error:
            self.say(error)
            return
        text = ("Rank 0 writes it; the training goes on.", "llmtop snapshot takes other ranks and steps.")
        self.push_screen(ChoiceDialog("Take a closer look?", text, found, "go back"), answered)

    @work(thread=True, group="snapshot")
    def _snapshot(self, run: RunDir, params: SnapshotParams) -> None:
        from llmtop.tui.asking.snapshots import SnapshotAnswered

        try:
            answered = SnapshotAnswered(self._deeds.snapshot(run, params))
        except LlmtopError as error:
            answered = SnapshotAnswered("", error)
        self.post_message(answered)

    def on_snapshot_answered(self, message: SnapshotAnswered) -> None:
        from llmtop.tui.widgets.textsheet import TextSheet

        if message.error is not None:
            self.say(message.error)
        else:
            self.push_screen(TextSheet("Snapshot", message.text))

    def on_stop_answered(self, message: StopAnswered) -> None:
        if message.error is not None:
            self.say(message.error)
        elif message.refusal is not None:
            self.notify(
                harmless(message.refusal), title="Stop refused", severity="error", timeout=8, markup=False
            )
        else:
            self.notify(message.words, title="Stop requested", markup=False)

    def on_change_wanted(self, message: ChangeWanted) -> None:
        from llmtop.trainer.script.unchangeable import require_changeable
        from llmtop.tui.widgets.changeform import ChangeForm

        run = message.run

        def answered(asked: SetParams | None) -> None:
            if asked is not None:
                self._change(run, asked)

        try:
            require_changeable(run)
        except LlmtopError as error:
            self.say(error)
            return
        self.push_screen(ChangeForm(run, message.state), answered)

    @work(thread=True, group="change")
    def _change(self, run: RunDir, asked: SetParams) -> None:
        try:
            answered = ChangeAnswered(self._deeds.change(run, asked))
        except LlmtopError as error:
            answered = ChangeAnswered(None, error)
        self.post_message(answered)

    def on_change_answered(self, message: ChangeAnswered) -> None:
        if message.error is not None:
            self.say(message.error)
        elif message.refusal is None:
            # A refusal is in the record: the monitor tells it, as it tells the end of the change.
            self.notify("The change is under way.", title="Change requested", markup=False)

    def on_fix_asked(self, message: FixAsked) -> None:
        from llmtop.trainer.launch import require_trainer
        from llmtop.tui.asking.fixing import fix_choices, fix_text

        run, state = message.run, message.state
        try:
            require_trainer(run)
        except LlmtopError as error:
            self.say(error)
            return
        choices = fix_choices(run, state)
        if not choices:
            self.notify("No change that it can go on with is predicted to fit; its report says more.")
            return

        def answered(choice: str | None) -> None:
            if choice is not None:
                self._fix(run, state, int(choice))

        dialog = ChoiceDialog(
            "Go on with a change?", fix_text(run, state), choices, "go back, it stays ended"
        )
        self.push_screen(dialog, answered)

    @work(thread=True, exclusive=True, group="fix")
    def _fix(self, run: RunDir, state: RunState, number: int) -> None:
        try:
            self._deeds.fix(run, state, number)
            answered = FixAnswered(run)
        except LlmtopError as error:
            answered = FixAnswered(run, error)
        self.post_message(answered)

    def on_fix_answered(self, message: FixAnswered) -> None:
        if message.error is not None:
            self.say(message.error)
        else:
            self.watch_run(message.run)

    @work(thread=True, exclusive=True, group="resume")
    def on_resume_wanted(self, message: ResumeWanted) -> None:
        run = RunDir(message.run.path)  # whole, also where one of its hosts is shown
        try:
            answered = GoingOnAnswered(run, self._deeds.going_on(run))
        except LlmtopError as error:
            answered = GoingOnAnswered(run, None, error)
        self.post_message(answered)

    def on_going_on_answered(self, message: GoingOnAnswered) -> None:
        from llmtop.tui.widgets.resumeform import ResumeForm

        run, state = message.run, message.state
        if state is None:
            self._refused(message.error)
            return
        if isinstance(self.screen, ResumeForm):
            return  # of a key that was pressed twice while the run was read

        def answered(wish: ResumeWish | None) -> None:
            if wish is not None:
                self._resume(run, state, wish)

        self.push_screen(ResumeForm(run, state), answered)

    @work(thread=True, exclusive=True, group="resume")
    def _resume(self, run: RunDir, state: RunState, wish: ResumeWish) -> None:
        try:
            self._deeds.resume(run, state, wish)
            answered = FixAnswered(run)
        except LlmtopError as error:
            answered = FixAnswered(run, error)
        self.post_message(answered)

    def on_delete_asked(self, message: DeleteAsked) -> None:
        self._weigh(message.run)

    @work(thread=True, exclusive=True, group="weigh")
    def _weigh(self, run: RunDir) -> None:
        try:
            weighed = Weighed(run, self._deeds.weigh(run))
        except LlmtopError as error:
            weighed = Weighed(run, None, error)
        self.post_message(weighed)

    def on_weighed(self, message: Weighed) -> None:
        run = message.run
        if message.load is None:
            self._refused(message.error)
            return

        def answered(choice: str | None) -> None:
            if choice == "delete":
                self._delete(run)

        text = (harmless(run.run_id), f"{message.load.in_words()} would go, and cannot be got back.")
        choices = (Choice("y", "delete it for good", "delete"),)
        self.push_screen(ChoiceDialog("Delete this run?", text, choices, "go back, keep it"), answered)

    @work(thread=True, group="delete")
    def _delete(self, run: RunDir) -> None:
        try:
            deleted = Deleted(run, self._deeds.delete(run))
        except LlmtopError as error:
            deleted = Deleted(run, None, error)
        self.post_message(deleted)

    def on_deleted(self, message: Deleted) -> None:
        if message.load is None:
            self._refused(message.error)
        else:
            self.notify(message.load.in_words(), title="Deleted", markup=False)
        self.screen.post_message(RunsChanged())

    def on_compare_asked(self, message: CompareAsked) -> None:
        self._compare(message.first, message.second)

    @work(thread=True, exclusive=True, group="compare")
    def _compare(self, first: RunDir, second: RunDir) -> None:
        from llmtop.profiler.effects.compare import compare

        try:
            compared = Compared(compare(first, second))
        except LlmtopError as error:
            compared = Compared(None, error)
        self.post_message(compared)

    def on_compared(self, message: Compared) -> None:
        from llmtop.tui.screens.compare import CompareScreen

        if message.found is None:
            self._refused(message.error)
        else:
            self.push_screen(CompareScreen(message.found))

    def on_launch_asked(self, message: LaunchAsked) -> None:
        from llmtop.presets.cautions import cautions
        from llmtop.trainer.dsconfig import deepspeed_config
        from llmtop.tui.asking.launchtext import config_text
        from llmtop.tui.widgets.launchreview import LaunchReview

        def answered(wanted: bool | None) -> None:
            if wanted:
                self._launch(message)

        try:
            config = config_text(deepspeed_config(message.spec))
        except LlmtopError as error:
            self.say(error)
            return
        notes = (*message.notes, *cautions(message.spec, launching=True))
        limit = message.host_limit_bytes
        self.push_screen(LaunchReview(message.prediction, message.command, config, notes, limit), answered)

    @work(thread=True, exclusive=True, group="launch")
    def _launch(self, message: LaunchAsked) -> None:
        asked = (message.spec, message.prediction, self._root, message.visible_devices)
        try:
            launched = Launched(self._deeds.launch(*asked))
        except LlmtopError as error:
            launched = Launched(None, error)
        self.post_message(launched)

    def on_launched(self, message: Launched) -> None:
        if message.error is not None:
            self.say(message.error)
        elif message.run is not None:
            self.watch_run(message.run)

    def _refused(self, error: LlmtopError | None) -> None:
        if error is not None:
            self.say(error)

    def say(self, error: LlmtopError) -> None:
        """Show what a person can act on."""
        words = "\n".join(harmless(line) for line in str(error).splitlines())
        self.notify(words, severity="error", timeout=8, markup=False)
