"""A search as text: its space, its progress, and its result."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from llmtop.profiler.cost.sweep import head_of
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.units import counted, format_bytes, format_seconds
from llmtop.trainer.tune.edge import Edge
from llmtop.trainer.tune.journal import Line
from llmtop.trainer.tune.outcome import Found
from llmtop.trainer.tune.space import Candidate, Space
from llmtop.trainer.tune.trial import Show
from llmtop.tui.commandline.telling import stderr_width, tell
from llmtop.tui.commands.output import table, wrapped

_BEST = 10
_NOT_AVAILABLE = "n/a"


def space_text(space: Space, width: int) -> str:
    """What varies, and how much of it can be tried."""
    varied = [f"{head_of(k.key)} {' '.join(map(_value, k.values))}" for k in space.knobs if len(k.values) > 1]
    lines = wrapped(f"varied: {'; '.join(varied) or 'nothing'}", "", width)
    refused = sum(one.count for one in space.refused)
    lines += wrapped(
        f"{counted(space.size, 'combination')}: {len(space.candidates):,} may fit, {space.too_large:,}"
        f" predicted not to fit, {refused:,} cannot run here or at all",
        "",
        width,
    )
    return "\n".join(lines)


def ranked_text(
    space: Space,
    candidates: Sequence[Candidate],
    width: int,
    *,
    title: str,
    why_untimed: str = "",
) -> str:
    """The first of the candidates; `why_untimed` is told below them."""
    shown = candidates[:_BEST]
    varied = [knob.key for knob in space.knobs if len(knob.values) > 1]
    keys = [key for key in varied if len({str(one.choice[key]) for one in shown}) > 1]
    alike = [f"{head_of(key)} {_value(shown[0].choice[key])}" for key in varied if shown and key not in keys]
    heads = [*map(head_of, keys), "needs", "step", "tokens/s"]
    rows = [[*(_value(one.choice[k]) for k in keys), *_predicted(one)] for one in shown]
    lines = wrapped(f"{title}{', all with ' if alike else ''}{', '.join(alike)}", "", width)
    lines += fitted_table([heads, *rows], range(len(keys), len(heads)), width)
    return "\n".join([*lines, *wrapped(why_untimed, "", width)])


def fitted_table(rows: Sequence[Sequence[str]], right: Sequence[int], width: int) -> list[str]:
    """A table, or where that is wider than the terminal each row in words."""
    lines = table(rows, right=right)
    if max(map(len, lines), default=0) <= width:
        return lines
    heads, *others = rows
    texts = [
        ", ".join(f"{head} {cell}" for head, cell in zip(heads, row, strict=True) if cell) for row in others
    ]
    return [line for text in texts for line in wrapped(text, "- ", width)]


def _predicted(one: Candidate) -> list[str]:
    rate = one.brief.tokens_per_second
    return [
        format_bytes(one.brief.needed_bytes),
        format_seconds(one.brief.step_seconds),
        _NOT_AVAILABLE if rate is None else f"{rate:,.0f}",
    ]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "as-given" if value is None else str(value)


class Progress:
    """Told on stderr: a line for each trial, and on a terminal one that moves while it goes on."""

    def __init__(self, space: Space, trials: int, best_step_seconds: float | None = None) -> None:
        self._keys = [knob.key for knob in space.knobs if len(knob.values) > 1]
        self._trials = trials
        self._moving = stderr_width() is not None
        self._best = best_step_seconds

    def began(self, line: Line) -> None:
        words = self._words(line.choice)
        if line.predicted_step_seconds is not None:
            words += f"; predicted {format_seconds(line.predicted_step_seconds)} a step"
        if line.reason:
            words += f"; {line.reason}"
        tell(f"trial {line.number}/{self._trials}  {words}")

    def show(self, line: Line) -> Show:
        def moving(state: RunState, left: float) -> None:
            if not self._moving:
                return
            stages = state.ranks[0].stages if 0 in state.ranks else ()
            doing = f"step {state.steps_finished}" if state.steps_finished else "starting"
            if not state.steps_finished and stages:
                doing = stages[-1].stage.replace("_", " ")
            text = f"  {doing}, at most {max(0.0, left):.0f} s more"
            sys.stderr.write(f"\r{text[: (stderr_width() or 80) - 1]}\x1b[K")
            sys.stderr.flush()

        return moving

    def ended(self, line: Line) -> None:
        if self._moving:
            sys.stderr.write("\r\x1b[K")
        tell(f"  {self._result(line)}")

    def _result(self, line: Line) -> str:
        if line.step_seconds is None:
            return f"{(line.outcome or 'failed').replace('_', ' ')}: {line.reason}"
        is_best = self._best is None or line.step_seconds < self._best
        self._best = min(line.step_seconds, self._best or line.step_seconds)
        words = f"{format_seconds(line.step_seconds)} ± {format_seconds(line.error_seconds)} a step"
        words += f", {line.tokens_per_second or 0:,.0f} tokens/s"
        if is_best:
            return f"{words}  the best so far"
        return f"{words}  {line.step_seconds / self._best:.2f}x the time of the best"

    def _words(self, choice: dict[str, Any]) -> str:
        return ", ".join(f"{head_of(key)} {_value(choice[key])}" for key in self._keys) or "the only setting"


def trials_text(trials: Sequence[Line], width: int) -> str:
    """Settings that were tried, the fastest first."""
    keys = sorted({k for t in trials for k in t.choice if len({str(o.choice[k]) for o in trials}) > 1})
    heads = ["trial", *map(head_of, keys), "step", "±", "runs", "tokens/s", "outcome"]
    ordered = sorted(trials, key=lambda t: (t.step_seconds is None, t.step_seconds or 0.0, t.number))
    rows = [[str(t.number), *(_value(t.choice[k]) for k in keys), *_measured(t)] for t in ordered]
    right = [0, *range(len(keys) + 1, len(heads) - 1)]
    return "\n".join(fitted_table([heads, *rows], right, width))


def found_text(found: Found, width: int) -> str:
    """All trials, the fastest first, then the result."""
    lines = [*([trials_text(found.trials, width), ""] if found.trials else [])]
    lines += wrapped(f"ended: {found.stopped}; {counted(found.lost, 'trial')} without a time", "", width)
    for why in found.why:
        lines += wrapped(why, "  ", width)
    if found.recipe is not None:
        lines += [f"recipe     {found.recipe}", f"DeepSpeed  {found.deepspeed_config}"]
        lines += [f"llmtop run {found.recipe}"]
    lines += [f"go on: llmtop tune --resume {found.tune} --trials N --minutes M"]
    return "\n".join(lines)


def _measured(line: Line) -> list[str]:
    rate = line.tokens_per_second
    return [
        format_seconds(line.step_seconds),
        format_seconds(line.error_seconds),
        str(line.runs),
        _NOT_AVAILABLE if rate is None else f"{rate:,.0f}",
        (line.outcome or "failed").replace("_", " "),
    ]


def edge_text(edge: Edge, width: int) -> str:
    """The largest size, and how it is known."""
    return "\n".join(line for text in _edge_words(edge) for line in wrapped(text, "", width))


def _edge_words(edge: Edge) -> Iterator[str]:
    name = "micro-batch" if edge.quantity == "micro_batch" else "sequence length"
    if not edge.largest:
        yield f"no {name} fits, not even the smallest"
    else:
        yield f"largest {name}: {edge.largest:,} ({edge.source})"
    yield f"predicted to fit for certain: {edge.predicted:,}"
    for probe in edge.probes:
        peak = f", peak {format_bytes(probe.peak_bytes)}" if probe.peak_bytes else ""
        yield f"  tried {probe.size:,}: {'fits' if probe.fitted else 'out of memory'}{peak}"
    if edge.exact:
        yield f"known to a step of {edge.step}: the next one does not fit or is refused"
    elif edge.source == "measured":
        yield "more may fit: no trial ran out of memory"
    if edge.words:
        yield edge.words
