"""One host: its figures over its ranks, with the rank that has the largest; its machine; what stands out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message

from llmtop.profiler.fleet.fleetstate import HostState
from llmtop.profiler.fleet.overview import HostRow
from llmtop.profiler.fleet.summary import ALONE, STEP, HostSummarised, Spread
from llmtop.profiler.units import (
    counted,
    format_bytes,
    format_percent,
    format_range,
    format_rate,
    format_seconds,
)
from llmtop.tui.feeds.fleetview import HOST_MARKS, FleetView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.hosttable import NOTE_STYLES
from llmtop.tui.widgets.paint import fit, fit_right, harmless, lines, sparkline, used_of, wrapped
from llmtop.tui.widgets.painted import Painted

_LABEL_CELLS, _VALUE_CELLS, _RANK_CELLS = 18, 10, 6
_RANKS_AROUND_CELLS = 12
"""Around the row of ranks: its label, and the keys."""
_FIGURES = {
    "utilization_percent": ("GPU busy", "%"),
    "sm_active_percent": ("SMs with work", "%"),
    "tensor_active_percent": ("tensor cores", "%"),
    "memory_used_bytes": ("GPU memory", "B"),
    "power_watts": ("power", "W"),
    "temperature_celsius": ("temperature", "°C"),
}
"""Reading of a GPU to its words and its unit."""


class HostSheet(VerticalScroll):
    """Over the table; a rank is chosen with the arrows and opened."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Rank", key_display="⏎"),
        Binding("left", "turn(-1)", "", show=False),
        Binding("right", "turn(1)", "", show=False),
    ]

    class RankOpened(Message):
        """A person wants to see one rank."""

        def __init__(self, host: str, rank: int) -> None:
            super().__init__()
            self.host = host
            self.rank = rank

    def __init__(self) -> None:
        super().__init__()
        self.host = ""
        self.rank = 0
        self._view: FleetView | None = None
        self._body = Painted()

    def compose(self) -> ComposeResult:
        yield self._body

    def open(self, host: str, view: FleetView) -> None:
        """Begin at the rank that is the slowest there."""
        self.host = host
        state = view.fleet.hosts[host]
        told = state.summary
        slow = told.seconds.get(ALONE) or told.seconds.get(STEP) if told is not None else None
        self.rank = slow.rank if slow is not None else state.first_rank
        self.show(view)

    def show(self, view: FleetView) -> None:
        self._view = view
        self.repaint()

    def on_resize(self) -> None:
        self.repaint()

    def repaint(self) -> None:
        width, view = self.scrollable_content_region.width, self._view
        if view is None or not self.host or width <= 0:
            return
        row = next(row for row in view.rows if row.name == self.host)
        self._body.paint(lines(_drawn(view.fleet.hosts[self.host], row, view, self.rank, width)), width)

    def action_turn(self, by: int) -> None:
        if self._view is None:
            return
        host = self._view.fleet.hosts[self.host]
        self.rank = host.first_rank + (self.rank - host.first_rank + by) % max(1, host.ranks)
        self.repaint()

    def action_open(self) -> None:
        self.post_message(self.RankOpened(self.host, self.rank))


def _drawn(host: HostState, row: HostRow, view: FleetView, rank: int, width: int) -> Iterator[Content]:
    yield _identity(host, row)
    yield _ranks(host, rank, width)
    told = host.summary
    if told is None:
        yield Content.styled("it has told nothing yet", "$muted")
    else:
        yield Content("")
        yield from _figures(told)
        if len(host.trail) > 1:
            spark = sparkline(host.trail, max(8, width - _LABEL_CELLS - 2))
            yield Content.assemble((fit("steps lately", _LABEL_CELLS), "$muted"), (spark, "$primary"))
        yield Content("")
        yield from _machine(host, told)
    yield from _findings(host, view, width)


def _identity(host: HostState, row: HostRow) -> Content:
    mark, word, colour = HOST_MARKS[row.status]
    node = host.joined.node if host.joined is not None else ""
    ranks = format_range(str(host.first_rank), str(host.first_rank + host.ranks - 1))
    return Content.assemble(
        (harmless(host.name), "bold $text-primary"),
        f"  {'rank' if host.ranks == 1 else 'ranks'} {ranks}  ",
        (f"{mark} {word}", f"bold ${colour}"),
        (f"  step {row.step:,}", ""),
        (f", {row.behind:,} behind" if row.behind else "", "$text-warning"),
        (f"  calls itself {harmless(node)}" if node and node != host.name else "", "$muted"),
    )


def _ranks(host: HostState, chosen: int, width: int) -> Content:
    """Those around the chosen one."""
    cells = len(str(host.first_rank + host.ranks - 1)) + 2
    room = max(1, (width - _RANKS_AROUND_CELLS) // cells)
    first = host.first_rank + max(0, min(chosen - host.first_rank - room // 2, host.ranks - room))
    shown = range(first, min(first + room, host.first_rank + host.ranks))
    parts: list[tuple[str, str]] = [("rank ", "$muted")]
    for rank in shown:
        parts.append((f"▸{rank} ", "bold $accent") if rank == chosen else (f" {rank} ", ""))
    return Content.assemble(*parts, ("  ← → ⏎", "$muted"))


def _figures(told: HostSummarised) -> Iterator[Content]:
    heads = ("low", "median", "high")
    yield Content.styled(
        fit("over its ranks", _LABEL_CELLS)
        + "".join(fit_right(head, _VALUE_CELLS) for head in heads)
        + fit_right("rank", _RANK_CELLS),
        "$muted",
    )
    words = {STEP: "a step", ALONE: "load + forward"}
    for name, one in told.seconds.items():
        yield _spread(words.get(name, f"  {name}"), one, "s")
    if told.peak_bytes is not None:
        yield _spread("peak memory", told.peak_bytes, "B")
    for name, one in sorted(told.components.items(), key=lambda item: -item[1].high):
        yield _spread(f"  {name.replace('_', ' ')}", one, "B")
    if told.rss_bytes is not None:
        yield _spread("process memory", told.rss_bytes, "B")
    for name, one in told.figures.items():
        label, unit = _FIGURES.get(name, (name.replace("_", " "), ""))
        yield _spread(label, one, unit)


def _spread(label: str, one: Spread, unit: str) -> Content:
    values = "".join(
        fit_right(_value(value, unit), _VALUE_CELLS) for value in (one.low, one.median, one.high)
    )
    return Content.assemble(
        fit(label, _LABEL_CELLS), values, (fit_right(str(one.rank), _RANK_CELLS), "$text-accent")
    )


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    if unit == "B":
        return format_bytes(value)
    if unit == "%":
        return format_percent(value, digits=0)
    return f"{value:.0f} {unit}".rstrip()


def _machine(host: HostState, told: HostSummarised) -> Iterator[Content]:
    cells = [
        ("memory", used_of(told.memory_used_bytes, told.memory_total_bytes)),
        ("processors", format_percent(told.cpu_percent, digits=0)),
        ("network in", format_rate(told.receive_bytes_per_second)),
        ("out", format_rate(told.send_bytes_per_second)),
    ]
    yield _told("the host", cells)
    losses = "n/a" if told.link_losses is None else counted(told.link_losses, "time")
    errors = "n/a" if told.network_errors is None else f"{told.network_errors:,}"
    down = ", ".join(told.links_down) or "none"
    yield _told("its links", [("down now", harmless(down)), ("lost", losses), ("damaged packets", errors)])
    clock = host.clock
    if clock is not None:
        ahead = "ahead" if clock.offset_seconds >= 0 else "behind"
        off = f"{format_seconds(abs(clock.offset_seconds))} {ahead}, to {format_seconds(clock.error_seconds)}"
        yield _told("its clock", [("corrected", off)])


def _told(label: str, cells: list[tuple[str, str]]) -> Content:
    parts: list[tuple[str, str]] = [(fit(label, _LABEL_CELLS), "$muted")]
    for word, value in cells:
        parts += [(f"{word} ", "$muted"), (f"{value}  ", "")]
    return Content.assemble(*parts)


def _findings(host: HostState, view: FleetView, width: int) -> Iterator[Content]:
    """Those that the comparison of all hosts makes, then those that it has told itself."""
    found: list[tuple[str, str, str]] = [
        (one.severity, one.title, one.evidence) for one in view.findings if one.host == host.name
    ]
    titles = {title for _, title, _ in found}
    if host.summary is not None:
        found += [(one.severity, one.title, "") for one in host.summary.worst if one.title not in titles]
    if not found:
        return
    yield Content("")
    for severity, title, evidence in found:
        yield Content.styled(harmless(title), f"bold {NOTE_STYLES.get(severity, '$muted')}")
        for row in wrapped(harmless(evidence), max(20, width - 2)) if evidence else ():
            yield Content(f"  {row}")
