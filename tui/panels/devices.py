"""Each GPU at work: activity of its parts, power, clocks and what holds them down, heat, energy, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.units import format_joules, format_percent
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import NOT_KNOWN, fit, fit_right, gauge, harmless, lines, used_of
from llmtop.tui.widgets.picture import Picture

_LABEL_CELLS = 6
_PART_CELLS = 9
_NUMBER_CELLS = 16
_NO_GPM = "utilisation: no GPM"


class DevicesPanel(Picture):
    TITLE = "GPUs"
    KEY = "9"

    def headline(self, view: RunView) -> tuple[str, ...]:
        devices = view.state.hardware.devices if view.state.hardware else ()
        if not devices:
            return ("",)
        per_token = view.state.energy.joules_per_token
        power = _watts(_sum([device.power_watts for device in devices]))
        drawn = power if per_token is None else f"{power}  {format_joules(per_token)}/token"
        return (drawn, power, "") if _has_gpm(devices) else (f"{_NO_GPM}  {power}", _NO_GPM, power, "")

    def draw(self, view: RunView, width: int, height: int) -> Content:
        sample = view.state.hardware
        devices = sample.devices if sample else ()
        if not devices:
            return Content.styled("no sample yet" if sample is None else "this run has no GPU", "$muted")
        if self.zoomed:
            rows = _energy_rows(view)
            if len(devices) > 1:
                rows += [*_table(devices, len(devices) + 1), Content("")]
            for device in devices:
                rows += [*_device_rows(view, device, width), Content("")]
            return lines(rows)
        return lines(_table(devices, height))


# --- the overview ---------------------------------------------------------------------------------


class _Column(NamedTuple):
    """One number of a device in the overview."""

    head: str
    cells: int
    read: Callable[[DeviceSample], float | None]
    unit: str

    def cell(self, value: float | None) -> str:
        return fit_right(NOT_KNOWN if value is None else f"{value:.0f}{self.unit}", self.cells)


def _activity(device: DeviceSample) -> float | None:
    """Of its SMs where the device measures that, else the share of time in which any kernel ran."""
    return device.utilization_percent if device.sm_active_percent is None else device.sm_active_percent


_COLUMNS: tuple[_Column, ...] = (
    _Column("SM", 6, _activity, "%"),
    _Column("tensor", 8, lambda device: device.tensor_active_percent, "%"),
    _Column("DRAM", 6, lambda device: device.dram_active_percent, "%"),
    _Column("W", 6, lambda device: device.power_watts, ""),
    _Column("C", 5, lambda device: device.temperature_celsius, ""),
)


def _table(devices: Sequence[DeviceSample], height: int) -> list[Content]:
    heads = [column.head for column in _COLUMNS]
    if not _has_gpm(devices):
        heads[0] = "busy"
    head = "".join(fit_right(word, column.cells) for word, column in zip(heads, _COLUMNS, strict=True))
    rows = [Content.styled(fit("", _LABEL_CELLS) + head, "$muted")]
    if len(devices) < height:
        return [*rows, *(_table_row(f"GPU{device.index}", [device]) for device in devices)]
    # Those that a person would look for first, as many as there is room for, and one at least.
    first = sorted(devices, key=_standing)[: max(1, height - 2)]
    told = [_table_row(f"GPU{device.index}", [device]) for device in first]
    return [*rows, _table_row("mean", devices), *told][: max(height, 1)]


def _standing(device: DeviceSample) -> tuple[bool, bool, float]:
    """Lost ones before those that are held down, before the least busy."""
    return (not device.is_lost, not _hard_throttle([device]), _activity(device) or 0.0)


def _table_row(label: str, devices: Sequence[DeviceSample]) -> Content:
    if all(device.is_lost for device in devices):
        return Content.assemble(fit(label, _LABEL_CELLS), ("lost: the driver does not reach it", "$error"))
    cells = "".join(column.cell(_mean([column.read(d) for d in devices])) for column in _COLUMNS)
    held = _hard_throttle(devices)
    return Content.assemble(fit(label, _LABEL_CELLS), (cells, "$warning" if held else "$foreground"))


def _hard_throttle(devices: Sequence[DeviceSample]) -> bool:
    """Whether heat or a fault holds a clock down; a power cap is a limit doing its work."""
    words = ("thermal", "slowdown", "brake")
    return any(word in reason for d in devices for reason in d.throttle_reasons or () for word in words)


# --- the whole screen -----------------------------------------------------------------------------


def _energy_rows(view: RunView) -> list[Content]:
    use = view.state.energy
    if use.total_joules is None:
        return []
    words = f"energy {format_joules(use.total_joules)} since the run began"
    if use.joules_per_token is not None:
        words += f", {format_joules(use.joules_per_token)} a token over the steps"
    return [Content.styled(words, "$muted"), Content("")]


def _device_rows(view: RunView, device: DeviceSample, width: int) -> list[Content]:
    head = Content.assemble(
        (fit(f"GPU{device.index}", _LABEL_CELLS), "bold"), harmless(device.name or f"name {NOT_KNOWN}")
    )
    if device.is_lost:
        return [head, _words("", "lost: the driver says that it is gone or has to be reset", "$error")]
    return [
        head,
        *_activity_rows(device, width),
        _gauge_row("memory", device.memory_used_bytes, device.memory_total_bytes, width, used_of),
        _gauge_row("power", device.power_watts, device.power_limit_watts, width, _power_of),
        _words("", f"{_degrees(device)}   clocks: SM {_clock(device.sm_clock_hz)}, memory "
                   f"{_clock(device.memory_clock_hz)}"),
        _throttle_row(device),
        *_error_rows(view, device),
    ]  # fmt: skip


def _activity_rows(device: DeviceSample, width: int) -> list[Content]:
    if device.sm_active_percent is None:
        busy = _percent_row("busy", device.utilization_percent, width)
        return [busy, _words("", "any kernel ran: NVML's utilisation, for this GPU gives no GPM", "$muted")]
    more = f"   FP32 {_percent(device.fp32_active_percent)}, FP16 {_percent(device.fp16_active_percent)}"
    return [
        _percent_row("SM", device.sm_active_percent, width),
        _percent_row("tensor", device.tensor_active_percent, width),
        _percent_row("DRAM", device.dram_active_percent, width),
        _words("", f"SM occupancy {_percent(device.sm_occupancy_percent)}{more}"),
    ]


def _percent_row(label: str, percent: float | None, width: int) -> Content:
    return _bar_row(label, None if percent is None else percent / 100, _percent(percent), width)


def _gauge_row(
    label: str,
    used: float | None,
    total: float | None,
    width: int,
    words: Callable[[float | None, float | None], str],
) -> Content:
    fraction = used / total if used is not None and total else None
    # A full memory is worth a colour; full power is what a device is for.
    style = None if label == "memory" else "$primary"
    return _bar_row(label, fraction, words(used, total), width, style=style)


def _bar_row(
    label: str, fraction: float | None, numbers: str, width: int, *, style: str | None = "$primary"
) -> Content:
    cells = width - _LABEL_CELLS - _PART_CELLS - 1 - _NUMBER_CELLS
    return Content.assemble(
        fit("", _LABEL_CELLS),
        (fit(label, _PART_CELLS), "$muted"),
        gauge(fraction, cells, style=style),
        " ",
        fit_right(numbers, _NUMBER_CELLS),
    )


def _words(label: str, text: str, style: str = "$foreground") -> Content:
    pad = fit("", _LABEL_CELLS)
    return Content.assemble(pad, (fit(label, _PART_CELLS) if label else "", "$muted"), (text, style))


def _throttle_row(device: DeviceSample) -> Content:
    reasons = device.throttle_reasons
    if reasons is None:
        return _words("", f"throttled: {NOT_KNOWN}")
    held = harmless(", ".join(reasons))
    return _words("", f"throttled: {held or 'no'}", "$warning" if _hard_throttle([device]) else "$foreground")


def _error_rows(view: RunView, device: DeviceSample) -> list[Content]:
    ecc = f"ECC errors: {_count(device.ecc_corrected)} corrected, {_count(device.ecc_uncorrected)} not"
    rows = [_words("", ecc, "$error" if device.ecc_uncorrected else "$foreground")]
    if device.remapped_rows is not None:
        waiting = ", more at the next reset" if device.remap_pending else ""
        failed = ", replacing failed" if device.remap_failed else ""
        style = "$error" if failed else "$warning" if waiting else "$foreground"
        rows.append(_words("", f"rows replaced: {device.remapped_rows}{waiting}{failed}", style))
    elif device.retired_pages is not None:
        waiting = ", more at the next reset" if device.retirement_pending else ""
        rows.append(_words("", f"pages retired: {device.retired_pages}{waiting}"))
    seen = [event for event in view.state.xids if event.device == device.index]
    rows += [_words("", f"Xid {event.xid}: {harmless(event.meaning)}", "$error") for event in seen]
    return rows if seen else [*rows, _words("", "Xid: none seen in this run", "$muted")]


# --- numbers in words -----------------------------------------------------------------------------


def _has_gpm(devices: Sequence[DeviceSample]) -> bool:
    return any(device.sm_active_percent is not None for device in devices)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sum(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _watts(watts: float | None) -> str:
    if watts is None:
        return f"{NOT_KNOWN} W"
    return f"{watts:.0f} W" if watts < 10_000 else f"{watts / 1000:.1f} kW"


def _power_of(used: float | None, limit: float | None) -> str:
    left = NOT_KNOWN if used is None else f"{used:.0f}"
    return f"{left}/{NOT_KNOWN if limit is None else f'{limit:.0f} W'}"


def _percent(value: float | None) -> str:
    return format_percent(value, digits=0)


def _count(value: int | None) -> str:
    return NOT_KNOWN if value is None else str(value)


def _clock(hertz: float | None) -> str:
    return NOT_KNOWN if hertz is None else f"{hertz / 1e6:.0f} MHz"


def _degrees(device: DeviceSample) -> str:
    return NOT_KNOWN if device.temperature_celsius is None else f"{device.temperature_celsius:.0f} C"
