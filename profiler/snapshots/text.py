"""Snapshots as tables of text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from llmtop.profiler.snapshots.blocks import BlockSummary
from llmtop.profiler.snapshots.modules import ModuleTable
from llmtop.profiler.snapshots.tracesummary import TraceSummary
from llmtop.profiler.units import (
    NOT_AVAILABLE,
    counted,
    format_bytes,
    format_percent,
    format_rate,
    format_seconds,
)

_TOP = 10
_MODULES = 30
_NAME_CELLS = 64
"""Of a kernel's name, which may be ten times as long: the summary's file has more of it."""
_PARTS_A_ROW = 4


def trace_lines(summary: TraceSummary, *, top: int = _TOP) -> Iterator[str]:
    wall = summary.wall_seconds
    steps = counted(summary.steps, "step")
    yield f"Trace of rank {summary.rank}, {steps} from step {summary.step}: {format_seconds(wall)}"
    for name, seconds in (
        ("compute", summary.compute_seconds),
        ("communication", summary.communication_seconds),
        ("copies", summary.memcpy_seconds),
        ("idle", summary.idle_seconds),
    ):
        beside = ""
        if name == "communication" and summary.overlap_share is not None:
            beside = f"   {_share(summary.overlap_share)} of it while something computed"
        yield f"  {name:<15}{format_seconds(seconds):>10}{_of(seconds, wall):>8}{beside}"
    for at in range(0, len(summary.parts), _PARTS_A_ROW):
        row = summary.parts[at : at + _PARTS_A_ROW]
        words = "".join(f"{part.name} {_share(part.share)}".ljust(19) for part in row)
        yield f"  {'' if at else 'for':<15}{words}".rstrip()
    what = "kernels" if summary.on_device else "operators"
    yield f"  Longest {what}"
    for one in summary.top[:top]:
        yield f"  {format_seconds(one.seconds):>10}{one.calls:>7} x  {one.part:<11}{one.name[:_NAME_CELLS]}"
    if summary.collectives:
        yield "  Collectives (each call's time holds the waiting for slower ranks)"
        yield f"  {'':<16}{'size':>10}{'calls':>7}{'mean':>10}{'bus, mean':>13}{'bus, best':>13}"
    for each in summary.collectives[:top]:
        yield (
            f"  {each.name:<16}{format_bytes(each.size_bytes):>10}{each.calls:>7}"
            f"{format_seconds(each.seconds / each.calls if each.calls else None):>10}"
            f"{format_rate(each.bus_bytes_per_second):>13}{format_rate(each.best_bus_bytes_per_second):>13}"
        )


def module_lines(table: ModuleTable) -> Iterator[str]:
    """In the order of the model, without what was never called."""
    took = format_seconds(table.step_seconds)
    yield f"Modules of rank {table.rank} in step {table.step}, which took {took}"
    yield f"  {'weights':>10}{'saved':>11}{'forward':>10}{'backward':>10}{'calls':>7}  module"
    for row in islice((row for row in table.rows if row.calls), _MODULES):
        yield (
            f"  {format_bytes(row.parameter_bytes):>10}{format_bytes(row.saved_bytes):>11}"
            f"{format_seconds(row.forward_seconds):>10}{format_seconds(row.backward_seconds):>10}"
            f"{row.calls:>7}  {row.name} ({row.kind})"
        )


def block_lines(summary: BlockSummary) -> Iterator[str]:
    held, reserved = format_bytes(summary.allocated_bytes), format_bytes(summary.reserved_bytes)
    blocks = counted(summary.blocks, "block")
    where = f"Memory of rank {summary.rank} in step {summary.step}"
    yield f"{where}: {held} allocated of {reserved} reserved, {blocks}"
    for name, size in sorted(summary.components.items(), key=lambda item: -item[1]):
        yield f"  {name.replace('_', ' '):<28}{format_bytes(size):>10}{_of(size, summary.reserved_bytes):>8}"
    yield f"  {'largest free block':<28}{format_bytes(summary.largest_free_bytes):>10}"
    if summary.sites:
        yield "  Where it was allocated"
    for site in summary.sites[:_TOP]:
        yield f"  {format_bytes(site.size_bytes):>10}{site.blocks:>7} x  {site.where}"


def _of(part: float, whole: float) -> str:
    return _share(part / whole) if whole else NOT_AVAILABLE


def _share(share: float) -> str:
    return format_percent(100 * share)
