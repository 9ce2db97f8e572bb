"""What was changed while the run went on: asked, predicted, measured, and what it cost."""

from __future__ import annotations

from llmtop.profiler.changewords import details, down_words, outcome, title, under_way_words
from llmtop.profiler.fold.changestate import ChangeRecord
from llmtop.profiler.fold.spans import MeasuredSpan, measured_spans
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import harmless, lines, wrapped
from llmtop.tui.widgets.panel import Panel

_MARKS = {
    "applied": ("✓", "$text-success"),
    "under way": ("◌", "$text-accent"),
    "refused": ("✗", "$text-warning"),
    "failed": ("✗", "$text-error"),
}


class ChangesPanel(Panel):
    TITLE = "Changes"
    KEY = "e"

    def headline(self, view: RunView) -> str:
        changes, down = view.state.changes, down_words(view.state)
        if changes.under_way is not None:
            return under_way_words(view.state, view.state.now or 0.0) or "one under way"
        words = f"setting {changes.setting} in force" if changes.setting else ""
        return f"{words}  {down}".strip()

    def draw(self, view: RunView, width: int, height: int) -> Content:
        records, spans = view.state.changes.records, measured_spans(view.state)
        if not records:
            return Content.styled("nothing was changed; c changes the run", "$muted")
        # The newest first: it is what a person has just asked for.
        return lines([row for record in reversed(records) for row in _rows(record, spans, width)])


def _rows(record: ChangeRecord, spans: tuple[MeasuredSpan, ...], width: int) -> list[Content]:
    mark, style = _MARKS[record.status]
    first, *rest = wrapped(harmless(title(record)), max(8, width - 2)) or [""]
    rows = [Content.assemble((f"{mark} ", f"bold {style}"), (first, "bold"))]
    rows += [Content.styled(f"  {row}", "bold") for row in rest]
    rows += [Content(row) for row in wrapped(harmless(outcome(record)), width, "  ")]
    told = "; ".join(details(record, spans))
    return [*rows, *(Content.styled(row, "$muted") for row in wrapped(harmless(told), width, "  "))]
