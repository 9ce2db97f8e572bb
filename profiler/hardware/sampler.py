"""One hardware sample of a run: its devices, its host and the process tree of each of its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from llmtop.profiler.hardware.aside import OPEN_SECONDS, Aside
from llmtop.profiler.hardware.counters import GroupCounter, RateCounter
from llmtop.profiler.hardware.host import HostReader
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.hardware.others import OthersCounter
from llmtop.profiler.hardware.processes import all_running, descendants, thread_waits, tree_memory
from llmtop.profiler.record.deviceevents import DeviceSample, OtherWork, ProcessSample, Topology
from llmtop.profiler.record.events import HardwareSampled, XidSeen
from llmtop.profiler.record.rundir import SUPERVISOR

SLOW_EVERY = 5
"""Samples between readings that cost milliseconds: PSS, process trees, the processes of a device, and
whatever else of a device turns out to."""
_WHOLE_AT_FIRST = 2
"""What a reading costs is known only after its second time."""


class _Tree(Struct):
    """What is kept of one rank between samples."""

    pids: tuple[int, ...]
    cpu: RateCounter
    wait: GroupCounter
    pss_bytes: int | None = None
    compiler_pss_bytes: int = 0
    wait_percent: float | None = None


class Sampler:
    """Called by the supervisor's loop. Slow readings are repeated in the samples between two of them."""

    def __init__(
        self,
        *,
        nvml: NvmlReader | None = None,
        host: HostReader | None = None,
        device_indices: tuple[int, ...] | None = None,
        slow_every: int = SLOW_EVERY,
        log_path: Callable[[int | str], Path] | None = None,
        clock: Callable[[], float] = time.monotonic,
        driver: Aside | None = None,
        open_seconds: float = OPEN_SECONDS,
    ) -> None:
        """`device_indices`: NVML indices in the order of the local ranks; by default those CUDA shows.

        `log_path` says where a rank, or the supervisor, writes; without it no sample tells how much.
        `driver` asks the driver: nobody waits for one that hangs, and its readings are None meanwhile; of one
        that hangs when it is opened there are no devices until it answers. A sampler without devices never
        asks it. `open_seconds`: how long it is waited for here.
        """
        self._driver = driver if driver is not None else Aside()
        self._log_path = log_path
        self._nvml: NvmlReader | None = None
        """Once it is open."""
        self._host = host if host is not None else HostReader()
        self._indices = device_indices or ()
        self._slow_every = slow_every
        self._clock = clock
        self._count = 0
        if device_indices != ():
            self._driver.ask(lambda: self._open(nvml, device_indices), None, wait_seconds=open_seconds)
        self._trees: dict[int, _Tree] = {}
        self._own: frozenset[int] = frozenset()
        """Processes of the run: this one, the ranks, and all below them."""
        self._others = OthersCounter()
        self._other_work: tuple[OtherWork, ...] = ()
        self._devices: dict[int, DeviceSample] = {}
        """Newest sample of each device that had its processes listed."""

    def _open(self, nvml: NvmlReader | None, indices: tuple[int, ...] | None) -> None:
        """Asked aside: whoever else looks sees a reader that is open, or none."""
        reader = nvml if nvml is not None else NvmlReader(waits=True)
        self._indices = reader.visible_indices() if indices is None else indices
        reader.watch_xids(self._indices)
        self._nvml = reader

    def sample(self, rank_pids: dict[int, int]) -> HardwareSampled:
        """Read everything once. A process or device that has gone gives None, never an error."""
        roots = {rank: tree.pids[0] for rank, tree in self._trees.items()}
        slow = self._count % self._slow_every == 0 or roots != rank_pids
        fast_devices = not slow and self._count >= _WHOLE_AT_FIRST
        self._count += 1
        if slow:
            self._find_trees(rank_pids)
        devices = self._sample_devices(slow, fast_devices)
        return HardwareSampled(
            devices=devices,
            driver_silent=self.driver_silent,
            host=replace(
                self._host.read(), log_bytes=self._log_bytes(SUPERVISOR), other_work=self._other_work
            ),
            processes=tuple(self._sample_rank(rank, slow) for rank in sorted(self._trees)),
        )

    @property
    def driver_silent(self) -> bool:
        """Whether the driver has not answered what it was asked last."""
        return self._driver.waits

    def take_xids(self, *, poll: bool = False) -> tuple[XidSeen, ...]:
        """Xid errors that the samples came upon; with `poll`, also those since the last sample."""
        nvml = self._nvml
        if nvml is None:
            return ()
        return self._driver.ask(lambda: nvml.take_xids(poll=True), ()) if poll else nvml.take_xids()

    def holders(self, index: int) -> tuple[int, ...]:
        """Processes with memory of a device, as the driver numbers them; empty where it does not tell."""
        nvml = self._nvml
        found = self._driver.ask(lambda: nvml.holders(index), None) if nvml is not None else None
        return tuple(holder.pid for holder in found or ())

    def topology(self) -> Topology:
        """How the run's devices are connected."""
        nvml = self._nvml
        if nvml is None:
            return Topology()
        return self._driver.ask(lambda: nvml.topology(self._indices), Topology())

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()

    def _find_trees(self, rank_pids: dict[int, int]) -> None:
        running = all_running()
        me = os.getpid()
        found = descendants([me, *rank_pids.values()], running=running)
        before, self._trees = self._trees, {}
        for rank, pid in rank_pids.items():
            tree = before.get(rank)
            same = tree is not None and tree.pids[0] == pid
            self._trees[rank] = tree if tree is not None and same else _new_tree(pid)
            self._trees[rank].pids = found[pid]
        # Ranks that stand by, and whatever else was started for the run, are below this process.
        self._own = frozenset(pid for pids in found.values() for pid in pids)
        self._other_work = self._others.advance(running, self._own, self._clock())

    def _sample_devices(self, slow: bool, fast: bool) -> tuple[DeviceSample, ...]:
        nvml = self._nvml
        if nvml is None:
            return ()
        own = self._own if slow else None
        samples = self._driver.ask(
            lambda: nvml.sample(self._indices, own_pids=own, fast=fast), self._unread_devices(nvml)
        )
        if slow:
            self._devices = {sample.index: sample for sample in samples}
            return samples
        return tuple(self._with_processes(sample) for sample in samples)

    def _unread_devices(self, nvml: NvmlReader) -> tuple[DeviceSample, ...]:
        """What is known of them without asking."""
        known = {device.index: device for device in nvml.devices}
        chosen = [known[index] for index in self._indices if index in known]
        return tuple(
            DeviceSample(index=one.index, name=one.name, memory_total_bytes=one.memory_total_bytes)
            for one in chosen
        )

    def _with_processes(self, sample: DeviceSample) -> DeviceSample:
        listed = self._devices.get(sample.index)
        if listed is None or sample.is_lost:
            return sample
        return replace(sample, process_count=listed.process_count, own_memory_bytes=listed.own_memory_bytes)

    def _sample_rank(self, rank: int, slow: bool) -> ProcessSample:
        tree, log_bytes = self._trees[rank], self._log_bytes(rank)
        memory = tree_memory(tree.pids, with_pss=slow)
        if memory is None:
            return ProcessSample(rank=rank, log_bytes=log_bytes)
        if slow:
            tree.pss_bytes, tree.compiler_pss_bytes = memory.pss_bytes, memory.compiler_pss_bytes
            waiting = tree.wait.advance(thread_waits(memory.pids), self._clock())
            tree.wait_percent = None if waiting is None else 100.0 * waiting
        rate = tree.cpu.advance(memory.cpu_seconds, self._clock())
        return ProcessSample(
            rank=rank,
            rss_bytes=memory.rss_bytes,
            pss_bytes=tree.pss_bytes,
            cpu_percent=None if rate is None else 100.0 * rate,
            cpu_wait_percent=tree.wait_percent,
            log_bytes=log_bytes,
            compiler_rss_bytes=memory.compiler_rss_bytes,
            compiler_pss_bytes=tree.compiler_pss_bytes,
        )

    def _log_bytes(self, source: int | str) -> int | None:
        if self._log_path is None:
            return None
        try:
            return self._log_path(source).stat().st_size
        except OSError:
            return None


def _new_tree(pid: int) -> _Tree:
    return _Tree(pids=(pid,), cpu=RateCounter(), wait=GroupCounter())
