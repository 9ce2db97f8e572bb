"""How soon a key is answered: what Textual and the interpreter have otherwise for want of knowing the app."""

from __future__ import annotations

import os
import selectors
import sys
from types import SimpleNamespace

from textual import constants, screen
from textual.drivers import linux_driver

ESCAPE_SECONDS = 0.015
"""After Esc, for the rest of a key that begins like it: Textual has 0.1. A terminal sends such a key in one
piece, over SSH too. The variable ESCDELAY says otherwise, in milliseconds."""
FRAME_SECONDS = 1 / 120
"""Between a change and its painting at most: half of Textual's, as the screen is painted seldom. The
variable TEXTUAL_FPS says otherwise."""
SWITCH_SECONDS = 0.001
"""A fifth of Python's: a key waits for the thread that reads the run no longer than that."""


class KeySelector(selectors.SelectSelector):
    """Looks again soon after input: Textual looks each tenth of a second whether an Esc was meant."""

    _had_input = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(ESCAPE_SECONDS if self._had_input else timeout)
        self._had_input = bool(found)
        return found


def answer_soon() -> None:
    """Before the app is made."""
    if "ESCDELAY" not in os.environ:
        constants.ESCAPE_DELAY = 0.9 * ESCAPE_SECONDS  # type: ignore[misc]  # Final, and read at each Esc
        names = SimpleNamespace(SelectSelector=KeySelector, EVENT_READ=selectors.EVENT_READ)
        setattr(linux_driver, "selectors", names)  # noqa: B010 - a module's name; the thread of the keys asks it
    if "TEXTUAL_FPS" not in os.environ:
        screen.UPDATE_PERIOD = FRAME_SECONDS  # type: ignore[misc]  # Final, and read for each screen
    sys.setswitchinterval(SWITCH_SECONDS)
