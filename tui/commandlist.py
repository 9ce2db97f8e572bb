"""The command palette: every row of the table of keys that can be used now, and the looks, found by words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.dom import DOMNode

from llmtop.profiler.record.hosts import HostDir
from llmtop.profiler.record.remote import name_here
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.keys import APP_KEYS, HELP, MONITOR_KEYS, Key
from llmtop.tui.looks.look import THEME_NAMES
from llmtop.tui.widgets.paint import fit, harmless

_KEY_CELLS = 6


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
        yield from self._shell_entries()
        for theme in THEME_NAMES:
            yield Entry(f"theme: {theme}", "", partial(self.app.run_action, f"theme('{theme}')", self.app))

    def _shell_entries(self) -> Iterator[Entry]:
        """What is done with the run that is shown from a shell: choosing one copies the command."""
        run = getattr(self.screen, "run", None)
        if not isinstance(run, RunDir) or isinstance(run, HostDir):
            return
        for command, words in shell_commands(name_here(run.path)):
            yield Entry(f"{words}: {command}", "", partial(self._copy, command))

    def _copy(self, command: str) -> None:
        self.app.copy_to_clipboard(command)
        self.app.notify(harmless(command), title="Copied, for a shell", timeout=8, markup=False)

    async def discover(self) -> Hits:
        for entry in self._entries():
            yield DiscoveryHit(_row(entry.key, Content(entry.words)), entry.run, text=entry.words)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for entry in self._entries():
            score = matcher.match(entry.words)
            if score > 0:
                row = _row(entry.key, matcher.highlight(entry.words))
                yield Hit(score, row, entry.run, text=entry.words)


def shell_commands(name: str) -> Iterator[tuple[str, str]]:
    """Each with what it does."""
    yield f"llmtop report {name}", "report: the whole account of the run, in a shell"
    yield f"llmtop export {name}", "export: the run as a file for others, in a shell"


def _row(key: str, words: Content) -> Content:
    """The key before what it does, in one row: a list of keys is read by its first column."""
    return Content.assemble((fit(key, _KEY_CELLS), "$text-accent"), words)


def _words(key: Key) -> str:
    if not key.help or key.help.casefold().startswith(key.label.casefold()):
        return key.help or key.label
    return f"{key.label}: {key.help}" if key.label else key.help
