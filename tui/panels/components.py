"""Predicted against actual memory, component by component."""

from __future__ import annotations

import textwrap

from llmtop.profiler.breakdown import Breakdown, BreakdownRow, error_percent
from llmtop.profiler.memory.result import Component
from llmtop.profiler.units import format_bytes, format_percent
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import Segment, fit, fit_right, lines, stacked
from llmtop.tui.widgets.palette import component
from llmtop.tui.widgets.picture import Picture

_PREDICTED_CELLS, _ACTUAL_CELLS = 9, 10
"""What is unexplained may be below zero: its minus sign stands apart from the column before."""
_ERROR_CELLS = 6
_MOST_LABEL_CELLS = 20
_NOTABLE_PERCENT = 10
_BRIEF: dict[str, str] = {
    "master params": "masters",
    "fragmentation": "fragments",
    "comm buffers": "comm bufs",
    "CUDA context": "context",
}
"""For where the whole label would be cut."""
_RECLAIMED = "The kernel swapped or reclaimed pages of the process: the actual figures are too small."


_SEEN = (
    "The actual peak is what was in use at a classified moment: since the change the process keeps what the"
    " setting before had freed."
)


class ComponentsPanel(Picture):
    TITLE = "Predicted/actual"
    KEY = "2"

    def headline(self, view: RunView) -> str | tuple[str, ...]:
        if view.breakdown.reclaimed:
            return "actual not reliable", "not reliable"
        if view.breakdown.not_yet:
            step = f"{view.state.changes.spans[-1].first_step:,}"
            return f"n/a until step {step} is over", f"n/a before {step}"
        unexplained = view.breakdown.unexplained_percent
        if unexplained is None:
            return ""
        return f"{unexplained:.0f}% unexplained", f"{unexplained:.0f}% unexpl."

    def draw(self, view: RunView, width: int, height: int) -> Content:
        found = view.breakdown
        label_cells = min(width - 2 - _PREDICTED_CELLS - _ACTUAL_CELLS - _ERROR_CELLS, _MOST_LABEL_CELLS)
        peak = _row("", "peak", found.predicted_peak_bytes, found.actual_peak_bytes, label_cells, "bold")
        rows = [
            component_row(r, found, label_cells)
            for r in sorted(found.rows, key=lambda r: -max(r.predicted_bytes or 0, r.actual_bytes or 0))
        ]
        head = Content.styled(
            " " * (2 + label_cells)
            + fit_right("predicted", _PREDICTED_CELLS)
            + fit_right("actual", _ACTUAL_CELLS)
            + fit_right("error", _ERROR_CELLS),
            "$muted",
        )
        if self.zoomed:
            note = _RECLAIMED if found.reclaimed else _SEEN if found.peak_is_seen else found.not_yet
            style = "$text-warning" if found.reclaimed else "$muted"
            notes = [Content(""), *(Content.styled(row, style) for row in textwrap.wrap(note, width))]
            return lines([*self._bars(view, width), "", head, peak, *rows, *(notes if note else ())])
        return lines([head, peak, *rows][: max(height, 2)])

    def _bars(self, view: RunView, width: int) -> list[Content]:
        """Both peaks as stacked bars on one scale."""
        found = view.breakdown
        scale = 1.02 * max(
            sum(r.predicted_bytes or 0 for r in found.rows), sum(r.actual_bytes or 0 for r in found.rows), 1
        )
        bars = []
        for words, pick in (("predicted", 0), ("actual", 1)):
            parts = [(component(r.component), _pair(r, found)[pick] or 0) for r in found.rows]
            segments = [Segment(swatch.letter, swatch.colour, value) for swatch, value in parts]
            bars.append(Content.assemble((fit(words, 10), "$muted"), stacked(segments, scale, width - 10)))
        return bars


def component_row(row: BreakdownRow, found: Breakdown, label_cells: int) -> Content:
    """Letter, label, both sizes, and how far they are apart."""
    swatch = component(row.component)
    label = swatch.label if len(swatch.label) <= label_cells else _BRIEF.get(swatch.label, swatch.label)
    return _row(swatch.letter, label, *_pair(row, found), label_cells, "")


def _pair(row: BreakdownRow, found: Breakdown) -> tuple[int | None, int | None]:
    if found.reclaimed and row.component == Component.UNEXPLAINED:
        return row.predicted_bytes, None
    return row.predicted_bytes, row.actual_bytes


def _row(
    letter: str, label: str, predicted: int | None, actual: int | None, label_cells: int, style: str
) -> Content:
    words, words_style = _error(predicted, actual)
    return Content.assemble(
        (fit(letter, 2), "$muted"),
        (fit(label, label_cells), style),
        (fit_right(format_bytes(predicted), _PREDICTED_CELLS), style),
        (fit_right(format_bytes(actual), _ACTUAL_CELLS), style),
        (fit_right(words, _ERROR_CELLS), words_style),
    )


def _error(predicted: int | None, actual: int | None) -> tuple[str, str]:
    """How far the prediction is above the actual bytes, and its style; empty where a ratio says nothing."""
    percent = error_percent(predicted, actual)
    if percent is None:
        return "", ""
    words = format_percent(percent, signed=True, digits=0) if abs(percent) < 999 else ">999%"
    return words, "$text-warning" if abs(percent) > _NOTABLE_PERCENT else "$muted"
