"""The rows of a search: what was tried, what is being tried, and what comes next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from llmtop.profiler.cost.sweep import Change, head_of
from llmtop.profiler.units import counted, format_seconds
from llmtop.trainer.tune.journal import Line
from llmtop.trainer.tune.pool import apart
from llmtop.trainer.tune.space import Candidate, Space, key_of
from llmtop.trainer.tune.state import SearchState
from llmtop.tui.commands.output import value_text
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import fit, fit_right, harmless

NEXT = 20
"""Settings shown that have not been tried."""
Kind = Literal["best", "tried", "failed", "running", "next"]
_MARKS: dict[Kind, tuple[str, str]] = {
    "best": ("★", "bold $text-success"),
    "tried": ("✓", ""),
    "failed": ("✗", "$text-error"),
    "running": ("▸", "bold $text-accent"),
    "next": ("·", "$muted"),
}
_HEADS = {
    "offload_optimizer": "opt",
    "offload_param": "params",
    "micro_batch": "micro",
    "checkpointing": "ckpt",
    "attention": "attn",
}
_MILLION = 10**6
OWN = "the plan as it is"
_MARK_CELLS = 3
_PREDICTED = 11
_RESULTS = ((18, 10), (10, 10), (15, 0))
"""Cells of the measured step and of its rate, as there is room: with the error, without, without a rate."""


class TuneRow(Struct, frozen=True, kw_only=True):
    """One setting."""

    kind: Kind
    choice: Mapping[str, Any]
    change: Change
    own: bool
    """Whether it is the plan as it is."""
    predicted_seconds: float | None = None
    line: Line | None = None
    """As measured."""
    doing: str = ""


def rows_of(
    state: SearchState, space: Space, ranked: Sequence[Candidate], start: Mapping[str, Any]
) -> list[TuneRow]:
    """The trial that goes on, what was tried from the fastest on, then what comes next."""
    found: list[TuneRow] = []
    running = state.running if state.going else None
    if running is not None:
        predicted = running.predicted_step_seconds
        found.append(
            TuneRow(
                kind="running",
                choice=running.choice,
                own=running.choice == start,
                change=running.change,
                predicted_seconds=predicted,
                doing=_doing(state),
            )
        )
    best = state.best
    for line in state.settings:
        kind: Kind = (
            "failed" if not line.step_seconds else "best" if line is best or line == best else "tried"
        )
        found.append(
            TuneRow(
                kind=kind,
                choice=line.choice,
                own=line.choice == start,
                change=line.change,
                predicted_seconds=line.predicted_step_seconds,
                line=line,
            )
        )
    known = {key_of(running.choice)} if running is not None else set()
    for one in [one for one in ranked if one.key not in known][:NEXT]:
        found.append(
            TuneRow(
                kind="next",
                choice=one.choice,
                own=one.choice == start,
                change=one.change,
                predicted_seconds=one.brief.step_seconds,
            )
        )
    return found


def words_of(choice: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """What a setting changes of the plan's."""
    return _told(choice, [key for key, value in choice.items() if start.get(key) != value]) or OWN


def _told(choice: Mapping[str, Any], keys: Iterable[str]) -> str:
    return ", ".join(f"{head_of(key)} {_value(choice[key])}" for key in keys)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if type(value) is int and value >= _MILLION:
        return f"{value / _MILLION:g}M"
    return "given" if value is None else value_text(value).replace("flash_attention_", "flash")


def _doing(state: SearchState) -> str:
    run = state.run
    if run is None:
        return "starting"
    if run.steps_finished:
        return f"step {run.steps_finished}"
    stages = run.ranks[0].stages if 0 in run.ranks else ()
    return stages[-1].stage.replace("_", " ") if stages else "starting"


class TuneTable(Struct, frozen=True, kw_only=True):
    """What the rows are drawn in: a column for each option in which they differ."""

    columns: tuple[tuple[str, int], ...]
    """Option and cells, with the space after it."""
    room: int
    """Cells of all of them."""
    results: tuple[int, int]
    """Of the measured step and of its rate; none while nothing is or was tried."""
    same: str
    """What all rows change of the plan alike; empty where there is nothing."""


def table_of(rows: Sequence[TuneRow], start: Mapping[str, Any], width: int) -> TuneTable:
    """For lines of `width` columns."""
    choices = [row.choice for row in rows]
    keys = list(choices[0]) if choices else []
    differ = [key for key in keys if any(one.get(key) != choices[0][key] for one in choices)]
    cells = [max(len(_value(one.get(key))) for one in choices) for key in differ]
    cells = [max(len(_head_of(key)), most) for key, most in zip(differ, cells, strict=True)]
    room = width - _MARK_CELLS - _PREDICTED
    results = (0, 0)
    if any(row.kind != "next" for row in rows):
        least = sum(cells) + len(cells)
        results = next((pair for pair in _RESULTS if least + sum(pair) <= room), _RESULTS[-1])
    room -= sum(results)
    space = 2 if sum(cells) + 2 * len(cells) <= room else 1
    same = [key for key in keys if key not in differ and choices[0][key] != start.get(key)]
    return TuneTable(
        columns=tuple((key, most + space) for key, most in zip(differ, cells, strict=True)),
        room=max(0, min(room, sum(cells) + space * len(cells))),
        results=results,
        same=_told(choices[0], same) if same else "",
    )


def _head_of(key: str) -> str:
    return _HEADS.get(key, key.rpartition(".")[2])


def head(table: TuneTable) -> str:
    """Titles over the rows."""
    words = "".join(fit(_head_of(key), cells) for key, cells in table.columns).rstrip()
    titles = (("predicted", _PREDICTED), ("measured", table.results[0]), ("tokens/s", table.results[1]))
    results = "".join(fit_right(*title) for title in titles if title[1])
    return " " * _MARK_CELLS + fit(words, table.room) + results


def painted(row: TuneRow, table: TuneTable) -> Content:
    """One line."""
    mark, style = _MARKS[row.kind]
    own = "* " if row.own else "  "
    words = "".join(fit(_value(row.choice.get(key)), cells) for key, cells in table.columns)
    predicted = fit_right(format_seconds(row.predicted_seconds), _PREDICTED)
    told = fit(harmless(words.rstrip()), table.room)
    return Content.assemble((mark + own, style), (told, style), predicted, (_result(row, table), style))


def _result(row: TuneRow, table: TuneTable) -> str:
    line, (step_cells, rate_cells) = row.line, table.results
    if line is None or row.kind == "failed":
        words = row.doing if line is None else harmless((line.outcome or "failed").replace("_", " "))
        return fit_right(words, step_cells + rate_cells)
    step = format_seconds(line.step_seconds)
    if step_cells == _RESULTS[0][0]:
        step += f" ± {format_seconds(line.error_seconds)}"
    return fit_right(step, step_cells) + fit_right(f"{line.tokens_per_second or 0:,.0f}", rate_cells)


def summary(state: SearchState, space: Space, start: Mapping[str, Any]) -> Iterator[str]:
    """What a person wants to know first."""
    refused = sum(one.count for one in space.refused)
    count = counted(space.size, "combination")
    fitting = f"{len(space.candidates):,} may fit"
    yield f"{count}: {fitting}, {space.too_large:,} are too large, {refused:,} cannot run"
    best = state.best
    if best is None:
        yield "nothing was measured yet" if not state.going else "the search has begun"
        return
    began = next((line for line in state.settings if line.choice == dict(start)), None)
    words = f"best: {words_of(best.choice, start)}"
    if began is not None and began is not best and began.step_seconds and best.step_seconds:
        sure = "" if apart(best, began) else ", less than the times scatter"
        words += f", {began.step_seconds / best.step_seconds:.2f}x as fast as the plan{sure}"
    yield words
