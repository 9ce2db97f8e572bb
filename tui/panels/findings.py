"""What is worth knowing about the run: evidence and the change that would help."""

from __future__ import annotations

from textual.content import Content

from llmtop.profiler.findings.find import Finding
from llmtop.tui.view import RunView
from llmtop.tui.widgets.paint import fit, harmless, lines
from llmtop.tui.widgets.panel import Panel

_MARKS = {
    "critical": ("✗", "$text-error"),
    "error": ("✗", "$text-error"),
    "warning": ("!", "$text-warning"),
    "info": ("i", "$text-primary"),
    "good": ("✓", "$text-success"),
}


class FindingsPanel(Panel):
    TITLE = "Findings"
    KEY = "7"

    def headline(self, view: RunView) -> str:
        return str(len(view.findings)) if view.findings else ""

    def draw(self, view: RunView, width: int, height: int) -> Content:
        if not view.findings:
            return Content.styled("nothing stands out so far", "$muted")
        whole = lines([line for finding in view.findings for line in _whole(finding)][:-1])
        if self.zoomed or whole.get_height({}, width) <= height:
            return whole
        rows = [_title(finding) for finding in view.findings]
        return lines([row.truncate(width, ellipsis=True) for row in rows[: max(height, 1)]])


def _title(finding: Finding) -> Content:
    mark, style = _MARKS.get(finding.severity, ("·", "$muted"))
    return Content.assemble((f"{mark} ", f"bold {style}"), harmless(finding.title))


def _whole(finding: Finding) -> list[Content]:
    rows = [Content.assemble(_title(finding), (f"  ({finding.severity})", "$muted"))]
    for word, text in (("seen", finding.evidence), ("change", finding.change)):
        if text:
            rows.append(Content.assemble("  ", (fit(word, 8), "$muted"), harmless(text)))
    return [*rows, Content("")]
