"""The one table of keys: what each screen binds, what its footer shows, and what the help screen lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from textual.binding import Binding, BindingType


class Key(NamedTuple):
    """One row: the key, the action that it starts, its word in the footer, and a line of help."""

    key: str
    action: str
    label: str
    help: str
    display: str = ""
    """How the key is written; empty: as Textual writes it."""
    footer: bool = True


APP_KEYS: tuple[Key, ...] = (
    Key("q", "quit", "Quit", "leave llmtop; every run goes on"),
    Key("ctrl+q", "quit", "Quit", "the same, also while typing", footer=False),
    Key("r", "runs", "Runs", "the list of runs"),
    Key("p", "plan", "Plan", "plan a new run"),
    Key("question_mark", "help", "Help", "this help", display="?"),
)

RUNS_KEYS: tuple[Key, ...] = (
    Key("enter", "open", "", "watch the run under the cursor", display="⏎", footer=False),
    Key("s", "stop", "Stop", "end the run under the cursor; asks whether to save first"),
    Key("f5", "refresh", "Refresh", "read the list again now", display="F5"),
)

PLAN_KEYS: tuple[Key, ...] = (
    Key("enter", "edit", "", "type or choose the value under the cursor", display="⏎", footer=False),
    Key("left", "step(-1)", "Less", "previous choice, or half the number", display="←", footer=False),
    Key("right", "step(1)", "More", "next choice, or double the number", display="→", footer=False),
    Key("backspace", "reset", "Reset", "back to the recipe's value", display="⌫"),
    Key("x", "clear", "Clear", "take back all edits", footer=False),
    Key("tab", "app.focus_next", "", "to the prediction, to scroll it, and back", footer=False),
    Key("1", "fix(1)", "Apply", "apply a suggested change; 1 is the cheapest", display="1-5"),
    Key("2", "fix(2)", "", "", footer=False),
    Key("3", "fix(3)", "", "", footer=False),
    Key("4", "fix(4)", "", "", footer=False),
    Key("5", "fix(5)", "", "", footer=False),
    Key("escape", "cancel_edit", "", "", footer=False),
    Key("l", "launch", "Launch", "start the run and watch it"),
)

MONITOR_KEYS: tuple[Key, ...] = (
    Key("q", "leave", "Quit (run goes on)", ""),
    Key("s", "stop", "Stop", "end the run; asks whether to save first"),
    Key("l", "open('log')", "Log", "the job's own output; ← → for other ranks, f to follow"),
    Key("1", "open('memory')", "Panel", "open a panel over the whole screen", display="1-9"),
    Key("2", "open('components')", "", "", footer=False),
    Key("3", "open('loss')", "", "", footer=False),
    Key("4", "open('steps')", "", "", footer=False),
    Key("5", "open('host')", "", "", footer=False),
    Key("6", "open('links')", "", "", footer=False),
    Key("7", "open('findings')", "", "", footer=False),
    Key("8", "open('log')", "", "", footer=False),
    Key("9", "open('devices')", "GPUs", "the GPUs: activity, power, clocks, heat, errors", footer=False),
    Key("w", "open('switches')", "Switches", "asked for, really on, what each changed", footer=False),
    Key("0", "open('startup')", "Start-up", "how the start went; weights, data and tokenizer", footer=False),
    Key("escape", "back", "Back", "from a panel to all panels, from there to the runs", display="Esc"),
    Key("down", "focus_panel(1)", "", "", footer=False),
    Key("up", "focus_panel(-1)", "", "", footer=False),
    Key("right", "focus_panel(1)", "", "", footer=False),
    Key("left", "focus_panel(-1)", "", "", footer=False),
)

HELP: tuple[tuple[str, tuple[Key, ...]], ...] = (
    ("Everywhere", APP_KEYS),
    ("Runs", RUNS_KEYS),
    ("Plan", PLAN_KEYS),
    ("Monitor", MONITOR_KEYS),
)


def bindings(keys: Iterable[Key]) -> list[BindingType]:
    """As Textual wants them."""
    return [
        Binding(row.key, row.action, row.label, key_display=row.display or None, show=row.footer)
        for row in keys
    ]
