"""A comparison's figures in words, the same for the terminal, the app and the page."""

from __future__ import annotations

from llmtop.presets.errors import written
from llmtop.presets.spec import Provenance
from llmtop.profiler.effects.compare import LOAD_DIFFERS, Change, Comparison, Side
from llmtop.profiler.report.settings import SettingReport
from llmtop.profiler.units import (
    NOT_AVAILABLE,
    format_bytes,
    format_percent,
    format_range,
    format_seconds,
    format_tokens_rate,
)

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
_SPEED_NAMES = {"step_seconds": "step time", "tokens_per_second": "throughput", "mfu_percent": "MFU"}
NOT_KNOWN = "not known"
INDENTED = "  "
"""Before the components, which add up to the peak."""


def side_words(side: Side) -> str:
    return (
        f"{side.model} on {side.world_size} x {side.gpu} at {side.host or NOT_AVAILABLE}, "
        f"{side.steps_finished} steps"
        + ("" if side.tokens_per_step is None else f" of {side.tokens_per_step:,} tokens")
    )


def value_words(value: object) -> str:
    """Of an option."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == {}:
        return "not set"
    return value if isinstance(value, str) else written(value)


def option_words(value: object, found: Provenance | None) -> str:
    """Of an option that differs; `found` is where its value comes from."""
    return NOT_KNOWN if found is None else value_words(value)


def options_note(found: Comparison) -> str:
    """What is not known of the options, because a run is a script; empty for two runs of llmtop's trainer."""
    sides = (("A", found.first), ("B", found.second))
    scripts = [f"{letter} is a script ({side.command})" for letter, side in sides if side.command]
    if not scripts:
        return ""
    return f"{', '.join(scripts)}: of a script's options only what was seen is known"


def no_options_words(found: Comparison) -> str:
    """Where none differs."""
    if found.first.command or found.second.command:
        return "none is known to differ"
    return "all alike"


def is_measured(change: Change) -> bool:
    """A row of zeros or of nothing known is no news."""
    return bool(change.first or change.second) or change.name in ("step_seconds", "peak_bytes")


def change_words(change: Change, loss_step: int | None) -> tuple[str, str, str, str, str]:
    """Name, both sides, the difference, and how much that is."""
    lead = INDENTED if change.in_peak else "beside: "
    name = _NAMES.get(change.name, lead + change.name.replace("_", " "))
    if change.unit == "loss":
        name = f"loss at step {loss_step}"
    percent = "" if change.percent is None else format_percent(change.percent, signed=True)
    return (name, amount(change, change.first), amount(change, change.second), _difference(change), percent)


def amount(change: Change, value: float | None) -> str:
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
    return sign + amount(change, abs(value))


def spread_words(found: Comparison) -> str:
    """How much the steps of a run differ: a change of the medians has to be more. Empty where not known."""
    parts = [
        f"of {letter} took "
        + format_range(format_seconds(spread.low_seconds), format_seconds(spread.high_seconds))
        for letter, spread in (("A", found.first.step_spread), ("B", found.second.step_spread))
        if spread is not None
    ]
    if not parts:
        return ""
    verdict = ""
    if names := _within_noise(found):
        # Steps that another program slows say little about chance.
        loaded = any(line.startswith(LOAD_DIFFERS) for line in found.unfair)
        what = "but the load of the machine was not the same" if loaded else "within noise"
        verdict = f"; {names} by less than from step to step: {what}"
    return f"Half of the steps {', '.join(parts)}{verdict}"


def _within_noise(found: Comparison) -> str:
    """Which figures of the table are, each by its own spread, with their verb; empty for none."""
    noisy = {change.name for change in found.changes if change.within_noise}
    names = [name for figure, name in _SPEED_NAMES.items() if figure in noisy]
    if len(names) < 2:
        return "".join(f"{name} differs" for name in names)
    return f"{', '.join(names[:-1])} and {names[-1]} differ"


def setting_words(setting: SettingReport) -> tuple[str, str, str, str]:
    """Its steps, its options, its step time and its peak."""
    last = "" if setting.last_step is None else f"{setting.last_step:,}"
    changed = ", ".join(f"{name}={value_words(value)}" for name, value in setting.options.items())
    return (
        format_range(f"{setting.first_step:,}", last).rstrip(),
        changed or ("as launched" if setting.setting == 0 else "as before"),
        format_seconds(setting.step_seconds),
        format_bytes(setting.peak_bytes),
    )
