"""Above and below the table of hosts: the run as a whole, and what stands out among its hosts."""

from __future__ import annotations

import time

from textual.app import ComposeResult
from textual.containers import VerticalScroll

from llmtop.profiler.fleet.findings import HostFinding, gathered
from llmtop.profiler.fold.ending import ending
from llmtop.profiler.gpuwords import gpu_words
from llmtop.profiler.record.naming import cut_words
from llmtop.profiler.units import counted, format_progress, format_seconds, format_tokens_rate
from llmtop.tui.feeds.fleetview import FleetView
from llmtop.tui.feeds.view import STATUS_MARKS
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.headrows import READ_ONLY
from llmtop.tui.widgets.hosttable import NOTE_STYLES
from llmtop.tui.widgets.paint import gauge, harmless, lines, two_sided, wrapped
from llmtop.tui.widgets.painted import Painted

_MARKS = {"critical": "✗", "warning": "!", "info": "i"}
_LEAST_BAR_CELLS = 8


def head_rows(view: FleetView, width: int, *, read_only: bool) -> list[Content]:
    """Which run it is and how it is; how far, how fast, and how many answer."""
    spec = view.spec
    mark, word, colour = STATUS_MARKS[view.status]
    right = Content.assemble((f"{mark} {word}", f"bold ${colour}"))
    end = harmless(cut_words(view.short_id, view.run_id))
    many = f", {spec.world_size} x" if spec.has_uneven_nodes else f" x {spec.options.gpus}"
    devices = f"{counted(len(view.rows), 'host')}{many} {harmless(gpu_words(spec))}"
    zero = (f"ZeRO-{spec.options.zero}",) if spec.knows("zero") else ()
    model = (harmless(spec.model.name),) if spec.is_known else ()
    ways = ((*model, devices, *zero), (devices,), ())
    left = Content("")
    for told in ways:
        left = Content.assemble(
            (harmless(spec.name), "bold $text-primary"),
            "  ".join(("", *told, "")),
            (end, "$muted"),
            *([READ_ONLY] if read_only else ()),
        )
        if left.cell_length + right.cell_length < width:
            break
    return [two_sided(left, right, width), _progress(view, width), *_away(view, width), *_end(view, width)]


def _away(view: FleetView, width: int) -> list[Content]:
    """That what is shown is old."""
    if view.remote is None or not view.going_on or not (words := view.remote.away_words(time.time())):
        return []
    return [Content.styled(f"! {harmless(words)}", "bold $text-warning").truncate(width, ellipsis=True)]


def _progress(view: FleetView, width: int) -> Content:
    low, high = view.steps
    planned = view.spec.steps_planned
    # All are as far as the last.
    head = Content.assemble(("step ", "$muted"), (format_progress(low, planned), "bold"))
    if high > low:
        head = Content.assemble(head, (f" to {high}", "$muted"))
    alive, ranks = sum(row.alive for row in view.rows), sum(row.ranks for row in view.rows)
    cells = [
        ("hosts ", f"{view.answering:,}/{len(view.rows):,}"),
        ("ranks ", f"{alive:,}/{ranks:,}"),
        ("", format_tokens_rate(view.tokens_per_second)),
    ]
    if view.loss is not None:
        cells.append(("loss ", f"{view.loss:.3f}"))
    tail = Content.assemble(
        *(part for word, value in cells for part in (("  " + word, "$muted"), (value, "")))
    )
    room = width - head.cell_length - tail.cell_length - 1
    bar = (
        gauge(low / planned, room, style="$primary") if planned and room >= _LEAST_BAR_CELLS else Content("")
    )
    return Content.assemble(head, " ", bar, tail).truncate(width, ellipsis=True)


def _end(view: FleetView, width: int) -> list[Content]:
    """How and why it ended."""
    ended, end = view.state.ended, ending(view.state)
    if not end.reason:
        return []
    _, word, colour = STATUS_MARKS[view.state.status]
    rows = [Content.assemble((f"{word.upper()}: ", f"bold ${colour}"), harmless(end.reason))]
    if end.fix:
        rows.append(Content.assemble(("fix: ", "bold $text-warning"), harmless(end.fix)))
    if ended is not None:
        rows[0] = Content.assemble(
            rows[0], (f"  after {format_seconds(view.state.seconds_until(ended.t))}", "$muted")
        )
    return [row.truncate(width, ellipsis=True) for row in rows]


class FleetFindings(VerticalScroll):
    """Below the hosts by their titles; opened, with evidence and what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.can_focus = False
        self.opened = False
        self._found: tuple[HostFinding, ...] = ()
        self._body = Painted()

    def compose(self) -> ComposeResult:
        yield self._body

    def on_mount(self) -> None:
        self._title()

    def set_opened(self, opened: bool) -> None:
        self.opened = self.can_focus = opened
        self.set_class(opened, "-opened")
        self._paint()

    def show(self, found: tuple[HostFinding, ...]) -> None:
        """Of many hosts the same is said once."""
        shown = gathered(found)
        if shown != self._found:
            self._found = shown
            self._title(len(found))
        self._paint()

    def on_resize(self) -> None:
        self._paint()

    def _title(self, found: int = 0) -> None:
        count = f"{found:,}" if found else ""
        self.border_title = Content.assemble(
            (" f ", "$accent"), ("Findings ", "bold"), (f"{count} ", "$muted")
        ).visualize()

    def _paint(self) -> None:
        size = self.scrollable_content_region.size
        if size.width <= 0:
            return
        if not self._found:
            self._body.paint(Content.styled("nothing stands out so far", "$muted"), size.width)
        elif self.opened:
            rows = [row for one in self._found for row in _whole(one, size.width)]
            self._body.paint(lines(rows), size.width)
        else:
            rows = [_line(one).truncate(size.width, ellipsis=True) for one in self._found[: size.height]]
            self._body.paint(lines(rows), size.width)


def _line(one: HostFinding) -> Content:
    style = NOTE_STYLES[one.severity]
    return Content.assemble(
        (f"{_MARKS[one.severity]} ", f"bold {style}"),
        harmless(one.title),
        (f"  {harmless(one.evidence)}", "$muted"),
    )


def _whole(one: HostFinding, width: int) -> list[Content]:
    style = NOTE_STYLES[one.severity]
    rows = [Content.assemble((f"{_MARKS[one.severity]} {harmless(one.title)}", f"bold {style}"))]
    for text in (one.evidence, one.change):
        rows += [Content(f"  {row}") for row in wrapped(harmless(text), max(20, width - 2))]
    return rows
