"""The widget of every panel of the monitor: one reactive view in, one painted picture out."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive

from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.painted import Painted
from llmtop.tui.widgets.picture import Picture

_GUTTER_CELLS, _TITLE_ROWS = 1, 1
"""Beside and above the body of an opened panel: its scroll bar, and the title on its border."""


class Panel(Picture, VerticalScroll):
    """A titled area that paints `view`; a repaint happens only when what it shows has changed.

    In the overview a panel shows what fits its few rows; zoomed it shows everything and scrolls.
    Its values do not repaint it by themselves, which would send every cell of it to the terminal.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "zoom", "Open panel", show=False)]

    view: reactive[RunView | None] = reactive(None, repaint=False)
    zoomed: reactive[bool] = reactive(False, repaint=False)

    class ZoomAsked(Message):
        """A person wants this panel over the whole screen."""

        def __init__(self, panel: Panel) -> None:
            super().__init__()
            self.panel = panel

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 - Textual's own name
        super().__init__(id=id, classes="panel")
        self._body = Painted(classes="panel-body")
        self._shown_title = Content()
        self._fitted: tuple[RunView, Size, bool] | None = None
        """What was painted last, for which size, and whether for the whole screen."""
        self._small = Size(0, 0)
        """In the overview, the last time."""

    def compose(self) -> ComposeResult:
        yield self._body

    def on_mount(self) -> None:
        self._show_title(self.titled(""))

    def repaint(self) -> None:
        """Paint again if what would be shown differs from what is shown."""
        self._paint(self.scrollable_content_region.size)

    def fit(self, size: Size) -> None:
        """Paint for a size of the body, unless that was done last: also before the panel has it."""
        before = self._fitted
        if before is None or before[0] is not self.view or before[1:] != (size, self.zoomed):
            self._paint(size)

    def fit_whole(self, room: Size) -> None:
        """For an area that it is about to have for itself."""
        self.fit(Size(room.width - _GUTTER_CELLS, room.height - _TITLE_ROWS))

    def fit_small(self) -> None:
        """For its place in the overview, to which it comes back."""
        self.fit(self._small)

    def _paint(self, size: Size) -> None:
        if self.view is None or size.width <= 0:
            return
        self._fitted = (self.view, size, self.zoomed)
        if not self.zoomed:
            self._small = size
        room = size.width + _GUTTER_CELLS * self.zoomed
        self._show_title(self.title(self.view, room))
        self._body.paint(self.draw(self.view, size.width, size.height), size.width)

    def _show_title(self, title: Content) -> None:
        if title != self._shown_title:
            self._shown_title = title
            self.border_title = title.visualize()

    def watch_view(self) -> None:
        # At once, with the other panels: all of them together are painted in a few milliseconds, and what has
        # changed of the screen is sent once.
        self._keep_up()

    def watch_zoomed(self) -> None:
        self.call_after_refresh(self._keep_up)

    def on_resize(self) -> None:
        self._keep_up()

    def _keep_up(self) -> None:
        # What is hidden keeps the size that it had.
        if self.display:
            self.fit(self.scrollable_content_region.size)

    def action_zoom(self) -> None:
        self.post_message(self.ZoomAsked(self))


@cache
def panel_of(picture: type[Picture]) -> type[Panel]:
    """The widget that shows pictures of a kind, where it needs nothing of its own; named as they are."""
    found: type[Panel] = type(picture.__name__, (picture, Panel), {"__doc__": picture.__doc__})
    return found
