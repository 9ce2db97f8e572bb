"""A run over hosts: all of them, the worst first, and one of them with its ranks. No rank's log is read."""

from __future__ import annotations

import threading
from typing import ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Input

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.hosts import Hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.asking.requests import PartAsked, ResumeWanted, RunsAsked, StopAsked
from llmtop.tui.feeds.feed import FeedFailed
from llmtop.tui.feeds.fleetfeed import FleetArrived, FleetFeed, follow_fleet
from llmtop.tui.feeds.fleetview import FleetView
from llmtop.tui.keys import HOSTS_KEYS, bindings
from llmtop.tui.widgets.columns import Order
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.fleethead import FleetFindings, head_rows
from llmtop.tui.widgets.hostcolumns import COLUMNS, holds, ordered, shown_columns
from llmtop.tui.widgets.hostsheet import HostSheet
from llmtop.tui.widgets.hosttable import HostTable
from llmtop.tui.widgets.keyfooter import KeyFooter
from llmtop.tui.widgets.paint import harmless
from llmtop.tui.widgets.painted import Painted

_EDGE_CELLS = 1


class HostsScreen(Screen[None]):
    HELP_TITLE: ClassVar[str] = "Hosts"
    """Of its keys in the help."""
    BINDINGS: ClassVar[list[BindingType]] = bindings(HOSTS_KEYS)
    VERTICAL_BREAKPOINTS = [(0, "-low"), (30, "-high")]

    def __init__(self, run: RunDir, hosts: Hosts, feed: FleetFeed | None = None, opened: str = "") -> None:
        """`opened`: the host to begin with, in place of all of them."""
        super().__init__()
        self.run = run
        self.hosts = hosts
        self.view: FleetView | None = None
        self.order: Order | None = None
        """None: the worst first."""
        self._feed = feed if feed is not None else FleetFeed(run, hosts)
        self._stop, self._wake = threading.Event(), threading.Event()
        self._words = ""
        self._opened = opened
        self._head = Painted(id="hosts-head")
        self._table, self._sheet, self._found = HostTable(), HostSheet(), FleetFindings()

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._table
        yield self._sheet
        yield self._found
        yield Input(
            placeholder="words of a host, its state or its trouble; rank12", id="hosts-filter", compact=True
        )
        yield KeyFooter()

    def on_mount(self) -> None:
        self._sheet.display = False
        self._table.focus()
        try:
            # The first screen shows what there is, and waits for no thread.
            view = self._feed.poll()
        except LlmtopError as error:
            self.post_message(FeedFailed(error))
            view = None
        if view is not None:
            self.post_message(FleetArrived(view))
        self.call_after_refresh(self._follow)

    def on_unmount(self) -> None:
        self._stop.set()
        self._wake.set()

    @work(thread=True, exclusive=True, group="feed")
    def _follow(self) -> None:
        follow_fleet(self._feed, self.post_message, self._stop, self._wake, getattr(self.app, "link", None))

    @property
    def settled(self) -> bool:
        """Whether the hosts have been read."""
        return self.view is not None

    def on_fleet_arrived(self, message: FleetArrived) -> None:
        before, self.view = self.view, message.view
        if before is None and self._opened in message.view.fleet.hosts:
            self._open(self._opened)
        if before is None or before.going_on != message.view.going_on:
            self.refresh_bindings()
        self._paint()

    def on_feed_failed(self, message: FeedFailed) -> None:
        words = "\n".join(harmless(line) for line in str(message.error).splitlines())
        self.notify(words, severity="error", markup=False)

    def on_resize(self) -> None:
        self._paint()

    def _paint(self) -> None:
        view = self.view
        width = self.size.width - 2 * _EDGE_CELLS
        if view is None or width <= 0:
            return
        badge = bool(getattr(self.app, "read_only", False))
        self._head.paint(Content("\n").join(head_rows(view, width, read_only=badge)), width)
        rows = tuple(row for row in view.rows if holds(row, self._words))
        self._table.show(ordered(rows, self.order), self.order)
        self._found.show(view.findings)
        if self._sheet.display:
            self._sheet.show(view)

    # --- one host --------------------------------------------------------------------------------

    def on_host_table_opened(self, message: HostTable.Opened) -> None:
        self._open(message.name)

    def _open(self, name: str) -> None:
        if self.view is None:
            return
        self._table.choose(name)
        self._table.display, self._sheet.display, self._found.display = False, True, False
        self._sheet.open(name, self.view)
        self._sheet.focus()
        self.refresh_bindings()

    def on_host_sheet_rank_opened(self, message: HostSheet.RankOpened) -> None:
        self.post_message(PartAsked(self.run, self.hosts, message.host, message.rank))

    def action_open(self) -> None:
        """Also from where Enter has no meaning of its own."""
        if not self._sheet.display and not self._found.opened:
            self._table.action_open()

    def action_monitor(self) -> None:
        """Of the host that is shown, or under the cursor."""
        row = self._table.row
        name = self._sheet.host if self._sheet.display else row.name if row is not None else ""
        if name:
            self.post_message(PartAsked(self.run, self.hosts, name))

    def action_back(self) -> None:
        """One thing at a time: the host, what stands out, the filter, the order, the runs."""
        box = self.query_one("#hosts-filter", Input)
        if self._sheet.display:
            self._table.display, self._sheet.display, self._found.display = True, False, True
            self._table.focus()
            self.refresh_bindings()
        elif self._found.opened:
            self.action_findings()
        elif box.has_class("-open"):
            box.value = ""
            box.remove_class("-open")
            self._table.focus()
        elif self.order is not None:
            self.order = None
        else:
            self.post_message(RunsAsked())
        self._paint()

    def action_findings(self) -> None:
        """What stands out over the whole screen, or below the hosts again."""
        opened = not self._found.opened
        self._table.display = not opened
        self._found.set_opened(opened)
        (self._found if opened else self._table).focus()

    # --- finding and ordering --------------------------------------------------------------------

    def action_filter(self) -> None:
        if self._found.opened:
            return
        box = self.query_one("#hosts-filter", Input)
        box.add_class("-open")
        box.focus()

    @on(Input.Changed, "#hosts-filter")
    def _typed(self, event: Input.Changed) -> None:
        self._words = event.value
        self._paint()

    @on(Input.Submitted, "#hosts-filter")
    def _filtered(self) -> None:
        if not self._words.strip():
            self.query_one("#hosts-filter").remove_class("-open")
        self._table.focus()

    def action_order(self, by: int) -> None:
        titles = [None, *(column.title for column in shown_columns(self.size.width))]
        now = titles.index(self.order.title) if self.order is not None and self.order.title in titles else 0
        title = titles[(now + by) % len(titles)]
        column = next((column for column in COLUMNS if column.title == title), None)
        self.order = None if column is None else Order(column.title, column.large_first)
        self._paint()

    def action_reverse(self) -> None:
        if self.order is not None:
            self.order = Order(self.order.title, not self.order.large_first)
            self._paint()

    # --- the run ---------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("stop", "leave"):
            return self.view is None or self.view.going_on
        if action == "resume":
            return self.view is not None and not self.view.going_on and self.view.remote is None
        if action in ("findings", "filter", "order", "reverse"):
            return not self._sheet.display
        return True

    def on_key(self, event: events.Key) -> None:
        """A run on another machine is not gone on with here: what refuses it says where to call it."""
        is_elsewhere = self.view is not None and self.view.remote is not None and not self.view.going_on
        if event.key == "R" and is_elsewhere and not getattr(self.app, "read_only", False):
            self.action_resume()

    def action_resume(self) -> None:
        self.post_message(ResumeWanted(self.run))

    def action_stop(self) -> None:
        self.post_message(StopAsked(self.run))

    async def action_leave(self) -> None:
        await self.app.run_action("quit")
