"""The one table of keys: what each screen binds, what its footer shows, and what the help screen lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from textual.binding import BindingType


class Key(NamedTuple):
    """One row: the key, the action that it starts, its word in the footer, and a line of help."""

    key: str
    action: str
    label: str
    help: str
    display: str = ""
    """How the key is written; empty: as Textual writes it."""
    footer: bool = True
    changes: bool = False
    """Whether it changes a run or the machine: gone where somebody only looks on."""
    drop: int = 0
    """In the footer: 0 always stays; the largest goes first when the terminal is narrow."""


APP_KEYS: tuple[Key, ...] = (
    Key("q", "quit", "Quit", "leave llmtop; every run goes on"),
    Key("ctrl+q", "quit", "Quit", "the same, also while typing", display="^q", footer=False),
    Key("r", "runs", "Runs", "the list of runs", drop=9),
    Key("p", "plan", "Plan", "plan a new run", drop=8),
    Key("question_mark", "help", "Help", "this help", display="?"),
    Key("ctrl+p", "command_palette", "", "find a command by its words", display="^p", footer=False),
    Key("colon", "command_palette", "", "", footer=False),
    Key("ctrl+t", "next_theme", "", "the next theme; it is remembered", display="^t", footer=False),
    Key("ctrl+g", "turn_ascii", "", "draw with ASCII alone, or with every sign", display="^g", footer=False),
)

MOVE_KEYS: tuple[Key, ...] = (
    Key("j", "app.as_key('down')", "", "down, and k up, as the arrows", display="j k", footer=False),
    Key("k", "app.as_key('up')", "", "", footer=False),
    Key(
        "h",
        "app.as_key('left')",
        "",
        "left, and l right, where they have no other meaning",
        display="h l",
        footer=False,
    ),
    Key("l", "app.as_key('right')", "", "", footer=False),
    Key("g", "app.as_key('home')", "", "to the beginning, and G to the end", display="g G", footer=False),
    Key("G", "app.as_key('end')", "", "", footer=False),
    Key("ctrl+d", "app.as_key('pagedown')", "", "a page down, and Ctrl-U up", display="^d ^u", footer=False),
    Key("ctrl+u", "app.as_key('pageup')", "", "", footer=False),
)
"""Each is the key of the arrows and pages that it stands for, so it does the same everywhere."""

SHEET_KEYS: tuple[Key, ...] = (
    Key("escape", "dismiss", "Close", "close it", display="Esc"),
    Key("question_mark", "dismiss", "", "", footer=False),
    Key("q", "dismiss", "", "", footer=False),
)

LOAD_KEYS: tuple[Key, ...] = (
    Key("right", "context(1)", "Longer", "twice the tokens of a request, and ← half", display="→"),
    Key("left", "context(-1)", "Shorter", "", display="←"),
    Key("c", "ask_context", "Length", "type the tokens of a request", drop=1),
    Key(
        "up", "requests(1)", "More requests", "twice the requests at a time, and ↓ half", display="↑", drop=2
    ),
    Key("down", "requests(-1)", "Fewer", "", display="↓", drop=2),
    Key("escape", "dismiss(None)", "Close", "back to the plan", display="Esc"),
    Key("q", "dismiss(None)", "", "", footer=False),
    Key("question_mark", "app.help", "Help", "", display="?"),
)
"""Of what a model needs to be loaded, which lies over the plan."""

PICKER_KEYS: tuple[Key, ...] = (
    Key("space", "pick", "Choose", "choose the GPU under the cursor, or not", display="Space"),
    Key("a", "free", "All free", "choose all that nobody uses"),
    Key("enter", "take", "Take them", "plan for the chosen ones, and launch on them", display="⏎"),
    Key("escape", "dismiss(None)", "Close", "back to the plan as it was", display="Esc"),
    Key("q", "dismiss(None)", "", "", footer=False),
    Key("question_mark", "app.help", "Help", "", display="?"),
)
"""Of the GPUs of this machine, which lie over the plan."""

REVIEW_KEYS: tuple[Key, ...] = (
    Key("enter", "launch", "Launch", "start the run and watch it", display="⏎", changes=True),
    Key("y", "launch_anyway", "", "start it though it is predicted not to fit", footer=False, changes=True),
)
"""Of what a launch would do, before the sheet's own."""

RUNS_KEYS: tuple[Key, ...] = (
    Key("enter", "open", "", "watch the run under the cursor", display="⏎", footer=False),
    Key(
        "slash",
        "filter",
        "Filter",
        "only runs that hold what is typed; Esc ends it",
        display="/",
        drop=4,
    ),
    Key("o", "order(1)", "Order", "order by the next column, or click its title", drop=6),
    Key("O", "reverse", "", "turn the order round", footer=False),
    Key("s", "stop", "Stop", "end the run; asks whether to save first", changes=True),
    Key(
        "R",
        "resume",
        "Resume",
        "go on with a run that has ended, after showing from where",
        changes=True,
        drop=2,
    ),
    Key("v", "replay", "Replay", "show the run again as it was recorded", drop=2),
    Key("space", "mark", "Mark", "mark the run for comparing", display="Space", footer=False),
    Key("c", "compare", "Compare", "compare the marked run with this one", drop=3),
    Key("d", "delete", "Delete", "delete a run that has ended, after asking", changes=True, drop=5),
    Key("f5", "refresh", "Refresh", "read the list again now", display="F5", drop=7),
    Key("escape", "back", "", "end the filter, then take back the marks", display="Esc", footer=False),
)

PLAN_KEYS: tuple[Key, ...] = (
    Key("enter", "edit", "", "type or choose the value under the cursor", display="⏎", footer=False),
    Key("left", "step(-1)", "Less", "previous choice, or half the number", display="←", footer=False),
    Key("right", "step(1)", "More", "next choice, or double the number", display="→", footer=False),
    Key("backspace", "reset", "Reset", "back to the recipe's value", display="⌫", drop=2),
    Key("x", "clear", "Clear", "take back all edits", footer=False),
    Key("tab", "app.focus_next", "", "to the prediction, to scroll it, and back", footer=False),
    Key("1", "fix(1)", "Apply", "apply a suggested change, by its number", display="1-5"),
    Key("2", "fix(2)", "", "", footer=False),
    Key("3", "fix(3)", "", "", footer=False),
    Key("4", "fix(4)", "", "", footer=False),
    Key("5", "fix(5)", "", "", footer=False),
    Key("s", "sweep", "Sweep", "micro-batch by ZeRO stage: what fits and how fast; ⏎ takes a cell", drop=5),
    Key("w", "where", "Where", "which GPUs it fits on, how many, how fast; ⏎ takes them", drop=6),
    Key("t", "tune", "Tune", "search for the fastest setting by real trials; ⏎ takes one", drop=10),
    Key("d", "devices", "GPUs", "the GPUs here: who uses which; choose which the run is to have", drop=4),
    Key("v", "load", "Load", "load: what the model needs to answer requests, at each precision", drop=12),
    Key("escape", "cancel_edit", "", "", footer=False),
    Key("L", "review", "Launch", "the command and DeepSpeed's configuration; ⏎ there launches", changes=True),
)

SEARCH_KEYS: tuple[Key, ...] = (
    Key("enter", "take", "Take it", "put what is under the cursor into the plan", display="⏎"),
    Key("escape", "dismiss(None)", "Close", "back to the plan as it was", display="Esc"),
    Key("q", "dismiss(None)", "", "", footer=False),
    Key("question_mark", "app.help", "Help", "", display="?"),
)
"""Of the sweep and of the table of GPUs, which lie over the plan."""

TUNE_KEYS: tuple[Key, ...] = (
    Key("enter", "take", "Take it", "put the setting under the cursor into the plan", display="⏎"),
    Key("s", "search", "Search", "begin the search, or go on with it; it needs no app", changes=True),
    Key("x", "interrupt", "Stop", "end the search and its trial; all trials are kept", changes=True),
    Key("escape", "dismiss(None)", "Close", "back to the plan; a search goes on", display="Esc"),
    Key("q", "dismiss(None)", "", "", footer=False),
    Key("question_mark", "app.help", "Help", "", display="?"),
)
"""Of the search for the fastest setting, which lies over the plan."""

MONITOR_KEYS: tuple[Key, ...] = (
    Key("q", "leave", "Quit (run goes on)", ""),
    Key("s", "stop", "Stop", "end the run; asks whether to save first", changes=True),
    Key("R", "resume", "Resume", "go on with it, once it has ended; shows from where", changes=True),
    Key("l", "open('log')", "Log", "the job's own output; ← → for other ranks, f to follow", drop=5),
    Key("c", "change", "Change", "change the run: batch, stage, kernels, ...", changes=True, drop=6),
    Key(
        "f", "fix", "Fix", "after an out-of-memory: what fits, each with a key to go on with it", changes=True
    ),
    Key("e", "open('changes')", "", "changes: what was asked, predicted, measured; down times", footer=False),
    Key("w", "open('switches')", "Switches", "switches: asked for, really on, what each changed", drop=4),
    Key(
        "z",
        "snapshot",
        "",
        "a closer look: trace, modules, memory; says its cost",
        footer=False,
        changes=True,
    ),
    Key("t", "open('stacks')", "Stacks", "where each rank stands: its Python stacks", footer=False),
    Key("1", "open('memory')", "Panel", "open a panel over the whole screen", display="0-9", drop=1),
    Key("2", "open('components')", "", "", footer=False),
    Key("3", "open('loss')", "", "", footer=False),
    Key("4", "open('steps')", "", "", footer=False),
    Key("5", "open('host')", "", "", footer=False),
    Key("6", "open('links')", "", "", footer=False),
    Key("7", "open('findings')", "", "", footer=False),
    Key("8", "open('log')", "", "", footer=False),
    Key("9", "open('devices')", "GPUs", "the GPUs: activity, power, clocks, heat, errors", footer=False),
    Key(
        "0", "open('startup')", "Start-up", "start-up: how it went; weights, data and tokenizer", footer=False
    ),
    Key("escape", "back", "Back", "from a panel to all panels, then to the runs", display="Esc", drop=2),
    Key("down", "focus_panel(1)", "", "", footer=False),
    Key("up", "focus_panel(-1)", "", "", footer=False),
    Key("right", "focus_panel(1)", "", "", footer=False),
    Key("left", "focus_panel(-1)", "", "", footer=False),
)

HOSTS_KEYS: tuple[Key, ...] = (
    Key("q", "leave", "Quit (run goes on)", ""),
    Key(
        "enter",
        "open",
        "",
        "one host and its ranks; there: one rank, chosen by ← →",
        display="⏎",
        footer=False,
    ),
    Key("m", "monitor", "Monitor", "all ranks of the host", drop=1),
    Key("f", "findings", "Findings", "what stands out among the hosts, with evidence", drop=2),
    Key("s", "stop", "Stop", "end the run; asks whether to save first", changes=True),
    Key("R", "resume", "Resume", "go on with it, once it has ended; shows from where", changes=True),
    Key(
        "slash",
        "filter",
        "Filter",
        "only hosts that hold what is typed; rank12 is its host",
        display="/",
        drop=3,
    ),
    Key("o", "order(1)", "Order", "order by the next column; at first the worst are first", drop=4),
    Key("O", "reverse", "", "turn the order round", footer=False),
    Key("escape", "back", "Back", "to all hosts, then to the runs", display="Esc", drop=5),
)
"""Of a run over hosts."""

REPLAY_KEYS: tuple[Key, ...] = (
    Key("space", "play", "Play", "play, or hold", display="Space"),
    Key("plus", "faster(1)", "Faster", "faster, up to 1000 times", display="+", drop=3),
    Key("equals_sign", "faster(1)", "", "", footer=False),
    Key("minus", "faster(-1)", "Slower", "slower, down to the run's own pace", display="-", drop=4),
    Key("full_stop", "go('step_after')", "Step", "one step on, and , one back", display=".", drop=4),
    Key("comma", "go('step_before')", "", "", footer=False),
    Key("n", "go('mark_after')", "Finding", "to the next finding, and N to the one before", drop=2),
    Key("N", "go('mark_before')", "", "", footer=False),
    Key("t", "to_step", "To step", "to a step by its number", drop=2),
    Key("less_than_sign", "go('begin')", "Begin", "to the beginning", display="<", drop=6),
    Key("greater_than_sign", "go('end')", "End", "to the end", display=">", drop=6),
)

LOG_KEYS: tuple[Key, ...] = (
    Key("left", "turn(-1)", "", "the log of the rank before, → of the next, and the supervisor's",
        display="← →", footer=False),
    Key("right", "turn(1)", "", "", footer=False),
    Key("slash", "search", "", "search; n the next match, N the one before, Esc ends it",
        display="/", footer=False),
    Key("n", "find(1)", "", "", footer=False),
    Key("N", "find(-1)", "", "", footer=False),
    Key("e", "worse", "", "all lines, then warnings and errors, then errors alone", footer=False),
    Key("f", "follow", "", "follow the end, or hold", footer=False),
    Key("escape", "end_search", "", "", footer=False),
)  # fmt: skip
"""Of the opened log; they come before the monitor's."""

FINDINGS_KEYS: tuple[Key, ...] = (
    Key("down", "choose(1)", "", "the next finding, and ↑ the one before", display="↓ ↑", footer=False),
    Key("up", "choose(-1)", "", "", footer=False),
    Key("y", "copy", "", "copy the command that mends it", footer=False),
)

HELP: tuple[tuple[str, tuple[Key, ...]], ...] = (
    ("Everywhere", APP_KEYS),
    ("Runs", RUNS_KEYS),
    ("Plan", PLAN_KEYS),
    ("Sweep and where", SEARCH_KEYS),
    ("Tune", TUNE_KEYS),
    ("Load", LOAD_KEYS),
    ("GPUs of this machine", PICKER_KEYS),
    ("Launch", REVIEW_KEYS),
    ("Monitor", MONITOR_KEYS),
    ("Hosts", HOSTS_KEYS),
    ("Log, opened", LOG_KEYS),
    ("Findings, opened", FINDINGS_KEYS),
    ("Replay", REPLAY_KEYS),
    ("Lists and texts", MOVE_KEYS),
)


_DROPS: dict[tuple[str, str], int] = {
    (title, key.action): key.drop for title, keys in HELP for key in keys if key.footer
}
"""By screen and action: Esc goes back on several, and is of less use on some."""
_DROPS_ANYWHERE: dict[str, int] = {
    action: drop for (_, action), drop in sorted(_DROPS.items(), key=lambda item: -item[1])
}
"""Of a screen that shows keys of others: where it is of most use, as the replay has the monitor's."""
_DROPS["Runs", "plan"] = 1  # from the first screen it is what most people want next


_CHANGING = frozenset(key.action.partition("(")[0] for _, keys in HELP for key in keys if key.changes)


def changes_something(action: str) -> bool:
    """Whether an action, by its name alone, is refused where somebody only looks on."""
    return action in _CHANGING


def leads_here(action: str, title: str) -> bool:
    """Whether an action opens the screen of that title in `HELP`."""
    return action in ("runs", "plan") and action == title.lower()


def of_least_use(actions: Iterable[str], title: str) -> str | None:
    """The action to leave out first of the footer of the screen of that title; None where all stay."""

    def drop(action: str) -> int:
        return _DROPS.get((title, action), _DROPS_ANYWHERE.get(action, 0))

    first = max(actions, key=drop, default=None)
    return first if first is not None and drop(first) else None


def help_for(title: str) -> tuple[tuple[str, tuple[Key, ...]], ...]:
    """All of `HELP`, the keys of the screen of that title first."""
    return tuple(sorted(HELP, key=lambda section: section[0] != title))


def bindings(keys: Iterable[Key]) -> list[BindingType]:
    """As Textual wants them."""
    from textual.binding import Binding

    return [
        Binding(row.key, row.action, row.label, key_display=row.display or None, show=row.footer)
        for row in keys
    ]
