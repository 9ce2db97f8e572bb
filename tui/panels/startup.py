"""The start of a run as a timeline: which stage each rank is in, and how long each took."""

from __future__ import annotations

from textual.content import Content

from llmtop.profiler.runstate import RankState
from llmtop.profiler.units import format_seconds
from llmtop.tui.view import RunView
from llmtop.tui.widgets.inputrows import input_rows
from llmtop.tui.widgets.paint import fit, fit_right, harmless, lines
from llmtop.tui.widgets.panel import Panel

STAGES: dict[str, str] = {
    "import": "import torch and DeepSpeed",
    "process_group": "join the ranks",
    "model": "build the model",
    "weights": "load weights",
    "data": "prepare data",
    "engine": "build the engine",
    "first_step": "first step",
}
"""By the value of `events.StartupStage`, in the order of a start."""


class StartupPanel(Panel):
    TITLE = "Start-up"
    KEY = "0"

    def headline(self, view: RunView) -> str:
        return f"compiling {harmless(view.state.compiling)}" if view.state.compiling else ""

    def draw(self, view: RunView, width: int, height: int) -> Content:
        ranks = [view.state.ranks[rank] for rank in sorted(view.state.ranks)]
        if not ranks:
            return Content.styled("waiting for the first rank", "$muted")
        begun = {time.stage for rank in ranks for time in rank.stages}
        newest = max((number for number, name in enumerate(STAGES) if name in begun), default=0)
        # A stage that was passed over, such as loading weights for a run from random ones, is no news.
        shown = [name for number, name in enumerate(STAGES) if name in begun or number >= newest]
        rows = [_stage_row(name, STAGES[name], ranks, view) for name in shown]
        reads = input_rows(view.spec)
        if self.zoomed:
            return lines([*rows, Content(""), *reads])
        room = max(0, height - len(rows))
        return lines([*rows, *(row.truncate(width, ellipsis=True) for row in reads[:room])])


def _stage_row(name: str, words: str, ranks: list[RankState], view: RunView) -> Content:
    """One stage over all ranks: done by all, going on (and where), or still to come."""
    times = {rank.rank: time for rank in ranks for time in rank.stages if time.stage == name}
    finished = [time.seconds for time in times.values() if time.seconds is not None]
    if len(finished) == len(ranks):
        mark, style, note = "✓", "$text-success", format_seconds(max(finished))
    elif times:
        waiting = sorted(rank for rank, time in times.items() if time.seconds is None)
        began = min(time.began for time in times.values())
        now = view.state.now
        mark, style = "▸", "bold $text-accent"
        note = format_seconds(max(0.0, now - began)) if now is not None else ""
        if waiting and len(ranks) > 1:
            note += f"  rank {', '.join(str(rank) for rank in waiting[:4])}"
            note += f" and {len(waiting) - 4} more" if len(waiting) > 4 else ""
    else:
        mark, style, note = "·", "$muted", ""
    return Content.assemble((f"{mark} {fit(words, 28)}", style), (fit_right("", 1) + note, "$muted"))
