"""Read the machine's memory, processors, disks and network. What the kernel does not tell is None."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from llmtop.profiler.hardware.cgroup import cgroup_memory
from llmtop.profiler.hardware.counters import RateCounter
from llmtop.profiler.hardware.cpulimit import CpuLimitReader
from llmtop.profiler.hardware.network import NetworkReader

if TYPE_CHECKING:
    from llmtop.profiler.record.deviceevents import HostSample

_T = TypeVar("_T")
_COUNTERS = ("busy", "total", "read", "write", "nvme_read", "nvme_write", "receive", "send")
_NVME_DRIVE = re.compile(r"nvme\d+n\d+")
"""A whole drive: not a partition of it, and not one of the paths behind it."""


class HostReader:
    """Rates are differences between two reads, so the first read has none."""

    def __init__(
        self,
        psutil: Any | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        network: NetworkReader | None = None,
    ) -> None:
        # Loaded here, so that what only asks for the memory's size does not pay for it.
        self._psutil: Any = psutil if psutil is not None else import_module("psutil")
        self._clock = clock
        self._network = network if network is not None else NetworkReader()
        self._cpu_limit = CpuLimitReader()
        self._rates = {name: RateCounter() for name in _COUNTERS}

    def read(self) -> HostSample:
        from llmtop.profiler.record.deviceevents import HostSample

        now = self._clock()
        memory = self._ask(self._psutil.virtual_memory)
        swap = self._ask(self._psutil.swap_memory)
        group = cgroup_memory()
        read, write = self._disk_totals()
        nvme_read, nvme_write = self._nvme_totals()
        receive, send = self._network_totals()
        network = self._network.read()
        cpu_limit = self._cpu_limit.read()
        return HostSample(
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_available_bytes=None if memory is None else int(memory.available),
            cgroup_limit_bytes=group.limit_bytes,
            cgroup_used_bytes=group.used_bytes,
            swap_used_bytes=None if swap is None else int(swap.used),
            cpu_percent=self._cpu_percent(now),
            cpu_count=self._ask(self._psutil.cpu_count),
            cpu_limit_cores=cpu_limit.cores,
            cpu_throttled_percent=cpu_limit.throttled_percent,
            disk_read_bytes_per_second=self._rates["read"].advance(read, now),
            disk_write_bytes_per_second=self._rates["write"].advance(write, now),
            nvme_read_bytes_per_second=self._rates["nvme_read"].advance(nvme_read, now),
            nvme_write_bytes_per_second=self._rates["nvme_write"].advance(nvme_write, now),
            network_receive_bytes_per_second=self._rates["receive"].advance(receive, now),
            network_send_bytes_per_second=self._rates["send"].advance(send, now),
            links_down=network.links_down,
            link_losses=network.link_losses,
            network_errors=network.errors,
        )

    def _ask(self, call: Callable[[], _T]) -> _T | None:
        """One reading; None on a kernel or in a container that does not give it."""
        try:
            return call()
        except (OSError, NotImplementedError, RuntimeError, self._psutil.Error):
            return None

    def _cpu_percent(self, now: float) -> float | None:
        times = self._ask(self._psutil.cpu_times)
        if times is None:
            return None
        # Guest time is part of user time already.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        busy_rate = self._rates["busy"].advance(busy, now)
        total_rate = self._rates["total"].advance(total, now)
        if busy_rate is None or not total_rate:
            return None
        return min(100.0, 100.0 * busy_rate / total_rate)

    def _disk_totals(self) -> tuple[int | None, int | None]:
        disks = self._ask(lambda: self._psutil.disk_io_counters(nowrap=False))
        return (None, None) if disks is None else (disks.read_bytes, disks.write_bytes)

    def _nvme_totals(self) -> tuple[int | None, int | None]:
        disks = self._ask(lambda: self._psutil.disk_io_counters(perdisk=True, nowrap=False))
        drives = [disk for name, disk in (disks or {}).items() if _NVME_DRIVE.fullmatch(name)]
        if not drives:
            return None, None
        return sum(drive.read_bytes for drive in drives), sum(drive.write_bytes for drive in drives)

    def _network_totals(self) -> tuple[int | None, int | None]:
        """All interfaces but the loopback, which would count what never leaves the machine."""
        cards = self._ask(lambda: self._psutil.net_io_counters(pernic=True, nowrap=False))
        outside = [card for name, card in (cards or {}).items() if name != "lo"]
        if not outside:
            return None, None
        return sum(card.bytes_recv for card in outside), sum(card.bytes_sent for card in outside)
