"""The panel of findings with its cursor."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType
from textual.reactive import reactive

from llmtop.tui.keys import FINDINGS_KEYS, bindings
from llmtop.tui.panels.findings import FindingsPanel
from llmtop.tui.widgets.paint import harmless
from llmtop.tui.widgets.panel import Panel


class FindingsArea(FindingsPanel, Panel):
    BINDINGS: ClassVar[list[BindingType]] = bindings(FINDINGS_KEYS)

    chosen: reactive[tuple[str, str]] = reactive(("", ""), repaint=False)

    def watch_chosen(self) -> None:
        self.repaint()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("choose", "copy"):
            return self.zoomed
        return True

    def action_choose(self, by: int) -> None:
        found = self.view.findings if self.view is not None else ()
        if found:
            one = found[min(max(self.at(found) + by, 0), len(found) - 1)]
            self.chosen = (one.key, one.title)

    def action_copy(self) -> None:
        """By the terminal's own clipboard, which works over SSH where the terminal allows it."""
        found = self.view.findings if self.view is not None else ()
        command = found[self.at(found)].command if found else ""
        if command:
            self.app.copy_to_clipboard(command)
            self.notify(f"copied: {harmless(command)}", markup=False)
        else:
            self.notify("No command does it: see what to change.")
