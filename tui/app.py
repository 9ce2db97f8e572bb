"""The app: which screen is shown, and what the screens may ask for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from textual import work
from textual.actions import ActionParseResult, parse
from textual.binding import BindingType
from textual.command import Provider
from textual.dom import DOMNode
from textual.driver import Driver
from textual.screen import Screen
from textual.worker import get_current_worker

from llmtop.presets.errors import ExitCode, LlmtopError
from llmtop.profiler.fold.runstate import ENDED, RunState, Status
from llmtop.profiler.record.hosts import HostDir, read_hosts
from llmtop.profiler.record.remote import name_here, read_remote
from llmtop.profiler.record.rundir import RunDir, runs_root
from llmtop.tui.asking.answering import Answering, StopDialog
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.asking.readonly import refusing
from llmtop.tui.asking.requests import MonitorAsked, PartAsked, PartCame, ReplayAsked, ReplayWish, TuneAsked
from llmtop.tui.commandlist import KeyCommands
from llmtop.tui.feeds.feed import RunsArrived, ViewArrived
from llmtop.tui.feeds.link import Link, measured
from llmtop.tui.feeds.pace import answer_soon
from llmtop.tui.first.handover import taking_over
from llmtop.tui.first.terminal import First, FirstRuns
from llmtop.tui.hangup import leave_with_the_terminal
from llmtop.tui.keys import APP_KEYS, MOVE_KEYS, bindings, changes_something
from llmtop.tui.looks.dressing import Dress
from llmtop.tui.looks.look import choices_path, look_of, read_choice, write_choice

if TYPE_CHECKING:
    from llmtop.tui.feeds.fleetfeed import FleetArrived

Start = Literal["runs", "plan", "monitor", "replay"]

EXIT_CODES: dict[Status, ExitCode] = {
    "failed": ExitCode.JOB_FAILED,
    "lost": ExitCode.JOB_FAILED,
    "out_of_memory": ExitCode.OUT_OF_MEMORY,
}
"""Of a run that was watched to its end; any other state is 0."""


class LlmtopApp(Answering):
    """Runs, plan and monitor; `deeds` is what touches the machine."""

    TITLE = "llmtop"
    CSS_PATH = "looks/theme.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {KeyCommands}
    BINDINGS: ClassVar[list[BindingType]] = bindings((*APP_KEYS, *MOVE_KEYS))

    def __init__(
        self,
        start: Start = "runs",
        run: RunDir | None = None,
        root: Path | None = None,
        recipe: str | None = None,
        *,
        deeds: Deeds | None = None,
        wish: ReplayWish | None = None,
        read_only: bool = False,
        leads_to: str = "",
        dress: Dress = Dress(),  # noqa: B008 - it is frozen
        first: First | FirstRuns | None = None,
    ) -> None:
        deeds = deeds if deeds is not None else Deeds()
        self.link = Link()
        self._first = first
        """What was read before the app began; the first screen begins with it."""
        super().__init__(
            root if root is not None else runs_root(), refusing(deeds) if read_only else deeds, dress
        )
        # A moved picture is sent as many pictures, and most people look on over SSH.
        self.animation_level = "none"
        self.read_only = read_only
        """Whether this is for looking on: no key changes anything."""
        self.leads_to = leads_to
        """What the command shows once the app is left, in words; empty: nothing."""
        self._start = start
        self._run = run
        self._own = run if start == "monitor" else None
        """The run that the command is about, whatever is looked at beside it."""
        self._recipe = recipe
        self._wish = wish
        self._watched: RunState | None = None
        """Newest state of the run that was watched last."""
        self.farewell = ""
        """What is printed below the prompt after leaving."""

    def get_driver_class(self) -> type[Driver]:
        kind = measured(super().get_driver_class(), self.link)
        taken = self._first.terminal if self._first is not None else None
        return kind if taken is None else taking_over(kind, taken)

    def on_mount(self) -> None:
        # Who is ended from elsewhere gives the terminal back too; a run goes on as after any other leaving.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit, 128 + signal.SIGTERM)
        if self._start == "monitor" and self._run is not None:
            self.watch_run(self._run)
        elif self._start == "replay" and self._run is not None:
            self.replay_run(self._run, self._wish)
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

            first, self._first = self._first, None
            read = (first.feed, first.rows) if isinstance(first, FirstRuns) else (None, ())
            self.install_screen(RunsScreen(self._root, *read), "runs")
        self._show("runs")

    def action_plan(self) -> None:
        if not self.is_screen_installed("plan"):
            from llmtop.tui.screens.plan import PlanScreen

            self.install_screen(PlanScreen(self._recipe, self._deeds.detect, self._deeds.gpus), "plan")
        self._show("plan")

    def action_help(self) -> None:
        from llmtop.tui.screens.help import HelpScreen

        self.push_screen(HelpScreen(getattr(self.screen, "HELP_TITLE", ""), read_only=self.read_only))

    # --- looking on --------------------------------------------------------------------------------

    def _refuses(self, action: str | ActionParseResult) -> bool:
        name = parse(action)[1] if isinstance(action, str) else action[1]
        return self.read_only and changes_something(name)

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Every key, click and palette entry comes this way."""
        if self._refuses(action):
            self.clear_notifications()
            self.notify("Read-only: nothing is changed from here.", severity="warning")
            return True
        return await super().run_action(action, default_namespace, namespaces)

    def _check_action_state(self, action: str, default_namespace: DOMNode) -> bool | None:
        """Of what the footer shows."""
        return False if self._refuses(action) else super()._check_action_state(action, default_namespace)

    def watch_run(self, run: RunDir, opened: str = "") -> None:
        """`opened`: of a run over hosts, the host that is shown at first."""
        self._run = run
        hosts = None if isinstance(run, HostDir) else read_hosts(run)
        if hosts is not None:
            from llmtop.tui.screens.hosts import HostsScreen

            self._show(HostsScreen(run, hosts, opened=opened))
            return
        from llmtop.tui.screens.monitor import MonitorScreen

        first, self._first = self._first, None
        known = first if isinstance(first, First) and first.feed.run is run else None
        self._show(MonitorScreen(run, first=known))

    def replay_run(self, run: RunDir, wish: ReplayWish | None = None) -> None:
        from llmtop.tui.screens.replay import ReplayScreen

        self._show(ReplayScreen(run, wish))

    def on_tune_asked(self, message: TuneAsked) -> None:
        from llmtop.tui.screens.tune import TuneScreen

        self.push_screen(TuneScreen(message.spec, self._root / "tunes", self._deeds), message.taken)

    # --- what screens ask for ------------------------------------------------------------------

    def on_runs_asked(self) -> None:
        """From one host of a run the way back leads to all of them."""
        part = self._run
        if getattr(self.screen, "run", None) is part and isinstance(part, HostDir):
            self.watch_run(RunDir(part.path), opened=part.host.name)
        else:
            self.action_runs()

    def on_part_asked(self, message: PartAsked) -> None:
        from llmtop.profiler.fleet.part import HostPart, RankPart

        host = message.hosts.host(message.host)
        if host is None:
            return
        run, rank = message.run, message.rank
        part = HostPart(run, host) if rank is None else RankPart(run, host, rank)
        if read_remote(run.path) is None:
            self.watch_run(part)
        else:
            self.clear_notifications()
            self.notify(f"What {_part_words(part)} wrote is fetched.", markup=False)
            self._bring(part, self.screen)

    @work(thread=True, exclusive=True, group="bring")
    def _bring(self, part: HostDir, asked_on: Screen[Any]) -> None:
        worker = get_current_worker()
        problem = self._deeds.bring(part, lambda: worker.is_cancelled)
        if not worker.is_cancelled:
            self.post_message(PartCame(part, asked_on, problem))

    def on_part_came(self, message: PartCame) -> None:
        """Unless the person has gone elsewhere meanwhile."""
        if self.screen is not message.asked_on:
            return
        problem, part = message.problem, message.part
        if problem and not part.rank_events():
            self.notify(f"Nothing of it has come: {problem}", severity="error", timeout=8, markup=False)
            return
        self.watch_run(part)
        if problem:
            self.notify(f"Only what came before is shown: {problem}", severity="warning", markup=False)

    def on_monitor_asked(self, message: MonitorAsked) -> None:
        try:
            self.watch_run(RunDir.open(self._root / message.run_id))
        except LlmtopError as error:
            self.say(error)

    def on_replay_asked(self, message: ReplayAsked) -> None:
        try:
            self.replay_run(RunDir.open(self._root / message.run_id))
        except LlmtopError as error:
            self.say(error)

    # --- the end -------------------------------------------------------------------------------

    def on_view_arrived(self, message: ViewArrived) -> None:
        self._watch(message.view.state)

    def on_fleet_arrived(self, message: FleetArrived) -> None:
        self._watch(message.view.state)

    def _watch(self, state: RunState) -> None:
        self._watched = state
        self._note_end(state.run_id, state.status)

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
            self.notify("The run goes on, also without llmtop. q leaves, s stops the run.", timeout=5)
        else:
            self.notify("q leaves llmtop. Runs go on without it.", timeout=5)

    def _name_here(self, run_id: str) -> str:
        for run in (self._run, self._own):
            if run is not None and run.run_id == run_id:
                return name_here(run.path)
        return run_id

    def _left(self) -> RunState | None:
        """Of the run that leaving speaks of: the command's own, as it is by now, or the one watched last."""
        own, watched = self._own, self._watched
        if own is None or (watched is not None and watched.run_id == own.run_id) or not own.path.is_dir():
            return watched
        from llmtop.profiler.fleet.part import part_in_lines
        from llmtop.profiler.record.feed import read_state

        return read_state(part_in_lines(own))

    @property
    def _watched_goes_on(self) -> bool:
        return self._watched is not None and self._watched.status not in ENDED

    async def action_as_key(self, key: str) -> None:
        """A key that stands for another one; done at once, so that the order of fast keys is kept."""
        await self._check_bindings(key)

    async def action_quit(self) -> None:
        """Leave; what was watched goes on."""
        state = self._left()
        if state is not None and state.status not in ENDED:
            self.farewell = f"The run goes on.\nSee it again: llmtop attach {self._name_here(state.run_id)}"
            self.exit(int(ExitCode.DONE), message=self.farewell)
        elif state is not None:
            name = self._name_here(state.run_id)
            self.farewell = f"The run {_in_words(state.status)}.\nIts report: llmtop report {name}"
            code = EXIT_CODES.get(state.status, ExitCode.DONE) if self._start == "monitor" else ExitCode.DONE
            self.exit(int(code), message=self.farewell)
        else:
            self.exit(int(ExitCode.DONE))


def _part_words(part: HostDir) -> str:
    ranks = part.ranks_here
    who = f"rank {ranks.start} of " if ranks is not None and len(ranks) == 1 else ""
    return f"{who}host {part.host.name}"


def _in_words(status: Status) -> str:
    """After `the run`."""
    words = {"out_of_memory": "ran out of memory", "lost": "is lost", "stopped": "was stopped"}
    words["gone"] = "is gone, how it ended is not known"
    words["exported"] = "was exported while it went on"
    return words.get(status, status)


def run_app(
    start: Start = "runs",
    run: RunDir | None = None,
    root: Path | None = None,
    recipe: str | None = None,
    *,
    wish: ReplayWish | None = None,
    read_only: bool = False,
    leads_to: str = "",
    first: First | FirstRuns | None = None,
) -> int:
    """Show the app until a person leaves it; the exit code of the run that was watched, or 0.

    `leads_to` says what the command shows then; `first`: what has been read of the run, or runs, already.
    """
    leave_with_the_terminal()
    answer_soon()
    path = choices_path()
    chosen = read_choice(path)
    dress = Dress(look_of(os.environ, chosen), chosen, partial(write_choice, path))
    app = LlmtopApp(
        start, run, root, recipe, wish=wish, read_only=read_only, leads_to=leads_to, dress=dress, first=first
    )
    code = app.run()
    return code if code is not None else int(ExitCode.INTERRUPTED)
