"""Xid errors: what the driver's numbers mean to somebody who trains, and a watch for new ones.

Meanings and what to do follow NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from llmtop.profiler.hardware.nvmlcalls import NvmlCalls
from llmtop.profiler.record.events import XidSeen

_XID_EVENT = 0x8
"""nvmlEventTypeXidCriticalError."""
_DRAINED_AT_ONCE = 16
"""Of a flood, this many are taken at a time."""

_RESET = "end all jobs on it and reset the device (nvidia-smi --gpu-reset), then let dcgmi diag test it"
_OWN_CODE = (
    "most likely the program's: run again with CUDA_LAUNCH_BLOCKING=1 and fewer kernels "
    "(--attention eager, --no-liger); if it comes back on this GPU only, test the device"
)
_SERVICE = "take the GPU out of use, restart the machine, and have the device or its seat looked at"


class Xid(NamedTuple):
    meaning: str
    fix: str
    is_hardware: bool
    """Whether it speaks of the device or its links, not of the program."""


XIDS: dict[int, Xid] = {
    8: Xid("the GPU stopped processing", _OWN_CODE, False),
    13: Xid("a kernel raised an exception", _OWN_CODE, False),
    31: Xid("a kernel touched memory that is not mapped", _OWN_CODE, False),
    32: Xid("the driver got a corrupted command stream", "check driver and PCIe link; " + _RESET, True),
    38: Xid("driver firmware error", "update the driver; " + _RESET, True),
    43: Xid("the program's channel was reset after a fault of its own", _OWN_CODE, False),
    45: Xid(
        "work was cleaned up after an earlier error or a killed process",
        "look for the error before it; alone it only means that a process was ended",
        False,
    ),
    46: Xid("the GPU stopped processing", _RESET, True),
    48: Xid("memory error that ECC could not correct", _RESET, True),
    61: Xid("internal microcontroller stopped", _RESET, True),
    62: Xid("internal microcontroller halted", _RESET, True),
    63: Xid(
        "a memory row was put on the list for replacement",
        "the run may go on; reset the device at the next chance, which replaces the row",
        True,
    ),
    64: Xid("a memory row could not be replaced", _RESET + "; if it stays, replace the device", True),
    68: Xid("the video processor raised an exception", _OWN_CODE, False),
    69: Xid("the graphics engine got a wrong class or method", _OWN_CODE, False),
    74: Xid(
        "NVLink error",
        "see nvidia-smi nvlink --errorcounters; reset both ends (device and fabric manager); if it comes "
        "back, have bridge or baseboard looked at. NCCL_P2P_DISABLE=1 trains without NVLink, slowly",
        True,
    ),
    79: Xid("the GPU has fallen off the bus", _SERVICE + ": power, heat, PCIe seat", True),
    92: Xid("many memory errors corrected by ECC", "watch it; plan a diagnosis of the device", True),
    94: Xid(
        "memory error that was contained in one program",
        "start the run again; reset the device at the next chance, which replaces the row",
        True,
    ),
    95: Xid("memory error that was not contained", _RESET, True),
    109: Xid("a context switch took too long", _RESET, True),
    119: Xid("the GPU's system processor (GSP) does not answer", _RESET + "; update the driver", True),
    120: Xid("the GPU's system processor (GSP) failed", _RESET + "; update the driver", True),
    121: Xid("error on the link between CPU and GPU (C2C)", _RESET, True),
    136: Xid("an NVLink could not be trained", _RESET + "; restart the fabric manager", True),
    137: Xid("a kernel touched memory of another GPU that it may not use", _OWN_CODE, False),
    140: Xid("memory error that ECC could not correct, and recovery failed", _RESET, True),
    143: Xid("the GPU could not be initialised", _SERVICE, True),
    149: Xid("NVLink error (fifth generation)", "restart the fabric manager; " + _RESET, True),
    154: Xid("the driver asks for a recovery", "nvidia-smi -q -d GPU_RECOVERY_ACTION names it", True),
}
_UNKNOWN = Xid("not in this table", "see dmesg (NVRM: Xid), and NVIDIA's Xid catalogue for the number", False)


def xid_seen(device: int, number: int) -> XidSeen:
    known = XIDS.get(number, _UNKNOWN)
    return XidSeen(
        device=device, xid=number, meaning=known.meaning, fix=known.fix, is_hardware=known.is_hardware
    )


class XidWatch:
    """One event set a device, so that an event names its device even when the device is gone."""

    def __init__(self, calls: NvmlCalls, handles: dict[int, Any]) -> None:
        self._calls = calls
        self._sets: dict[int, Any] = {}
        for index, handle in handles.items():
            self._register(index, handle)

    def _register(self, index: int, handle: Any) -> None:
        nvml = self._calls.nvml
        wanted = self._calls.constant("nvmlEventTypeXidCriticalError", _XID_EVENT)
        try:
            events = nvml.nvmlEventSetCreate()
        except (nvml.NVMLError, AttributeError):
            return
        try:
            nvml.nvmlDeviceRegisterEvents(handle, wanted, events)
        except nvml.NVMLError:
            # Not on this device, or not for this user.
            self._calls.ask("nvmlEventSetFree", events)
            return
        self._sets[index] = events

    def devices(self) -> frozenset[int]:
        """Those whose Xids the driver tells."""
        return frozenset(self._sets)

    def poll(self, index: int) -> Iterable[XidSeen]:
        """What came since the last call, without waiting."""
        events = self._sets.get(index)
        for _ in range(_DRAINED_AT_ONCE if events is not None else 0):
            # A time-out, which says that there is nothing, is an error as others are.
            event = self._calls.ask("nvmlEventSetWait_v2", events, 0)
            if event is None:
                return
            if int(event.eventType) & _XID_EVENT:
                yield xid_seen(index, int(event.eventData))

    def close(self) -> None:
        for events in self._sets.values():
            self._calls.ask("nvmlEventSetFree", events)
        self._sets = {}
