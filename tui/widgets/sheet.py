"""Text over the whole screen that scrolls: help, and answers too long for a panel."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content as Visual
from textual.screen import ModalScreen
from textual.widgets import Static

from llmtop.tui.keys import MOVE_KEYS, SHEET_KEYS, bindings
from llmtop.tui.widgets.content import Content

_LEAST_CELLS = 20
Answer = TypeVar("Answer")


class Sheet(ModalScreen[Answer], Generic[Answer]):
    """Its text is made for the width that there is. Escape, q or its own key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = bindings((*SHEET_KEYS, *MOVE_KEYS))

    def __init__(self, title: str, *, keys: str = "[@click=screen.dismiss]Esc closes[/]") -> None:
        """`keys`, below the text, is markup: a mouse presses them too."""
        super().__init__()
        self._title = title
        self._keys = keys

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="sheet") as box:
            box.border_title = Visual(self._title)
            box.border_subtitle = Visual.from_markup(self._keys)
            yield Static(markup=False)

    def on_mount(self) -> None:
        self.query_one("#sheet").focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._paint)

    def _paint(self) -> None:
        width = self.query_one("#sheet", VerticalScroll).scrollable_content_region.width
        self.query_one("#sheet Static", Static).update(self.text(max(_LEAST_CELLS, width)))

    def text(self, width: int) -> Content:
        """What stands there, in rows of at most `width` columns."""
        raise NotImplementedError
