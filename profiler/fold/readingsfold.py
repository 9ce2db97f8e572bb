"""How a sample of the hardware adds to what is kept of all samples."""

from __future__ import annotations

from collections.abc import Iterable

from llmtop.profiler.record.events import HardwareSampled


def count_throttles(counts: dict[int, dict[str, int]], event: HardwareSampled) -> dict[int, dict[str, int]]:
    for device in event.devices:
        for reason in device.throttle_reasons or ():
            of_device = counts.get(device.index, {})
            counts = {**counts, device.index: {**of_device, reason: of_device.get(reason, 0) + 1}}
    return counts


def add_throttles(
    counts: dict[int, dict[str, int]], more: dict[int, dict[str, int]]
) -> dict[int, dict[str, int]]:
    if not more:
        return counts
    joined = {index: dict(reasons) for index, reasons in counts.items()}
    for index, reasons in more.items():
        of_device = joined.setdefault(index, {})
        for reason, count in reasons.items():
            of_device[reason] = of_device.get(reason, 0) + count
    return joined


def lost_devices(known: frozenset[int], event: HardwareSampled) -> frozenset[int]:
    gone = {device.index for device in event.devices if device.is_lost}
    return known if gone <= known else known | gone


def first_ecc(known: dict[int, int], event: HardwareSampled) -> dict[int, int]:
    readings = {d.index: d.ecc_uncorrected for d in event.devices if d.ecc_uncorrected is not None}
    return known if readings.keys() <= known.keys() else {**readings, **known}


def raise_peaks(peaks: dict[int, int], readings: Iterable[tuple[int, int | None]]) -> dict[int, int]:
    """`peaks` with every larger reading in it; the same object when there is none."""
    higher = {k: v for k, v in readings if v is not None and v > peaks.get(k, -1)}
    return {**peaks, **higher} if higher else peaks
