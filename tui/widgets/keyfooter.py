"""The footer: every key that fits the width, those of least use left out first; help always stays."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

from llmtop.tui.glyphs import spelt
from llmtop.tui.keys import leads_here, of_least_use
from llmtop.tui.look import Look

_EDGE_CELLS = 2
_MARGIN_CELLS = 1


class KeyFooter(Footer):
    """Never longer than the terminal is wide, so that no key is out of sight."""

    def __init__(self) -> None:
        super().__init__(show_command_palette=False, compact=True)

    def compose(self) -> ComposeResult:
        title, look = getattr(self.screen, "HELP_TITLE", ""), getattr(self.app, "look", Look())
        shown = [
            key
            for key in super().compose()
            if not (isinstance(key, FooterKey) and leads_here(key.action, title))
        ]
        for key in shown:
            if isinstance(key, FooterKey) and look.ascii:
                key.key_display = spelt(key.key_display)
        while sum(map(_cells, shown)) > self.app.size.width - _EDGE_CELLS:
            dropped = of_least_use([key.action for key in shown if isinstance(key, FooterKey)])
            if dropped is None:
                break
            shown = [key for key in shown if not (isinstance(key, FooterKey) and key.action == dropped)]
        yield from shown

    def on_resize(self, _: events.Resize) -> None:
        self.refresh(recompose=True)


def _cells(key: object) -> int:
    """A key, its word, and the space after it."""
    if not isinstance(key, FooterKey):
        return 0
    return len(f"{key.key_display} {key.description}".strip()) + _MARGIN_CELLS
