"""A driver of the toolkit's that takes over a terminal on which the first picture stands."""

from __future__ import annotations

from typing import Any

from textual.driver import Driver

from llmtop.tui.first.terminal import ENTER, TakenTerminal


def taking_over(kind: type[Driver], taken: TakenTerminal) -> type[Driver]:
    """Without clearing the screen once more, and so that it gives back what was before the picture."""

    class TakingDriver(kind):  # type: ignore[valid-type,misc]  # the kind is known when the app starts
        attrs_before: list[Any] | None

        def write(self, data: str) -> None:
            if taken.handed_over or data != ENTER:
                super().write(data)

        def start_application_mode(self) -> None:
            super().start_application_mode()
            if not taken.handed_over:
                self.attrs_before = taken.hand_over()

    return TakingDriver
