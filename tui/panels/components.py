"""Predicted against actual memory, component by component."""

from __future__ import annotations

from textual.content import Content

from llmtop.profiler.breakdown import BreakdownRow
from llmtop.profiler.units import format_bytes
from llmtop.tui.view import RunView
from llmtop.tui.widgets.paint import Segment, fit, fit_right, lines, stacked
from llmtop.tui.widgets.palette import component
from llmtop.tui.widgets.panel import Panel

_VALUE_CELLS = 9
_CHANGE_CELLS = 6
_MOST_LABEL_CELLS = 20


class ComponentsPanel(Panel):
    TITLE = "Predicted vs actual"
    KEY = "2"

    def headline(self, view: RunView) -> str:
        return _change(view.breakdown.predicted_peak_bytes, view.breakdown.actual_peak_bytes).strip()

    def draw(self, view: RunView, width: int, height: int) -> Content:
        found = view.breakdown
        label_cells = min(width - 2 - 2 * _VALUE_CELLS - _CHANGE_CELLS, _MOST_LABEL_CELLS)
        peak = _row("", "peak", found.predicted_peak_bytes, found.actual_peak_bytes, label_cells, "bold")
        rows = [
            _row(component(r.component).letter, component(r.component).label, *_pair(r), label_cells, "")
            for r in sorted(found.rows, key=lambda r: -max(r.predicted_bytes or 0, r.actual_bytes or 0))
        ]
        head = Content.styled(
            " " * (2 + label_cells)
            + fit_right("predicted", _VALUE_CELLS)
            + fit_right("actual", _VALUE_CELLS)
            + fit_right("diff", _CHANGE_CELLS),
            "$muted",
        )
        if self.zoomed:
            return lines([*self._bars(view, width), "", head, peak, *rows])
        return lines([head, peak, *rows][: max(height, 2)])

    def _bars(self, view: RunView, width: int) -> list[Content]:
        """Both peaks as stacked bars on one scale."""
        found = view.breakdown
        scale = 1.02 * max(
            sum(r.predicted_bytes or 0 for r in found.rows), sum(r.actual_bytes or 0 for r in found.rows), 1
        )
        bars = []
        for words, pick in (("predicted", 0), ("actual", 1)):
            parts = [(component(r.component), _pair(r)[pick] or 0) for r in found.rows]
            segments = [Segment(swatch.letter, swatch.colour, value) for swatch, value in parts]
            bars.append(
                Content.assemble((fit(words, 10), "$muted"), stacked(segments, scale, width - 10))
            )
        return bars


def _pair(row: BreakdownRow) -> tuple[int | None, int | None]:
    return row.predicted_bytes, row.actual_bytes


def _row(
    letter: str, label: str, predicted: int | None, actual: int | None, label_cells: int, style: str
) -> Content:
    return Content.assemble(
        (fit(letter, 2), "$muted"),
        (fit(label, label_cells), style),
        (fit_right(format_bytes(predicted), _VALUE_CELLS), style),
        (fit_right(format_bytes(actual), _VALUE_CELLS), style),
        (fit_right(_change(predicted, actual), _CHANGE_CELLS), _change_style(predicted, actual)),
    )


def _change(predicted: int | None, actual: int | None) -> str:
    """Actual against predicted in percent; empty where a ratio says nothing."""
    if not predicted or actual is None:
        return ""
    percent = (actual / predicted - 1) * 100
    return f"{percent:+.0f}%" if abs(percent) < 999 else ">999%"


def _change_style(predicted: int | None, actual: int | None) -> str:
    if not predicted or actual is None or actual <= predicted * 1.1:
        return "$muted"
    return "$text-warning"
