"""The footer: every key that fits the width, those of least use left out first; help always stays."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import RenderResult
from textual.screen import Screen
from textual.widget import Widget

from llmtop.tui.keys import leads_here
from llmtop.tui.looks.glyphs import spelt
from llmtop.tui.looks.look import Look
from llmtop.tui.widgets.footerkeys import FooterKey, footer, that_fit


class KeyFooter(Widget):
    """One widget for all keys: Textual's own has one for each, which take as long to lay out as a panel.

    Never longer than the terminal is wide, so that no key is out of sight.
    """

    DEFAULT_CSS = """
    KeyFooter { dock: bottom; width: 1fr; height: 1; padding: 0 1; background: $panel; color: $foreground; }
    """
    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__()
        self._keys: tuple[FooterKey, ...] = ()

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_changed)

    def on_unmount(self) -> None:
        self.screen.bindings_updated_signal.unsubscribe(self)

    def _bindings_changed(self, screen: Screen[object]) -> None:
        if screen.app.app_focus and self.is_attached and screen is self.screen:
            self._choose()

    def on_resize(self, _: events.Resize) -> None:
        self._choose()

    def _choose(self) -> None:
        keys = self._that_fit()
        if keys != self._keys:
            self._keys = keys
            self.refresh()

    def _that_fit(self) -> tuple[FooterKey, ...]:
        return that_fit(self._all(), self.content_size.width, getattr(self.screen, "HELP_TITLE", ""))

    def _all(self) -> list[FooterKey]:
        """Of several keys with one action the first."""
        title, look = getattr(self.screen, "HELP_TITLE", ""), getattr(self.app, "look", Look())
        found: dict[str, FooterKey] = {}
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if binding.show and binding.action not in found and not leads_here(binding.action, title):
                display = self.app.get_key_display(binding)
                found[binding.action] = FooterKey(
                    key=binding.key,
                    display=spelt(display) if look.ascii else display,
                    word=binding.description,
                    action=binding.action,
                    enabled=active.enabled,
                )
        return list(found.values())

    def render(self) -> RenderResult:
        return footer(self._keys)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        key = _key_at(self._keys, event.get_content_offset_capture(self).x)
        if key is None:
            return
        if key.enabled:
            self.app.simulate_key(key.key)
        else:
            self.app.bell()


def _key_at(keys: Sequence[FooterKey], column: int) -> FooterKey | None:
    """None in the space between two keys and behind the last."""
    begin = 0
    for key in keys:
        if begin <= column < begin + key.cells - 1:
            return key
        begin += key.cells
    return None
