"""What is worth knowing about the run: evidence, the change that would help, the command that makes it."""

from __future__ import annotations

from llmtop.profiler.findings.find import Finding
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import fit, harmless, lines, wrapped
from llmtop.tui.widgets.picture import Picture

_MARKS = {
    "critical": ("✗", "$text-error"),
    "warning": ("!", "$text-warning"),
    "info": ("i", "$text-primary"),
}
_WORD_CELLS = 8


class FindingsPanel(Picture):
    """Opened, one of them is under the cursor; it is told apart by its key, wherever it moves in the list."""

    TITLE = "Findings"
    KEY = "7"

    chosen: tuple[str, str] = ("", "")
    """Key and title of the finding under the cursor; of several with one key the titles differ."""

    def headline(self, view: RunView) -> str | tuple[str, ...]:
        if not view.findings:
            return ""
        count = str(len(view.findings))
        return (f"{count}  ↑ ↓ choose  y copies its command", count) if self.zoomed else count

    def draw(self, view: RunView, width: int, height: int) -> Content:
        if not view.findings:
            return Content.styled("nothing stands out so far", "$muted")
        if self.zoomed:
            return self._opened(view.findings, width)
        whole = [line for finding in view.findings for line in _whole(finding, width)][:-1]
        if len(whole) <= height:
            return lines(whole)
        rows = [_title(finding) for finding in view.findings]
        return lines([row.truncate(width, ellipsis=True) for row in rows[: max(height, 1)]])

    def _opened(self, found: tuple[Finding, ...], width: int) -> Content:
        """All by their titles, and below them the chosen one with its evidence and what mends it."""
        at = self.at(found)
        rows = []
        for number, finding in enumerate(found):
            head = Content.assemble(("▸ " if number == at else "  ", "$accent"), _title(finding))
            rows.append(head.stylize("bold") if number == at else head)
        one = found[at]
        rows += [Content(""), Content.assemble(_title(one), (f"  ({one.severity})", "$muted"))]
        for word, text in (("seen", one.evidence), ("change", one.change), ("command", one.command)):
            style = "$text-accent" if word == "command" else "$foreground"
            rows += _told(word, harmless(text), width, style) if text else []
        if one.command:
            words = "y copies it, for a shell on this machine"
            rows.append(Content.styled(" " * _WORD_CELLS + words, "$muted"))
        return lines(rows)

    def at(self, found: tuple[Finding, ...]) -> int:
        names = [(finding.key, finding.title) for finding in found]
        if self.chosen in names:
            return names.index(self.chosen)
        # Its title may have changed with its numbers.
        keys = [key for key, _ in names]
        return keys.index(self.chosen[0]) if self.chosen[0] in keys else 0


def _told(word: str, text: str, width: int, style: str, indent: str = "") -> list[Content]:
    """A word in a column of its own, and beside it what it is about; all of it behind `indent`."""
    first, *more = wrapped(text, max(width - _WORD_CELLS, 10)) or [""]
    rows = [Content.assemble((indent + fit(word, _WORD_CELLS), "$muted"), (first, style))]
    return rows + [Content.assemble(indent + " " * _WORD_CELLS, (row, style)) for row in more]


def _title(finding: Finding) -> Content:
    mark, style = _MARKS.get(finding.severity, ("·", "$muted"))
    return Content.assemble((f"{mark} ", f"bold {style}"), harmless(finding.title))


def _whole(finding: Finding, width: int) -> list[Content]:
    rows = [Content.assemble(_title(finding), (f"  ({finding.severity})", "$muted"))]
    for word, text in (("seen", finding.evidence), ("change", finding.change)):
        rows += _told(word, harmless(text), width - 2, "$foreground", "  ") if text else []
    return [*rows, Content("")]
