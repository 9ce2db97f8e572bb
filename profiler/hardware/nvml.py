"""Read NVIDIA GPUs through NVML. What the driver does not tell is None; no reading ever raises.

A driver that hangs when it is opened is one that is not there; who reads it later asks aside (`aside.py`).
A reading that turns out to take more than a millisecond runs in whole samples only; in fast ones its last
answer is repeated.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from msgspec import Struct

from llmtop.profiler.hardware.aside import OPEN_SECONDS, OneQuestion
from llmtop.profiler.hardware.costs import CallCost, CallCosts
from llmtop.profiler.hardware.links import LinkTotals
from llmtop.profiler.hardware.nvmlcalls import NvmlCalls, text
from llmtop.profiler.hardware.readings import READINGS, Device, with_fallbacks
from llmtop.profiler.hardware.topology import read_topology
from llmtop.profiler.hardware.xid import XidWatch
from llmtop.profiler.record.deviceevents import DeviceSample, Topology
from llmtop.profiler.record.events import XidSeen

_PROCESSES = "nvmlDeviceGetComputeRunningProcesses"
_GRAPHICS_PROCESSES = "nvmlDeviceGetGraphicsRunningProcesses"
_XID_WAIT = "nvmlEventSetWait_v2"
_ONE_AT_A_TIME = threading.RLock()
"""Readers of one process share the library, which crashed when several threads sampled through readers of
their own (driver 580, nvidia-ml-py 13)."""
_OPENING = OneQuestion()


class NvmlDevice(Struct, frozen=True, kw_only=True):
    """What does not change while the program runs."""

    index: int
    name: str | None
    uuid: str | None
    memory_total_bytes: int | None
    compute_capability: str | None = None
    """As `9.0`."""


class Holder(NamedTuple):
    """A process that has memory of a device."""

    pid: int
    """As the driver counts; in a container it may be the host's number."""
    memory_bytes: int | None


class _Opened(NamedTuple):
    handles: tuple[Any, ...] = ()
    devices: tuple[NvmlDevice, ...] = ()
    problem: str | None = None
    silent: bool = False


class NvmlReader:
    """The GPUs of this machine. Without a driver there are none, and `problem` says why."""

    def __init__(
        self,
        pynvml: ModuleType | Any | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        waits: bool = False,
        open_seconds: float | None = None,
    ) -> None:
        """`waits` for a driver however long it takes to open; else one that takes `open_seconds` hangs, by
        default `OPEN_SECONDS`."""
        self.problem: str | None = None
        """Why there are no devices; None when NVML works."""
        self.is_silent = False
        """Whether there is a driver that hangs, so that nobody knows which devices there are."""
        self.devices: tuple[NvmlDevice, ...] = ()
        self._clock = clock
        self._costs = CallCosts(clock)
        self._handles: list[Any] = []
        self._read: dict[int, Device] = {}
        """Devices that have been read, by index."""
        self._xids: XidWatch | None = None
        self._new_xids: list[XidSeen] = []
        try:
            nvml = pynvml if pynvml is not None else import_module("pynvml")
        except ImportError as error:
            self.problem = f"nvidia-ml-py cannot be imported: {error}"
            return
        self._calls = calls = NvmlCalls(nvml)
        patience = OPEN_SECONDS if open_seconds is None else open_seconds
        hangs = _Opened(problem=f"NVML: the driver does not answer within {patience:g} s", silent=True)
        opened = _open(calls) if waits else _OPENING.ask(partial(_open, calls), hangs, patience)
        self._handles, self.devices, self.problem = list(opened.handles), opened.devices, opened.problem
        self.is_silent = opened.silent

    def sample(
        self,
        indices: Iterable[int] | None = None,
        *,
        own_pids: Collection[int] | None = None,
        fast: bool = False,
    ) -> tuple[DeviceSample, ...]:
        """Read the devices, all or those of `indices`, in that order.

        With `own_pids` the processes of each device are listed too. A `fast` sample repeats the last
        answer of every reading that is known to take, or may take, more than a millisecond.
        """
        chosen = self._chosen(indices)
        if not chosen:
            # Whoever opens a driver that hangs has the lock for good.
            return ()
        with _ONE_AT_A_TIME:
            return tuple(self._sample(index, own_pids, fast) for index in chosen)

    def link_totals(self, index: int) -> LinkTotals:
        """Bytes that went over the links of a device since the driver was loaded."""
        if not self._chosen([index]):
            return LinkTotals()
        with _ONE_AT_A_TIME:
            return self._device(index).links.totals()

    def holders(self, index: int) -> tuple[Holder, ...] | None:
        """The processes that have memory of a device, each once; None where the driver does not tell."""
        if not self._chosen([index]):
            return None
        with _ONE_AT_A_TIME:
            answers = [self._device(index).ask(call) for call in (_PROCESSES, _GRAPHICS_PROCESSES)]
        if answers[0] is None:
            return None
        found: dict[int, Holder] = {}
        for process in (process for answer in answers for process in answer or ()):
            size = process.usedGpuMemory
            found[process.pid] = Holder(process.pid, None if size is None else int(size))
        return tuple(found.values())

    def topology(self, indices: Iterable[int] | None = None) -> Topology:
        """How the devices are connected, read anew."""
        chosen = self._chosen(indices)
        if not chosen:
            return Topology()
        names = {index: self.devices[index].name for index in chosen}
        with _ONE_AT_A_TIME:
            return read_topology(self._calls, [(index, self._handles[index]) for index in chosen], names)

    def watch_xids(self, indices: Iterable[int] | None = None) -> frozenset[int]:
        """Samples look for Xid errors from now on; of these devices, those whose errors the driver tells."""
        if self._handles and self._xids is None:
            handles = {index: self._handles[index] for index in self._chosen(indices)}
            with _ONE_AT_A_TIME:
                self._xids = XidWatch(self._calls, handles)
        return self._xids.devices() if self._xids else frozenset()

    def take_xids(self, *, poll: bool = False) -> tuple[XidSeen, ...]:
        """Xid errors that no earlier call has given; with `poll`, also those since the last sample."""
        if poll and self._xids is not None:
            with _ONE_AT_A_TIME:
                for index in sorted(self._xids.devices()):
                    self._new_xids += self._xids.poll(index)
        taken, self._new_xids = tuple(self._new_xids), []
        return taken

    def call_costs(self) -> tuple[CallCost, ...]:
        """What each reading costs on each device, and which are on the slow clock; the dearest first."""
        return self._costs.table()

    def visible_indices(self) -> tuple[int, ...]:
        """NVML indices of the devices that CUDA shows to this process, in CUDA's order."""
        return visible_device_indices([device.uuid for device in self.devices])

    def close(self) -> None:
        if not self._handles:
            return
        with _ONE_AT_A_TIME:
            if self._xids is not None:
                self._xids.close()
            for device in self._read.values():
                device.gpm.close()
            self._calls.ask("nvmlShutdown")
        self._handles, self._read, self._xids = [], {}, None

    def _chosen(self, indices: Iterable[int] | None) -> list[int]:
        chosen = range(len(self._handles)) if indices is None else indices
        return [index for index in chosen if index < len(self._handles)]

    def _device(self, index: int) -> Device:
        if index not in self._read:
            self._read[index] = Device(index, self._handles[index], self._calls, self._clock)
        return self._read[index]

    def _sample(self, index: int, own_pids: Collection[int] | None, fast: bool) -> DeviceSample:
        device, known = self._device(index), self.devices[index]
        self._calls.met_lost_device = False
        fields: dict[str, Any] = {}
        for reading in READINGS:
            read = partial(reading.read, device)
            slow = reading.always_slow
            with_fallbacks(fields, self._costs.run(reading.call, index, read, fast=fast, always_slow=slow))
        if own_pids is not None:
            fields |= self._costs.run(_PROCESSES, index, partial(_processes, device, own_pids), fast=False)
        self._look_for_xids(index, fast)
        if fast:
            # Not again in the record what has not been read again.
            fields.pop("links", None)
        if self._calls.met_lost_device:
            fields = {"is_lost": True}
        total = known.memory_total_bytes
        return DeviceSample(index=index, name=known.name, memory_total_bytes=total, **fields)

    def _look_for_xids(self, index: int, fast: bool) -> None:
        if self._xids is not None and index in self._xids.devices():
            self._costs.run(_XID_WAIT, index, lambda: self._take_in_xids(index), fast=fast)

    def _take_in_xids(self, index: int) -> dict[str, Any]:
        if self._xids is not None:
            self._new_xids += self._xids.poll(index)
        return {}


def _open(calls: NvmlCalls) -> _Opened:
    nvml = calls.nvml
    with _ONE_AT_A_TIME:
        try:
            nvml.nvmlInit()
            count = int(nvml.nvmlDeviceGetCount())
            handles = tuple(nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count))
        except nvml.NVMLError as error:
            return _Opened(problem=f"NVML: {error}")
        devices = tuple(_described(calls, index, handle) for index, handle in enumerate(handles))
    return _Opened(handles, devices)


def _described(calls: NvmlCalls, index: int, handle: Any) -> NvmlDevice:
    memory = calls.ask("nvmlDeviceGetMemoryInfo", handle)
    capability = calls.ask("nvmlDeviceGetCudaComputeCapability", handle)
    return NvmlDevice(
        index=index,
        name=text(calls.ask("nvmlDeviceGetName", handle)),
        uuid=text(calls.ask("nvmlDeviceGetUUID", handle)),
        memory_total_bytes=None if memory is None else int(memory.total),
        compute_capability=None if capability is None else ".".join(map(str, capability)),
    )


def _processes(device: Device, own_pids: Collection[int]) -> dict[str, Any]:
    """How many there are, and what ours hold. In a container NVML may number them as the host does."""
    found = device.ask(_PROCESSES)
    if found is None:
        return {}
    own = [process.usedGpuMemory for process in found if process.pid in own_pids]
    known = own and all(size is not None for size in own)
    return {"process_count": len(found), "own_memory_bytes": sum(map(int, own)) if known else None}


def visible_device_indices(uuids: Sequence[str | None], visible: str | None = None) -> tuple[int, ...]:
    """NVML indices of the devices that CUDA enumerates, in its order; position is the local rank.

    `uuids` are the machine's, by NVML index; `visible` is CUDA_VISIBLE_DEVICES (default: of this
    process). Like CUDA, the list ends before its first entry that names no device.
    """
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        index = _device_named(entry, uuids)
        if index is None or index in found:
            break
        found.append(index)
    return tuple(found)


def _device_named(entry: str, uuids: Sequence[str | None]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.startswith(("GPU-", "MIG-GPU-")):
        return None
    # CUDA accepts a unique beginning; the old MIG form is MIG-GPU-uuid/instance/compute.
    prefix = entry.removeprefix("MIG-").partition("/")[0]
    hits = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(prefix)]
    return hits[0] if len(hits) == 1 else None
