"""One run, live: panels that follow its record. It reads the run and never owns it."""

from __future__ import annotations

import threading
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container
from textual.reactive import reactive
from textual.screen import Screen

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.changewords import news
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.tui.areas.findings import FindingsArea
from llmtop.tui.areas.log import LogArea
from llmtop.tui.areas.loss import LossArea
from llmtop.tui.areas.steps import StepsArea
from llmtop.tui.asking.requests import (
    ChangeWanted,
    FixAsked,
    ResumeWanted,
    RunsAsked,
    SnapshotWanted,
    StopAsked,
)
from llmtop.tui.asking.stackrequests import StacksArrived, StacksAsked
from llmtop.tui.feeds.feed import FeedFailed, LogArrived, OthersArrived, ViewArrived, follow_run
from llmtop.tui.feeds.monitorfeed import MonitorFeed
from llmtop.tui.feeds.view import LogText, RunView
from llmtop.tui.keys import MONITOR_KEYS, bindings
from llmtop.tui.offers import offers, panel_classes
from llmtop.tui.panels.components import ComponentsPanel
from llmtop.tui.panels.devices import DevicesPanel
from llmtop.tui.panels.host import HostPanel
from llmtop.tui.panels.links import LinksPanel
from llmtop.tui.panels.memory import MemoryPanel
from llmtop.tui.panels.startup import StartupPanel
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.paint import harmless
from llmtop.tui.widgets.panel import Panel, panel_of
from llmtop.tui.widgets.runheader import RunHeader

if TYPE_CHECKING:
    from llmtop.profiler.effects.switches import Measured
    from llmtop.tui.first.terminal import First

PANELS: tuple[tuple[str, type[Panel]], ...] = (
    ("memory", panel_of(MemoryPanel)),
    ("components", panel_of(ComponentsPanel)),
    ("startup", panel_of(StartupPanel)),
    ("loss", LossArea),
    ("steps", StepsArea),
    ("host", panel_of(HostPanel)),
    ("devices", panel_of(DevicesPanel)),
    ("links", panel_of(LinksPanel)),
    ("findings", FindingsArea),
    ("log", LogArea),
)
"""Identifier to panel, in the order of the grid."""
OPENED_PANELS = {"switches": "SwitchesPanel", "stacks": "StacksPanel", "changes": "ChangesPanel"}
"""Those that only a key shows, by module and class: they are loaded and made when they are opened first."""
_ENDING_KEYS = {"s": "stop", "c": "change", "z": "snapshot"}
"""Keys of what only a run that goes on can be asked."""
_OWN_VALUES = {"switches": ("others",), "stacks": ("stacks",)}
"""Of those, what they show besides the run."""


def opened_panel(name: str) -> type[Panel]:
    kind: type[Panel] = getattr(import_module(f"llmtop.tui.panels.{name}"), OPENED_PANELS[name])
    return kind


def all_panels() -> tuple[tuple[str, type[Panel]], ...]:
    """Identifier to panel, for every panel that has a key."""
    return (*PANELS, *((name, opened_panel(name)) for name in OPENED_PANELS))


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

    def __init__(self, run: RunDir, feed: MonitorFeed | None = None, first: First | None = None) -> None:
        """`first`: what has been read of it already."""
        super().__init__(classes="-starting")
        self.run = run
        self._first = first
        self._feed = first.feed if first is not None else feed if feed is not None else MonitorFeed(run)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._log = 0
        """Rank whose log is shown; -1 is the supervisor's."""
        self._told: RunView | None = None
        """The newest view that `on_view_arrived` has seen."""
        self._problem: LlmtopError | None = None
        """Why the first view could not be read."""

    def compose(self) -> ComposeResult:
        self._take_size()
        if self.IS_LIVE:
            self._read_first()
        yield from self.compose_head()
        with Container(id="panels"):
            for name, kind in PANELS:
                if name == "startup" and not self.has_class("-starting"):
                    continue  # made when its key is pressed, or the run is gone on with
                panel = kind(id=name).data_bind(MonitorScreen.view)
                if isinstance(panel, LogArea):
                    panel.data_bind(MonitorScreen.log_text)
                yield panel
        yield KeyFooter()

    def _read_first(self) -> None:
        """What the first screen shows: it is laid out, dressed and painted once, as it will stay."""
        try:
            first, self._first = self._first, None
            view, text = first[1:3] if first is not None else (self._feed.poll(), self._feed.poll_log())
        except LlmtopError as error:
            self._problem = error
            return
        self.set_reactive(MonitorScreen.view, view)
        self.set_reactive(MonitorScreen.log_text, text)
        for name, on in panel_classes(view).items() if view is not None else ():
            self.set_class(on, name, update=False)

    def _take_size(self) -> None:
        """Else the screen is dressed for no size first, and once more for its own."""
        width, height = self.app.size
        for name in (
            *self._get_breakpoint_classes(width, self.HORIZONTAL_BREAKPOINTS),
            *self._get_breakpoint_classes(height, self.VERTICAL_BREAKPOINTS),
        ):
            self.set_class(True, name, update=False)

    async def _panel(self, name: str) -> Panel:
        """The panel of that name, made now where it was not opened before."""
        for found in self.query(f"#{name}").results(Panel):
            return found
        panel = (dict(PANELS).get(name) or opened_panel(name))(id=name)
        if name == "startup":
            await self.query_one("#panels").mount(panel, before="#loss")
        else:
            await self.query_one("#panels").mount(panel)
        for value in ("view", *_OWN_VALUES.get(name, ())):
            panel.watch(self, value, partial(setattr, panel, value))
        return panel

    def compose_head(self) -> ComposeResult:
        header = RunHeader().data_bind(MonitorScreen.view)
        header.set_reactive(RunHeader.view, self.view)
        yield header

    def on_mount(self) -> None:
        self.query_one("#memory").focus()
        if self.view is not None:
            self.post_message(ViewArrived(self.view))
        if self._problem is not None:
            self.post_message(FeedFailed(self._problem))
        # What the first screen shows has been read; its painting waits for no thread.
        self.call_after_refresh(self._follow)

    def on_unmount(self) -> None:
        self._stop.set()
        self._wake.set()

    @work(thread=True, exclusive=True, group="feed")
    def _follow(self) -> None:
        self.follow()

    def follow(self) -> None:
        """In a thread, until the screen goes."""
        follow_run(self._feed, self.post_message, self._stop, self._wake, getattr(self.app, "link", None))

    def on_view_arrived(self, message: ViewArrived) -> None:
        before, status = self._told, message.view.state.status
        if before is None and self._log == 0 and message.view.state.first_rank:
            self._choose_log(message.view.state.first_rank)  # rank 0 is on another host
        self.view = self._told = message.view
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
        if rank is not None and rank in state.ranks_here and self._log == state.first_rank:
            self._choose_log(rank)

    def _choose_panels(self, view: RunView) -> None:
        """By the run that is watched."""
        before = self.classes
        for name, on in panel_classes(view).items():
            self.set_class(on, name, update=False)
        # Once for all of them: the styles of every widget are looked up anew.
        if self.classes != before:
            self.update_node_styles()
        if self.has_class("-starting") and not self.query("#startup"):
            self.call_later(self._panel, "startup")

    @work(thread=True, exclusive=True, group="others")
    def _read_others(self, host: str) -> None:
        from llmtop.profiler.effects.switches import read_others

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

    async def on_panel_zoom_asked(self, message: Panel.ZoomAsked) -> None:
        await self.action_open(message.panel.id or "")

    def on_log_area_source_turned(self, message: LogArea.SourceTurned) -> None:
        ranks = self.view.state.ranks_here if self.view is not None else range(1)
        # The supervisor's log stands before those of the ranks.
        sources = (-1, *ranks)
        at = sources.index(self._log) if self._log in sources else 0
        self._choose_log(sources[(at + message.by) % len(sources)])

    def _choose_log(self, source: int) -> None:
        self._log = source
        self._feed.choose_log(SUPERVISOR if source < 0 else source)
        self._wake.set()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A run that has ended cannot be stopped and does not go on: those keys leave the footer."""
        if action in ("change", "fix", "resume", "snapshot") and not self.IS_LIVE:
            return False
        return offers(action, self.view)

    def on_key(self, event: events.Key) -> None:
        """A key that the footer has no more of still gets an answer."""
        if not self.IS_LIVE or getattr(self.app, "read_only", False):
            return  # what changes something is refused in other words, or is no key here
        if event.key == "R" and self.view is not None:
            if not self.check_action("resume", ()):
                self._say_why_not_resumed(self.view)
            return
        if event.key == "f" and self.view is not None and self.view.state.elsewhere:
            if self.view.state.status == "out_of_memory":
                self.action_fix()  # what it is refused with says where to call it
            return
        action = _ENDING_KEYS.get(event.key)
        if action == "change" and self.view is not None and self.view.state.status not in ENDED:
            if not self.check_action(action, ()):
                self.action_change()  # what it is refused with says how it is changed
            return
        if action is not None and not self.check_action(action, ()):
            more = " R goes on with it." if self.check_action("resume", ()) else ""
            self.notify(f"It has ended already.{more}")

    def _say_why_not_resumed(self, view: RunView) -> None:
        if view.state.status in ENDED:
            self.action_resume()  # what it is refused with says more
        else:
            self.notify("It goes on already.")

    @property
    def settled(self) -> bool:
        """Whether the run has been read."""
        return self.view is not None and self.log_text is not None

    @property
    def zoomed(self) -> Panel | None:
        return next((panel for panel in self.query(Panel) if panel.zoomed), None)

    async def action_open(self, name: str) -> None:
        """Show one panel over the whole screen; its own key again shows all."""
        wanted = await self._panel(name)
        self._zoom(None if wanted.zoomed else wanted)

    def _zoom(self, wanted: Panel | None) -> None:
        self.set_class(wanted is not None, "-zoomed", update=False)
        area = self.query_one("#panels")
        for panel in self.query(Panel):
            panel.set_class(panel is wanted, "zoomed", update=False)
            panel.zoomed = panel is wanted
            # Painted for their new size before they have it: the screen is laid out and written once.
            if panel is wanted:
                panel.fit_whole(area.region.shrink(area.styles.padding).size)
            elif wanted is None:
                panel.fit_small()
        self.update_node_styles()
        if wanted is not None:
            wanted.focus()
        name = wanted.id if wanted is not None else ""
        if name == "stacks" and self.view is not None:
            self.stacks = None
            self.post_message(StacksAsked(self.run, self.view.state, self.post_message))
        if name == "switches" and self.view is not None:
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

    def action_snapshot(self) -> None:
        if self.view is not None:
            self.post_message(SnapshotWanted(self.run, self.view.state))

    def action_fix(self) -> None:
        if self.view is not None:
            self.post_message(FixAsked(self.run, self.view.state))

    def action_resume(self) -> None:
        self.post_message(ResumeWanted(self.run))

    def action_stop(self) -> None:
        self.post_message(StopAsked(self.run))
