"""The app's look: themes and signs, chosen by key or by name, applied at once, and remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace
from textual.app import App
from textual.filter import LineFilter, Monochrome, NoColor

from llmtop.tui.looks.filters import AsciiFilter, ColourlessFilter, HarmlessFilter
from llmtop.tui.looks.look import THEME_NAMES, Chosen, Look
from llmtop.tui.looks.notes import Noting
from llmtop.tui.looks.theme import MONO, THEMES


class Dress(NamedTuple):
    """How the app looks at first, and what is done when a person chooses otherwise."""

    look: Look = Look()
    chosen: Chosen = Chosen()
    remember: Callable[[Chosen], None] | None = None
    """An OSError of it is told, and harms nothing."""


class Dressed(Noting):
    def __init__(self, dress: Dress) -> None:
        super().__init__()
        self._ascii = AsciiFilter(dress.look.ascii)
        self._harmless = HarmlessFilter()
        self._colourless = ColourlessFilter(dress.look.theme == MONO.name)
        self._chosen, self._remember = dress.chosen, dress.remember
        for theme in THEMES:
            self.register_theme(theme)
        self._put_on(dress.look.theme)

    def _put_on(self, name: str) -> None:
        """Before anything is shown: set as later, the theme would have every style read a second time."""
        self.set_reactive(App.theme, name)
        theme = self.current_theme
        self.stylesheet.set_variables(self.get_css_variables())
        classes = {f"-theme-{theme.name}": True, "-dark-mode": theme.dark, "-light-mode": not theme.dark}
        self.update_classes(classes, update=False)
        self._refresh_truecolor_filter(self.ansi_theme)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's answer to `NO_COLOR` is shades of grey; ours is the theme `mono`."""
        own = (f for f in (self._colourless, self._ascii) if f.enabled)
        others = (f for f in super().get_line_filters() if not isinstance(f, Monochrome | NoColor))
        return [*others, *own, self._harmless]

    @property
    def look(self) -> Look:
        return Look(theme=self.theme, ascii=self._ascii.enabled)

    def action_next_theme(self) -> None:
        at = THEME_NAMES.index(self.theme) if self.theme in THEME_NAMES else -1
        self.action_theme(THEME_NAMES[(at + 1) % len(THEME_NAMES)])

    def action_theme(self, name: str) -> None:
        self._colourless.enabled = name == MONO.name
        self.theme = name
        self._keep(replace(self._chosen, theme=name), f"Theme: {name}")

    def action_turn_ascii(self) -> None:
        """ASCII alone, or every sign."""
        self._ascii.enabled = not self._ascii.enabled
        words = "ASCII alone" if self._ascii.enabled else "every sign"
        self._keep(replace(self._chosen, ascii=self._ascii.enabled), f"Drawn with {words}")

    def _keep(self, chosen: Chosen, words: str) -> None:
        self._chosen = chosen
        for screen in self.screen_stack:
            for widget in (screen, *screen.query("*")):
                widget.refresh()
        self.clear_notifications()
        self.notify(words, markup=False)
        if self._remember is None:
            return
        try:
            self._remember(chosen)
        except OSError as error:
            self.notify(
                f"It cannot be remembered: {error.strerror or error}", severity="warning", markup=False
            )
