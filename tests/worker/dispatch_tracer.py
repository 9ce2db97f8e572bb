"""An allocator for tests on the CPU: each tensor that an operator makes is an allocation, traced exactly."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from llmtop.profiler.probes.allocator import AllocatorCounters
from llmtop.profiler.probes.peaktrace import Trace


class DispatchTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around a training; it counts always and records between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, int] = {}
        self.events: list[tuple[int, int, int]] = []
        self.count = 0
        self.recording = False
        self.current = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, torch.Tensor):
                self.adopt(tensor)
        return made

    def adopt(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from now on."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        # A meta tensor has a size and no address.
        if not size or not address or address in self.live:
            return
        self.live[address] = size
        self._write(address, size)
        weakref.finalize(storage, self._freed, address)

    def _freed(self, address: int) -> None:
        self._write(address, -self.live.pop(address))

    def _write(self, address: int, delta: int) -> None:
        self.count += 1
        self.current += delta
        self.peak = max(self.peak, self.current)
        if self.recording:
            self.events.append((address, delta, time.time_ns() // 1000))

    def start(self) -> None:
        self.events, self.recording = [], True
        self.peak = self.current

    def counters(self) -> AllocatorCounters:
        peak, self.peak = self.peak, self.current
        return AllocatorCounters(
            allocated_bytes=self.current + 1,
            allocated_peak_bytes=peak + 1,
            reserved_bytes=0,
            reserved_peak_bytes=0,
            requested_bytes=self.current,
            requested_peak_bytes=peak,
            events=self.count,
        )

    def stop(self) -> Trace:
        self.recording = False
        return Trace(
            addresses=[address for address, _, _ in self.events],
            deltas=[delta for _, delta, _ in self.events],
            active_deltas=[delta for _, delta, _ in self.events],
            times_us=[at for _, _, at in self.events],
            live_at_end=dict(self.live),
        )

    def abandon(self) -> None:
        self.recording = False
        self.events = []
