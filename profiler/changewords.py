"""A change of a run in words, the same for the monitor, the report and whoever follows the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmtop.presets.errors import written
from llmtop.profiler.effects.load import load_words
from llmtop.profiler.fold.changestate import ChangeRecord
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.spans import MeasuredSpan
from llmtop.profiler.record.changeevents import KeyChange
from llmtop.profiler.units import counted, format_bytes, format_seconds


def value_words(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else written(value)


def key_words(change: KeyChange) -> str:
    return f"{change.key} {value_words(change.old)} -> {value_words(change.new)}"


def title(record: ChangeRecord) -> str:
    """What was changed, or was to be."""
    if record.asked is not None:
        return ", ".join(map(key_words, record.asked.changes))
    return " ".join(record.refused.asked) if record.refused is not None else ""


def outcome(record: ChangeRecord) -> str:
    """What became of it, in a few words."""
    if record.status == "under way":
        if record.began is not None:
            return f"being started again since step {record.began.last_step}"
        return "under way"
    if record.status == "refused":
        return f"refused: {record.reason}"
    if record.status == "failed" and record.back_to == record.setting:
        return f"failed before its first step: {record.reason}"
    if record.status == "failed":
        return f"failed, back on the old setting: {record.reason}"
    if record.restaged is None:
        return f"from step {record.step} on, without a pause"
    if record.down_seconds is None:
        return f"from step {record.step} on, after the run had ended"
    return f"from step {record.step} on, down for {format_seconds(record.down_seconds)}"


def down_words(state: RunState) -> str:
    """How long no step was made for changes so far; empty where none took a relaunch."""
    took = [record.down_seconds for record in state.changes.records if record.restaged is not None]
    if not took:
        return ""
    known = [seconds for seconds in took if seconds is not None]
    seconds = format_seconds(sum(known) if known else None)
    return f"down for {seconds} in {counted(len(took), 'relaunch', 'relaunches')}"


def under_way_words(state: RunState, now: float) -> str:
    """Of a relaunch that goes on: since when no step is made, and how long it was expected to take."""
    record = state.changes.under_way
    if record is None or record.began is None:
        return ""
    # The ranks saved before that, after their last step.
    seconds = max(0.0, now - record.began.t) + (record.began.save_seconds or 0.0)
    asked = record.asked
    expected = asked.expected_down_seconds if asked is not None else None
    of = "" if expected is None else f" of about {format_seconds(expected)}"
    return f"relaunch: down for {seconds:.0f} s{of}"


def details(record: ChangeRecord, spans: tuple[MeasuredSpan, ...]) -> Iterator[str]:
    """What was predicted and measured of it, and what the time without steps went into."""
    asked = record.asked
    if asked is None or record.status == "refused":
        return
    if asked.why:
        yield f"because {asked.why}"
    if asked.new_peak_bytes is not None:
        old, new = format_bytes(asked.old_peak_bytes), format_bytes(asked.new_peak_bytes)
        verdict = "; predicted not to fit" if asked.fits is False else ""
        yield f"predicted peak {old} -> {new}{verdict}"
    before, after = _around(record, spans)
    if before is not None and after is not None:
        yield f"measured peak {format_bytes(before.peak_bytes)} -> {format_bytes(after.peak_bytes)}"
        yield f"step time {format_seconds(before.step_seconds)} -> {format_seconds(after.step_seconds)}"
        yield from _others_words(before, after)
    if record.restaged is not None and record.restaged.stage_seconds:
        parts = record.restaged.stage_seconds.items()
        yield "down: " + ", ".join(
            f"{name.replace('_', ' ')} {format_seconds(seconds)}" for name, seconds in parts
        )
        yield from (f"not exactly as before: {note}" for note in record.restaged.notes)
    if asked.restage and asked.expected_down_seconds is not None:
        yield f"expected to be down for {format_seconds(asked.expected_down_seconds)}"
    yield from (f"lost: {lost}" for lost in asked.lost)


def _others_words(before: MeasuredSpan, after: MeasuredSpan) -> Iterator[str]:
    """What else the two step times tell of: side by side they would be taken for the work of the change."""
    if before.step_seconds is None or after.step_seconds is None:
        return
    shared = [when for when, span in (("before", before), ("after", after)) if span.device_is_shared]
    found = [f"other processes were on a device of the run {' and '.join(shared)} it"] if shared else []
    if load := load_words(before.others_percent, after.others_percent):
        found.append(f"{load} before and after it")
    if found:
        yield f"mind, the step times tell of more than the change: {', and '.join(found)}"


def _around(
    record: ChangeRecord, spans: tuple[MeasuredSpan, ...]
) -> tuple[MeasuredSpan | None, MeasuredSpan | None]:
    """What was measured before and after it."""
    for at, span in enumerate(spans):
        if span.setting == record.setting and at > 0:
            return spans[at - 1], span
    return None, None


def news(before: RunState, after: RunState) -> str | None:
    """What came of a change since the state before; None while nothing has."""
    known = before.changes.records
    for at, record in enumerate(after.changes.records):
        settled = record.status != "under way"
        if settled and (at >= len(known) or known[at].status == "under way"):
            return f"{title(record)}: {outcome(record)}"
    return None
