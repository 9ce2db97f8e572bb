"""One run, live: panels that follow its record. It reads the run and never owns it."""

from __future__ import annotations

import threading
from typing import ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container
from textual.reactive import reactive
from textual.screen import Screen

from llmtop.profiler.changewords import news
from llmtop.profiler.effects.switches import Measured, read_others
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.tui.feed import FeedFailed, LogArrived, MonitorFeed, OthersArrived, ViewArrived, follow_run
from llmtop.tui.keys import MONITOR_KEYS, bindings
from llmtop.tui.panels.changes import ChangesPanel
from llmtop.tui.panels.components import ComponentsPanel
from llmtop.tui.panels.devices import DevicesPanel
from llmtop.tui.panels.findings import FindingsPanel
from llmtop.tui.panels.host import HostPanel
from llmtop.tui.panels.links import LinksPanel
from llmtop.tui.panels.log import LogPanel
from llmtop.tui.panels.loss import LossPanel
from llmtop.tui.panels.memory import MemoryPanel
from llmtop.tui.panels.stacks import StacksPanel
from llmtop.tui.panels.startup import StartupPanel
from llmtop.tui.panels.steps import StepsPanel
from llmtop.tui.panels.switches import SwitchesPanel
from llmtop.tui.requests import ChangeWanted, FixAsked, RunsAsked, StopAsked
from llmtop.tui.stackrequests import StacksArrived, StacksAsked
from llmtop.tui.view import LogText, RunView
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.paint import harmless
from llmtop.tui.widgets.panel import Panel
from llmtop.tui.widgets.runheader import RunHeader

PANELS: tuple[tuple[str, type[Panel]], ...] = (
    ("memory", MemoryPanel),
    ("components", ComponentsPanel),
    ("startup", StartupPanel),
    ("loss", LossPanel),
    ("steps", StepsPanel),
    ("host", HostPanel),
    ("devices", DevicesPanel),
    ("links", LinksPanel),
    ("findings", FindingsPanel),
    ("log", LogPanel),
    ("switches", SwitchesPanel),
    ("stacks", StacksPanel),
    ("changes", ChangesPanel),
)
"""Identifier to panel, in the order of the grid."""


class MonitorScreen(Screen[None]):
    """All panels at once, or one of them over the whole screen."""

    HELP_TITLE: ClassVar[str] = "Monitor"
    """Of its keys in the help."""
    BINDINGS: ClassVar[list[BindingType]] = bindings(MONITOR_KEYS)
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (64, "-normal"), (130, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]

    view: reactive[RunView | None] = reactive(None, repaint=False)
    log_text: reactive[LogText | None] = reactive(None, repaint=False)
    others: reactive[tuple[Measured, ...] | None] = reactive(None, repaint=False)
    """Runs that differ in one switch; read when their panel is opened."""
    stacks: reactive[str | None] = reactive(None, repaint=False)
    """Where the ranks stood when their panel was opened."""

    IS_LIVE: ClassVar[bool] = True
    """Whether what is shown happens now."""

    def __init__(self, run: RunDir, feed: MonitorFeed | None = None) -> None:
        super().__init__(classes="-starting")
        self.run = run
        self._feed = feed if feed is not None else MonitorFeed(run)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._log = 0
        """Rank whose log is shown; -1 is the supervisor's."""

    def compose(self) -> ComposeResult:
        yield from self.compose_head()
        with Container(id="panels"):
            for name, kind in PANELS:
                panel = kind(id=name).data_bind(MonitorScreen.view)
                if isinstance(panel, LogPanel):
                    panel.data_bind(MonitorScreen.log_text)
                if isinstance(panel, StacksPanel):
                    panel.data_bind(MonitorScreen.stacks)
                if isinstance(panel, SwitchesPanel):
                    panel.data_bind(MonitorScreen.others)
                yield panel
        yield KeyFooter()

    def compose_head(self) -> ComposeResult:
        yield RunHeader().data_bind(MonitorScreen.view)

    def on_mount(self) -> None:
        self.query_one("#memory").focus()
        self._follow()

    def on_unmount(self) -> None:
        self._stop.set()
        self._wake.set()

    @work(thread=True, exclusive=True, group="feed")
    def _follow(self) -> None:
        self.follow()

    def follow(self) -> None:
        """In a thread, until the screen goes."""
        follow_run(self._feed, self.post_message, self._stop, self._wake)

    def on_view_arrived(self, message: ViewArrived) -> None:
        before, status = self.view, message.view.state.status
        self.view = message.view
        self._choose_panels(message.view)
        # What a long record tells while it is read is no news.
        is_news = before is not None and self.IS_LIVE and not before.reading
        if before is not None and is_news and (told := news(before.state, message.view.state)):
            self.notify(harmless(told), timeout=8, markup=False)
        if before is None or (before.state.status in ENDED) != (status in ENDED):
            self._show_who_failed(message.view.state)
            self.refresh_bindings()
            if is_news:
                self.app.bell()

    def _show_who_failed(self, state: RunState) -> None:
        """The log of the rank that a failed run ended by says why; unless a person has chosen another."""
        rank = state.rank_at_fault
        if rank is not None and self._log == 0:
            self._choose_log(rank)

    def _choose_panels(self, view: RunView) -> None:
        """A small overview of a run on GPUs shows these in place of the host, unless it offloads to it."""
        options, state = view.spec.options, view.state
        wanted = {
            "-starting": state.steps_finished == 0 and state.status not in ENDED,
            "-gpu": not view.spec.on_cpu,
            "-offload": options.offload_optimizer != "none" or options.offload_param != "none",
        }
        before = self.classes
        for name, on in wanted.items():
            self.set_class(on, name, update=False)
        # Once for all of them: the styles of every widget are looked up anew.
        if self.classes != before:
            self.update_node_styles()

    @work(thread=True, exclusive=True, group="others")
    def _read_others(self, host: str) -> None:
        self.post_message(OthersArrived(read_others(self.run, host)))

    def on_others_arrived(self, message: OthersArrived) -> None:
        self.others = message.others

    def on_stacks_arrived(self, message: StacksArrived) -> None:
        self.stacks = message.text

    def on_log_arrived(self, message: LogArrived) -> None:
        self.log_text = message.text

    def on_feed_failed(self, message: FeedFailed) -> None:
        words = "\n".join(harmless(line) for line in str(message.error).splitlines())
        self.notify(words, severity="error", markup=False)

    def on_panel_zoom_asked(self, message: Panel.ZoomAsked) -> None:
        self.action_open(message.panel.id or "")

    def on_log_panel_source_turned(self, message: LogPanel.SourceTurned) -> None:
        ranks = self.view.state.world_size if self.view is not None else 1
        # The supervisor's log stands before rank 0's.
        self._choose_log((self._log + 1 + message.by) % (ranks + 1) - 1)

    def _choose_log(self, source: int) -> None:
        self._log = source
        self._feed.choose_log(SUPERVISOR if source < 0 else source)
        self._wake.set()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A run that has ended cannot be stopped and does not go on: those keys leave the footer."""
        if action in ("change", "fix") and not self.IS_LIVE:
            return False
        if action == "fix":
            return self.view is not None and self.view.state.status == "out_of_memory"
        if action in ("stop", "leave", "change"):
            return self.view is None or self.view.state.status not in ENDED
        return True

    def on_key(self, event: events.Key) -> None:
        """A key that the footer has no more of still gets an answer."""
        if self.IS_LIVE and event.key == "s" and not self.check_action("stop", ()):
            self.notify("It has ended already.")

    @property
    def settled(self) -> bool:
        """Whether the run has been read."""
        return self.view is not None and self.log_text is not None

    @property
    def zoomed(self) -> Panel | None:
        return next((panel for panel in self.query(Panel) if panel.zoomed), None)

    def action_open(self, name: str) -> None:
        """Show one panel over the whole screen; its own key again shows all."""
        wanted = self.query_one(f"#{name}", Panel)
        self._zoom(None if wanted.zoomed else wanted)

    def _zoom(self, wanted: Panel | None) -> None:
        self.set_class(wanted is not None, "-zoomed", update=False)
        for panel in self.query(Panel):
            panel.set_class(panel is wanted, "zoomed", update=False)
            panel.zoomed = panel is wanted
        self.update_node_styles()
        if wanted is not None:
            wanted.focus()
        if isinstance(wanted, StacksPanel) and self.view is not None:
            self.stacks = None
            self.post_message(StacksAsked(self.run, self.view.state, self.post_message))
        if isinstance(wanted, SwitchesPanel) and self.view is not None:
            self._read_others(self.view.state.host)

    def action_back(self) -> None:
        if self.zoomed is not None:
            self._zoom(None)
        else:
            self.post_message(RunsAsked())

    def action_focus_panel(self, by: int) -> None:
        if self.zoomed is None:
            if by > 0:
                self.focus_next(Panel)
            else:
                self.focus_previous(Panel)

    async def action_leave(self) -> None:
        await self.app.run_action("quit")

    def action_change(self) -> None:
        if self.view is not None:
            self.post_message(ChangeWanted(self.run, self.view.state))

    def action_fix(self) -> None:
        if self.view is not None:
            self.post_message(FixAsked(self.run, self.view.state))

    def action_stop(self) -> None:
        self.post_message(StopAsked(self.run))
