"""Whether the memory of a run's GPUs is back once its processes have ended: read of the driver, not believed.

The driver takes a moment to free what a killed process held, and what it never frees is somebody else's or a
process that nobody could end: both are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.record.endevents import DeviceReturn, MemoryReturned

WAIT_SECONDS = 2.0
"""How long the end of a run waits for it at most."""
_PAUSE_SECONDS = 0.05

Devices = tuple[DeviceSample, ...]


class MemoryWatch:
    """Keeps what each GPU had in use at first and at most, from the samples that are taken anyway."""

    def __init__(self) -> None:
        self._seen: dict[int, DeviceReturn] = {}
        self._first = True

    def see(self, devices: Iterable[DeviceSample]) -> None:
        """One sample. The first one is from before the ranks took anything; what it lacks stays unknown."""
        first, self._first = self._first, False
        for device in devices:
            used = device.memory_used_bytes
            known = self._seen.get(device.index)
            if known is None:
                self._seen[device.index] = DeviceReturn(
                    index=device.index, before_bytes=used if first else None, largest_bytes=used
                )
            elif used is not None and used > (known.largest_bytes or -1):
                self._seen[device.index] = replace(known, largest_bytes=used)

    def wait(
        self,
        read: Callable[[], Devices],
        holders: Callable[[int], tuple[int, ...]],
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> MemoryReturned | None:
        """Read until all is back, for `WAIT_SECONDS` at most; None for a run without GPUs that ever told."""
        began = clock()
        while True:
            found = self._compared(read())
            spent = clock() - began
            waits = any(device.is_back is False for device in found)
            if not waits or spent >= WAIT_SECONDS:
                break
            sleep(_PAUSE_SECONDS)
        if all(device.before_bytes is None and device.largest_bytes is None for device in found):
            return None
        return MemoryReturned(devices=tuple(_told(device, holders) for device in found), seconds=spent)

    def _compared(self, devices: Devices) -> tuple[DeviceReturn, ...]:
        return tuple(
            replace(
                self._seen.get(device.index, DeviceReturn(index=device.index)),
                after_bytes=device.memory_used_bytes,
            )
            for device in devices
        )


def _told(device: DeviceReturn, holders: Callable[[int], tuple[int, ...]]) -> DeviceReturn:
    return device if device.is_back is not False else replace(device, holders=holders(device.index))
