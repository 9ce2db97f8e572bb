"""All settings that a run trained on, in their order: a run that was changed is more than its last one."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunOptions, RunSpec
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.fold.spans import measured_spans
from llmtop.profiler.record.rundir import RunDir


class SettingReport(Struct, frozen=True, kw_only=True):
    """One of the settings that a run trained on, as far as it is known."""

    setting: int
    options: dict[str, Any]
    """What differs from the setting before; of the first one nothing."""
    first_step: int
    last_step: int | None
    step_seconds: float | None
    peak_bytes: int | None
    predicted_peak_bytes: int | None


def settings_of(run: RunDir, state: RunState) -> tuple[SettingReport, ...]:
    """One for each part of the run that made steps, or is to; the last one is in force."""
    found: list[SettingReport] = []
    before: RunSpec | None = None
    for span in measured_spans(state):
        try:
            spec, prediction = run.spec(span.setting), run.prediction(span.setting)
            predicted = prediction.peak_allocated_bytes if prediction.is_known else None
        except LlmtopError:
            # A damaged folder of an old setting hides its options, not its figures.
            spec, predicted = None, None
        found.append(
            SettingReport(
                setting=span.setting,
                options={} if spec is None or before is None else changed_options(before, spec),
                first_step=span.first_step,
                last_step=span.last_step,
                step_seconds=span.step_seconds,
                peak_bytes=span.peak_bytes,
                predicted_peak_bytes=predicted,
            )
        )
        before = spec or before
    return tuple(found)


def changed_options(before: RunSpec, after: RunSpec) -> dict[str, Any]:
    """Option to its new value."""
    return {
        option.name: getattr(after.options, option.name)
        for option in fields(RunOptions)
        if getattr(after.options, option.name) != getattr(before.options, option.name)
    }
