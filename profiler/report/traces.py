"""Pictures of what a run was looked at while it went on: of each trace where its time went, what ran longest
and what the collectives took; of other snapshots their tables as text."""

from __future__ import annotations

from collections.abc import Iterator

from llmtop.profiler.report.contents import Report
from llmtop.profiler.report.markup import Markup, details, element, figure, joined, table
from llmtop.profiler.report.snapshots import SnapshotReport
from llmtop.profiler.report.svg import Bar, bars_svg, legend
from llmtop.profiler.snapshots.collectives import Collective
from llmtop.profiler.snapshots.tracesummary import TopOperation, TraceSummary
from llmtop.profiler.units import (
    counted,
    format_bytes,
    format_percent,
    format_rate,
    format_seconds,
)

_LONGEST = 12
_NAME_CELLS = 34
"""Of a name beside a bar; all of it is in the bar's own title."""
_COMPUTE, _BESIDE, _ALONE, _COPIES, _IDLE = 0, 4, 11, 9, 8
"""Colours, as components have them elsewhere on the page."""
_PART_COLOURS = {
    "attention": 0, "mlp": 1, "norm": 2, "embedding": 3, "head": 5, "loss": 4, "optimizer": 6,
    "gradients": 7, "other": 8,
}  # fmt: skip


def looked_at(report: Report) -> Markup:
    """Every snapshot that is shown whole, the newest last; empty where there is none."""
    parts: list[str] = []
    for one in report.snapshots:
        if isinstance(one.table, TraceSummary):
            parts += _trace(one.table)
        if one.lines:
            parts.append(_as_text(one))
    hidden = sum(not one.lines for one in report.snapshots)
    if hidden:
        parts.append(element("p", f"{counted(hidden, 'earlier one')} not shown.", kind="dim"))
    return joined(parts)


def _as_text(one: SnapshotReport) -> Markup:
    taken = one.taken
    summary = f"{taken.what} of rank {one.rank}, step {taken.step}, as text"
    text = element("pre", "\n".join(one.lines))
    return details(summary, text) if one.table is not None else text


def _trace(summary: TraceSummary) -> Iterator[str]:
    what = "kernels" if summary.on_device else "operators"
    where = f"rank {summary.rank}, {counted(summary.steps, 'step')} from step {summary.step}"
    yield element("h3", f"Trace of {where}: {format_seconds(summary.wall_seconds)}")
    keys = legend((("communication while something computed", _BESIDE), ("communication alone", _ALONE)))
    yield figure(
        "Where the time went",
        bars_svg("Where the time went", _shares(summary), format_seconds),
        Markup(keys) if summary.communication_seconds else "",
    )
    yield figure("What it computed for", bars_svg("What it computed for", [*_parts(summary)], format_seconds))
    title = f"Longest {what}"
    yield figure(title, bars_svg(title, [*map(_operation, summary.top[:_LONGEST])], format_seconds))
    yield from _collectives(summary)


def _shares(summary: TraceSummary) -> list[Bar]:
    """Each counts where it ran beside another, so they may come to more than the whole."""
    alone = summary.communication_seconds - summary.overlapped_seconds
    beside = ("while something computed", summary.overlapped_seconds, _BESIDE)
    rows = (
        ("compute", (("compute", summary.compute_seconds, _COMPUTE),)),
        ("communication", (beside, ("alone", alone, _ALONE))),
        ("copies", (("copies", summary.memcpy_seconds, _COPIES),)),
        ("idle", (("idle", summary.idle_seconds, _IDLE),)),
    )
    return [
        Bar(
            name=name,
            parts=tuple(part for part in parts if part[1] > 0),
            total=_of(sum(size for _, size, _ in parts), summary.wall_seconds),
        )
        for name, parts in rows
    ]


def _parts(summary: TraceSummary) -> Iterator[Bar]:
    for part in summary.parts:
        colour = _PART_COLOURS.get(part.name, _PART_COLOURS["other"])
        yield Bar(
            name=part.name,
            parts=((part.name, part.seconds, colour),),
            total=f"{format_seconds(part.seconds)}, {format_percent(100 * part.share)}",
        )


def _operation(one: TopOperation) -> Bar:
    colour = _PART_COLOURS.get(one.part, _PART_COLOURS["other"])
    return Bar(
        name=_shortened(one.name),
        parts=((f"{one.name} ({one.part}, {counted(one.calls, 'call')})", one.seconds, colour),),
        total=format_seconds(one.seconds),
    )


def _collectives(summary: TraceSummary) -> Iterator[str]:
    if not summary.collectives:
        return
    shown = summary.collectives[:_LONGEST]
    bars = [
        Bar(
            name=f"{each.name} of {format_bytes(each.size_bytes)}",
            parts=((_told(each), each.seconds, _ALONE),),
            total=format_seconds(each.seconds),
        )
        for each in shown
    ]
    note = element("p", "In each call's time is the waiting for slower ranks.", kind="dim")
    yield figure("Collectives", bars_svg("Collectives", bars, format_seconds), note)
    rows = [
        (
            each.name,
            format_bytes(each.size_bytes),
            f"{each.calls:,}",
            format_seconds(each.seconds / each.calls if each.calls else None),
            format_rate(each.bus_bytes_per_second),
            format_rate(each.best_bus_bytes_per_second),
        )
        for each in shown
    ]
    heads = ("collective", "size", "calls", "mean", "bus, mean", "bus, best")
    yield table(heads, rows, right=(1, 2, 3, 4, 5))


def _told(each: Collective) -> str:
    return f"{counted(each.calls, 'call')} among {each.group_size or 'all'} ranks"


def _of(seconds: float, whole: float) -> str:
    share = f", {format_percent(100 * seconds / whole)}" if whole else ""
    return f"{format_seconds(seconds)}{share}"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_CELLS else f"{name[: _NAME_CELLS - 1]}\u2026"
