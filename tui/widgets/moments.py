"""Predicted against actual memory at each moment of a step, as two stacked bars to a moment."""

from __future__ import annotations

from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.memory.result import MOMENT_WORDS, Component, MomentBytes
from llmtop.profiler.record.events import UNREAD_STEPS
from llmtop.profiler.units import format_bytes
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import Segment, fit, fit_right, stacked
from llmtop.tui.widgets.palette import component

_WORD_CELLS = 10
_VALUE_CELLS = 10
_FEWEST_BAR_CELLS = 8
_HEADS = {UNREAD_STEPS: "not read"}
"""Where a column's head is not the phase's name."""


def moment_rows(view: RunView, width: int) -> list[Content]:
    """Of the rank that held the most, or of the first while nothing is measured."""
    number = view.breakdown.peak_rank or 0
    rank = view.state.ranks.get(number)
    moments = view.prediction.moments
    actual = {m.name: _actual(m, rank, view) for m in moments}
    totals = [m.total_bytes for m in moments] + [sum(parts.values()) for parts in actual.values() if parts]
    scale = max([*totals, 1]) * 1.02
    peak = view.prediction.peak_moment
    rows = [Content.styled(f"over a step, rank {number}: predicted above, actual below", "$muted")]
    for moment in moments:
        words = MOMENT_WORDS.get(moment.name, moment.name)
        style = "bold" if moment.name == peak else "$foreground"
        rows.append(Content.styled(words + ("  (predicted peak)" if moment.name == peak else ""), style))
        rows.append(_bar("predicted", {str(c): n for c, n in moment.components.items()}, scale, width))
        parts = actual[moment.name]
        rows.append(
            _bar("actual", parts, scale, width)
            if parts
            else Content.styled(fit("actual", _WORD_CELLS) + f"n/a: {_why_not(view)}", "$muted")
        )
    return rows


def _why_not(view: RunView) -> str:
    if view.breakdown.not_yet:
        return f"changed, looked at in step {view.state.changes.spans[-1].first_step:,}"
    return "not looked at in this run"


def _actual(moment: MomentBytes, rank: RankState | None, view: RunView) -> dict[str, int] | None:
    """What was found at that moment, at the peak itself where that was traced; what is left is named so."""
    traced = _traced(moment, rank)
    if traced is not None:
        return traced
    seen = rank.classified.get(moment.name) if rank is not None else None
    if rank is None or seen is None:
        return None
    parts = dict(seen.components)
    if view.spec.on_cpu and rank.baseline is not None and rank.baseline.rss_bytes is not None:
        parts[Component.RUNTIME] = rank.baseline.rss_bytes
    if seen.total_bytes is not None:
        rest = seen.total_bytes - sum(parts.values())
        if rest > 0:
            parts[Component.UNEXPLAINED] = rest
    return parts


def _traced(moment: MomentBytes, rank: RankState | None) -> dict[str, int] | None:
    for event in rank.peaks_classified.values() if rank is not None else ():
        if event.moment == moment.name:
            rest = event.total_bytes - sum(event.components.values())
            return {**event.components, **({Component.UNEXPLAINED: rest} if rest > 0 else {})}
    return None


def _bar(words: str, parts: dict[str, int], scale: float, width: int) -> Content:
    segments = [Segment(component(name).letter, component(name).colour, size) for name, size in parts.items()]
    cells = max(_FEWEST_BAR_CELLS, width - _WORD_CELLS - _VALUE_CELLS)
    value = fit_right(format_bytes(sum(parts.values())), _VALUE_CELLS)
    return Content.assemble((fit(words, _WORD_CELLS), "$muted"), stacked(segments, scale, cells), value)


def phase_peak_rows(view: RunView) -> list[Content]:
    """Each rank's largest memory in each phase of its steps."""
    ranks = [rank for _, rank in sorted(view.state.ranks.items()) if rank.peaks]
    if not ranks:
        return []
    names = ["data", "forward", "backward", "optimizer"]
    every = max((rank.last_step.memory_every for rank in ranks if rank.last_step is not None), default=1)
    which = "of any step" if every == 1 else f"of the steps read, now 1 in {every},"
    if any(UNREAD_STEPS in rank.peaks for rank in ranks):
        names.append(UNREAD_STEPS)
    head = fit("rank", 6) + "".join(fit_right(_HEADS.get(name, name), 12) for name in names)
    on_cpu = view.spec.on_cpu
    what = "resident" if on_cpu else "allocated"
    rows = [
        Content.styled(f"largest {which} by phase, {what}", "$muted"),
        Content.styled(head + ("" if on_cpu else fit_right("reserved", 12)), "$muted"),
    ]
    for rank in ranks:
        cells = [rank.peaks[name].peak_bytes if name in rank.peaks else None for name in names]
        if not on_cpu:
            held = [m.reserved_bytes for m in rank.peaks.values() if m.reserved_bytes is not None]
            cells.append(max(held, default=None))
        most = rank.rank == view.breakdown.peak_rank
        text = fit(str(rank.rank), 6) + "".join(fit_right(format_bytes(cell), 12) for cell in cells)
        rows.append(Content.styled(text, "bold" if most and len(ranks) > 1 else "$foreground"))
    return rows
