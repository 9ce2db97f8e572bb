"""The command palette: every row of the table of keys that can be used now, and the looks, found by words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.dom import DOMNode

from llmtop.tui.keys import APP_KEYS, HELP, MONITOR_KEYS, Key
from llmtop.tui.looks.look import THEME_NAMES


class Entry(NamedTuple):
    words: str
    key: str
    """Pressed instead; empty where there is none."""
    run: Callable[[], object]


class KeyCommands(Provider):
    """Of the screen below the palette, then of the app."""

    def _entries(self) -> Iterator[Entry]:
        title = getattr(self.screen, "HELP_TITLE", "")
        rows = next((keys for name, keys in HELP if name == title), ())
        if title == "Replay":
            own = {key.key for key in rows}
            rows = (*rows, *(key for key in MONITOR_KEYS if key.key not in own))
        for key in (*rows, *APP_KEYS):
            place: DOMNode = self.app if key in APP_KEYS else self.screen
            if (key.help or key.label) and self.app._check_action_state(key.action, place):
                yield Entry(
                    _words(key), key.display or key.key, partial(self.app.run_action, key.action, place)
                )
        for theme in THEME_NAMES:
            yield Entry(f"theme: {theme}", "", partial(self.app.run_action, f"theme('{theme}')", self.app))

    async def discover(self) -> Hits:
        for entry in self._entries():
            yield DiscoveryHit(entry.words, entry.run, help=entry.key or None)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for entry in self._entries():
            score = matcher.match(entry.words)
            if score > 0:
                yield Hit(score, matcher.highlight(entry.words), entry.run, help=entry.key or None)


def _words(key: Key) -> str:
    if not key.help:
        return key.label
    return f"{key.label}: {key.help}" if key.label else key.help
