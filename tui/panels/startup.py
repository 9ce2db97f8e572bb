"""The start of a run as a timeline: which stage each rank is in, and how long each took."""

from __future__ import annotations

import textwrap

from llmtop.profiler.findings.startup import stage_hint
from llmtop.profiler.fold.rankstate import RankState, StageTime
from llmtop.profiler.fold.runstate import ENDED
from llmtop.profiler.units import counted, format_seconds
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.inputrows import input_rows
from llmtop.tui.widgets.paint import fit, fit_right, harmless, lines
from llmtop.tui.widgets.picture import Picture

STAGES: dict[str, str] = {
    "import": "import torch and DeepSpeed",
    "process_group": "join the ranks",
    "data": "prepare data",
    "op_build": "build ops",
    "model": "build the model",
    "weights": "load weights",
    "engine": "build the engine",
    "partition": "hand over to DeepSpeed",
    "first_step": "first step",
}
"""By the value of `events.StartupStage`, in the order of a start; `engine` is of older records."""
_PASSED_OVER = frozenset({"op_build", "engine"})
"""Stages that a start may leave out, as it leaves out one of building a model and loading its weights:
no news before they begin."""
_HINT_ROWS = 2
"""Of a stage beside other panels."""
_UNEVEN = 1.25
"""The slowest rank is named when it takes this many times as long as the fastest."""
_UNEVEN_FLOOR_SECONDS = 0.5


class StartupPanel(Picture):
    TITLE = "Start-up"
    KEY = "0"

    def headline(self, view: RunView) -> str:
        return f"compiling {harmless(view.state.compiling)}" if view.state.compiling else ""

    def draw(self, view: RunView, width: int, height: int) -> Content:
        ranks = [view.state.ranks[rank] for rank in sorted(view.state.ranks)]
        if not ranks:
            return Content.styled("waiting for the first rank", "$muted")
        if view.spec.script is not None:
            return lines([row.truncate(width, ellipsis=True) for row in _script_rows(view, width)])
        begun = {time.stage for rank in ranks for time in rank.stages}
        left_out = _PASSED_OVER | {"model" if view.spec.weights_dir else "weights"}
        rows: list[Content] = []
        for name in (name for name in STAGES if name in begun or name not in left_out):
            rows.append(_stage_row(name, STAGES[name], ranks, view))
            if self.zoomed:
                rows += _rank_rows(name, ranks, width)
            hints = _hint_rows(name, ranks, view, width)
            rows += hints if self.zoomed else hints[:_HINT_ROWS]
        if view.state.nvme is not None:
            from llmtop.profiler.cost.nvme import nvme_words  # which loads much of the prediction

            rows += [
                Content.styled(row, "$muted") for row in textwrap.wrap(nvme_words(view.state.nvme), width)
            ]
        if self.zoomed:
            return lines(
                [
                    *(row.truncate(width, ellipsis=True) for row in rows),
                    "",
                    *input_rows(view.spec, width=width),
                ]
            )
        rows += input_rows(view.spec, brief=True)[: max(0, height - len(rows))]
        return lines([row.truncate(width, ellipsis=True) for row in rows])


def _script_rows(view: RunView, width: int) -> list[Content]:
    """Of a command of the user's own, which tells no stages: what has been seen of it so far."""
    state = view.state
    seen = sum(rank.pid is not None for rank in state.ranks.values())
    described = state.description
    told = (
        (f"{counted(seen, 'rank')} seen", "of its processes nothing was seen yet", seen > 0),
        ("its model and settings are read", "its model and settings", described is not None),
        ("first step", "first step", bool(state.steps_finished) and not state.is_beginning),
    )
    rows = []
    for words, before, is_done in told:
        mark, style = ("✓", "$text-success") if is_done else ("·", "$muted")
        rows.append(Content.styled(f"{mark} {words if is_done else before}", style))
    if described is not None and described.problem:
        rows += [
            Content.styled(f"    {row}", "$text-warning")
            for row in textwrap.wrap(harmless(described.problem), max(20, width - 4))
        ]
    return rows


def _stage_row(name: str, words: str, ranks: list[RankState], view: RunView) -> Content:
    """One stage over all ranks: done by all, going on (and where), or still to come."""
    times = _times(name, ranks)
    finished = {rank: time.seconds for rank, time in times.items() if time.seconds is not None}
    if len(finished) == len(ranks):
        mark, style, note = "✓", "$text-success", _finished_note(finished)
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


def _times(name: str, ranks: list[RankState]) -> dict[int, StageTime]:
    return {rank.rank: time for rank in ranks for time in rank.stages if time.stage == name}


def _finished_note(seconds: dict[int, float]) -> str:
    """The longest time, and whose it is where the ranks differ."""
    slowest = max(seconds, key=lambda rank: seconds[rank])
    longest, shortest = seconds[slowest], min(seconds.values())
    note = format_seconds(longest)
    if longest > _UNEVEN * shortest and longest - shortest > _UNEVEN_FLOOR_SECONDS:
        note += f"  rank {slowest} slowest"
    return note


def _rank_rows(name: str, ranks: list[RankState], width: int) -> list[Content]:
    """Each rank's own seconds."""
    finished = {rank: time.seconds for rank, time in sorted(_times(name, ranks).items()) if time.seconds}
    if len(ranks) < 2 or not finished:
        return []
    told = ", ".join(f"rank {rank} {format_seconds(seconds)}" for rank, seconds in finished.items())
    return [Content.styled(f"    {row}", "$muted") for row in textwrap.wrap(told, max(20, width - 4))]


def _hint_rows(name: str, ranks: list[RankState], view: RunView, width: int) -> list[Content]:
    """What a stage that goes on is doing."""
    if view.state.status in ENDED or all(time.seconds is not None for time in _times(name, ranks).values()):
        return []
    hint = harmless(stage_hint(view.state, view.spec, view.prediction, name))
    rows = textwrap.wrap(hint, max(20, width - 4))
    return [Content.styled(f"    {row}", "$text-warning") for row in rows]
