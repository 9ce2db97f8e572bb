"""`llmtop compare`: two runs side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from msgspec.structs import replace

from llmtop.presets.errors import ExitCode
from llmtop.presets.spec import Provenance, ValueSource
from llmtop.profiler.effects.compare import Change, Comparison, OptionDifference, Side, compare
from llmtop.profiler.record import rundir
from llmtop.profiler.report.text import SMALL_SHARE
from llmtop.profiler.units import (
    NOT_AVAILABLE,
    format_bytes,
    format_percent,
    format_seconds,
    format_tokens_rate,
)
from llmtop.tui.arguments import RUN_HELP
from llmtop.tui.commands.output import print_json, short_path, table, text_width, value_text, wrapped

_NAMES = {
    "step_seconds": "step time (median)",
    "tokens_per_second": "throughput",
    "mfu_percent": "MFU (PaLM's count)",
    "needed_mfu_percent": "MFU (needed products)",
    "peak_bytes": "peak memory",
    "reserved_bytes": "reserved",
    "device_bytes": "device (NVML)",
    "host_bytes": "host RAM (PSS)",
}
_INDENTED = "  "
"""Before the components, which add up to the peak."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="RUN", help=RUN_HELP)
    parser.add_argument("second", metavar="RUN", help="the run whose change against the first is shown")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    root = rundir.runs_root()
    found = compare(rundir.find_run(root, args.first), rundir.find_run(root, args.second))
    if args.json:
        print_json(found)
    else:
        print("\n".join(render(found, text_width())))
    return ExitCode.DONE


def render(found: Comparison, width: int) -> Iterator[str]:
    """The comparison in lines of at most `width` columns."""
    yield from _head(found, width)
    yield ""
    yield from _options(found, width)
    yield ""
    yield from _changes(found)
    yield from _spreads(found, width)
    yield ""
    yield from _ran(found, width)
    if found.unfair:
        yield ""
        yield "Not a fair comparison, because"
        for reason in found.unfair:
            yield from wrapped(reason, "! ", width)


def _head(found: Comparison, width: int) -> Iterator[str]:
    for letter, side in (("A", found.first), ("B", found.second)):
        yield from wrapped(f"{side.run_id}  {side.status.replace('_', ' ')}", f"{letter}  ", width)
        yield from wrapped(_what(side), "   ", width)


def _what(side: Side) -> str:
    return (
        f"{side.model} on {side.world_size} x {side.gpu} at {side.host or NOT_AVAILABLE}, "
        f"{side.steps_finished} steps of {side.tokens_per_step:,} tokens"
    )


def _options(found: Comparison, width: int) -> Iterator[str]:
    if not found.options:
        yield "Options: all alike"
        return
    yield "Options that differ"
    for option in found.options:
        yield from wrapped(_option(option), "  ", width)


def _option(option: OptionDifference) -> str:
    first, second = _value(option.first), _value(option.second)
    return (
        f"{option.option}: {first} ({_source(option.first_from)}) -> {second} ({_source(option.second_from)})"
    )


def _source(found: Provenance) -> str:
    """A file says which recipe; the text of an option says nothing that the value does not."""
    if found.source in (ValueSource.RECIPE, ValueSource.DEEPSPEED_CONFIG) and found.detail:
        return f"{found.source} {short_path(found.detail)}"
    return str(found.source)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None or value == {} else value_text(value)


def _changes(found: Comparison) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("", "A", "B", "B - A", "")]
    peak = max((c.first or 0, c.second or 0) for c in found.changes if c.name == "peak_bytes")
    shown = (_without_small_percent(change, max(peak)) for change in found.changes if _measured(change))
    rows += [_row(change, found.loss_step) for change in shown]
    yield from table(rows, right=(1, 2, 3, 4))


def _spreads(found: Comparison, width: int) -> Iterator[str]:
    """How much steps of one run differ, which a change of the medians has to be more than."""
    parts = [
        f"of {letter} took {format_seconds(spread.low_seconds)} to {format_seconds(spread.high_seconds)}"
        for letter, spread in (("A", found.first.step_spread), ("B", found.second.step_spread))
        if spread is not None
    ]
    if not parts:
        return
    verdict = (
        "; step time, throughput and MFU differ by less: within noise" if found.speed_within_noise else ""
    )
    yield from wrapped(f"Half of the steps {', '.join(parts)}{verdict}", "", width)


def _without_small_percent(change: Change, peak_bytes: float) -> Change:
    """A percentage of next to nothing alarms for nothing."""
    size = max(change.first or 0, change.second or 0)
    is_small = change.unit == "bytes" and size < SMALL_SHARE * peak_bytes
    return replace(change, percent=None) if is_small else change


def _measured(change: Change) -> bool:
    """A row of zeros or of nothing known is no news."""
    return bool(change.first or change.second) or change.name in ("step_seconds", "peak_bytes")


def _row(change: Change, loss_step: int | None) -> tuple[str, ...]:
    name = _NAMES.get(change.name, _INDENTED + change.name.replace("_", " "))
    if change.unit == "loss":
        name = f"loss at step {loss_step}"
    percent = "" if change.percent is None else format_percent(change.percent, signed=True)
    return (name, _amount(change, change.first), _amount(change, change.second), _difference(change), percent)


def _amount(change: Change, value: float | None) -> str:
    if change.unit == "bytes":
        return format_bytes(value)
    if change.unit == "seconds":
        return format_seconds(value)
    if change.unit == "tokens_per_second":
        return format_tokens_rate(value)
    if change.unit == "percent":
        return format_percent(value)
    return NOT_AVAILABLE if value is None else f"{value:.4f}"


def _difference(change: Change) -> str:
    value = change.change
    if value is None:
        return NOT_AVAILABLE
    if change.unit == "bytes":
        return format_bytes(value, signed=True)
    if change.unit == "percent":
        return f"{value:+.1f} points"
    sign = "-" if value < 0 else "+"
    return sign + _amount(change, abs(value))


def _ran(found: Comparison, width: int) -> Iterator[str]:
    yield "What ran"
    for row in found.ran:
        if row.first is None and row.second is None:
            continue
        first, second = row.first or "not seen", row.second or "not seen"
        words = f"{first}, in both" if first == second else f"{first} -> {second}"
        yield from wrapped(words, f"  {row.what:<26}", width)
    if all(row.first is None and row.second is None for row in found.ran):
        yield "  nothing recorded yet"
