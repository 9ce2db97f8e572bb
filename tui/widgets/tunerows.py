"""The rows of a search: what was tried, what is being tried, and what comes next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from textual.content import Content

from llmtop.profiler.cost.sweep import SHORT, Change
from llmtop.profiler.units import counted, format_seconds
from llmtop.trainer.tune.journal import Line
from llmtop.trainer.tune.pool import apart
from llmtop.trainer.tune.space import Candidate, Space, key_of
from llmtop.trainer.tune.state import SearchState
from llmtop.tui.commands.output import value_text
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
_PREDICTED, _STEP, _RATE = 9, 18, 9
_LEAST_WORDS = 16


class TuneRow(Struct, frozen=True, kw_only=True):
    """One setting."""

    kind: Kind
    words: str
    change: Change
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
        words = words_of(running.choice, start)
        predicted = running.predicted_step_seconds
        found.append(
            TuneRow(
                kind="running",
                words=words,
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
                words=words_of(line.choice, start),
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
                words=words_of(one.choice, start),
                change=one.change,
                predicted_seconds=one.brief.step_seconds,
            )
        )
    return found


def words_of(choice: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """What a setting changes of the plan's."""
    changed = [(key, value) for key, value in choice.items() if start.get(key) != value]
    parts = [f"{SHORT.get(key, key.rpartition('.')[2])} {_value(value)}" for key, value in changed]
    return ", ".join(parts) or "the plan as it is"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "as given" if value is None else value_text(value)


def _doing(state: SearchState) -> str:
    run = state.run
    if run is None:
        return "starting"
    if run.steps_finished:
        return f"step {run.steps_finished}"
    stages = run.ranks[0].stages if 0 in run.ranks else ()
    return stages[-1].stage.replace("_", " ") if stages else "starting"


def head(width: int) -> str:
    """Titles over the rows."""
    titles = (("predicted", _PREDICTED), ("measured", _STEP), ("tokens/s", _RATE))
    return f"  {fit('setting', _words_width(width))}" + "".join(fit_right(*title) for title in titles)


def painted(row: TuneRow, width: int) -> Content:
    """One line of at most `width` columns."""
    mark, style = _MARKS[row.kind]
    words = fit(harmless(row.words), _words_width(width))
    predicted = fit_right(format_seconds(row.predicted_seconds), _PREDICTED)
    line = row.line
    if row.kind == "failed" and line is not None:
        outcome = harmless((line.outcome or "failed").replace("_", " "))
        end = fit_right(outcome, _STEP + _RATE)
    elif line is not None:
        step = f"{format_seconds(line.step_seconds)} ± {format_seconds(line.error_seconds)}"
        end = fit_right(step, _STEP) + fit_right(f"{line.tokens_per_second or 0:,.0f}", _RATE)
    else:
        end = fit_right(row.doing, _STEP + _RATE)
    return Content.assemble((f"{mark} ", style), (words, style), predicted, (end, style))


def _words_width(width: int) -> int:
    return max(_LEAST_WORDS, width - 2 - _PREDICTED - _STEP - _RATE)


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
