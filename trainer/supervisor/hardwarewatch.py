"""Looks at the hardware while a run lasts, and writes what it sees into the run's record."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable

from llmtop.profiler.hardware.aside import OPEN_SECONDS
from llmtop.profiler.hardware.sampler import Sampler
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample
from llmtop.profiler.record.endevents import MemoryReturned
from llmtop.profiler.record.events import HardwareSampled, TopologySeen, XidSeen
from llmtop.profiler.record.patientlog import PatientWriter
from llmtop.profiler.record.rundir import HARDWARE, RunDir
from llmtop.trainer.supervisor.memoryreturn import MemoryWatch

_XIDS_WRITTEN = 200
"""A program that goes on after an Xid may cause thousands."""


class HardwareWatch:
    """Samples go to a log of their own; Xid errors and the topology among the supervisor's events.

    Whatever happens while the hardware is looked at, the run goes on.
    """

    def __init__(
        self,
        run: RunDir,
        write: Callable[[XidSeen | TopologySeen | MemoryReturned], object],
        log: Callable[[str], None],
        *,
        open_seconds: float = OPEN_SECONDS,
    ) -> None:
        """`open_seconds`: how long the driver may take to open before nobody waits for it."""
        spec = run.spec()
        self._sampler: Sampler | None = None
        try:
            self._sampler = Sampler(
                device_indices=() if spec.on_cpu else None, log_path=run.log_path, open_seconds=open_seconds
            )
        except Exception:  # noqa: BLE001 - training matters more than its pictures; supervisor.log shows it
            log(f"hardware is not sampled:\n{traceback.format_exc()}")
        self._samples = PatientWriter(run.events_path(HARDWARE), HARDWARE, log=log)
        self.every_seconds = spec.options.sample_seconds
        self._write, self._log = write, log
        self._due = 0.0
        self._told: set[str] = set()
        """Why samples were left out, each once."""
        self._silent = False
        self._topology_due = False
        """Whether the driver did not answer when it was asked how the devices are connected."""
        self._newest: HardwareSampled | None = None
        self._xids: list[XidSeen] = []
        self._memory = MemoryWatch()
        self.rank_memory_bytes: dict[int, int] = {}
        """Rank to what its processes held of host memory (PSS, else RSS) when they were last seen."""

    @property
    def newest(self) -> HardwareSampled | None:
        """With the time at which it was taken."""
        return self._newest

    @property
    def host(self) -> HostSample | None:
        """The newest reading of the machine."""
        return self._newest.host if self._newest else None

    @property
    def driver_silent(self) -> bool:
        """Whether the driver of the GPUs has not answered what it was asked last."""
        return self._sampler is not None and self._sampler.driver_silent

    @property
    def xids(self) -> tuple[XidSeen, ...]:
        return tuple(self._xids)

    @property
    def lost_devices(self) -> tuple[int, ...]:
        """GPUs that did not answer any more in the newest sample."""
        return tuple(d.index for d in self._newest.devices if d.is_lost) if self._newest else ()

    def sample(self, rank_pids: dict[int, int]) -> None:
        """One sample, if it is time for one."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self.every_seconds
            self._look(lambda sampler: self._take_sample(sampler, rank_pids))

    def tell_topology(self) -> None:
        """How the devices of this run are connected, for a run that has any."""
        self._look(self._write_topology)

    def tell_xids(self) -> None:
        """Xid errors since the last sample."""
        self._look(lambda sampler: self._write_xids(sampler.take_xids(poll=True)))

    def tell_memory_return(self) -> None:
        """What the GPUs have in use once no process of the run is left; waited for a moment."""
        self._look(self._wait_for_memory)

    def finish(self) -> None:
        """Write the samples that wait for room, if there is room by now."""
        self._samples.flush()

    def _look(self, look: Callable[[Sampler], None]) -> None:
        if self._sampler is None:
            return
        try:
            look(self._sampler)
        except OSError as error:
            # What asks the machine may fail now and not at the next sample.
            if str(error) not in self._told:
                self._told.add(str(error))
                self._log(f"a sample of the hardware is left out: {error}")
        except Exception:  # noqa: BLE001 - training matters more than its pictures; supervisor.log shows it
            self._log(f"hardware is no longer sampled:\n{traceback.format_exc()}")
            self._sampler = None

    def _take_sample(self, sampler: Sampler, rank_pids: dict[int, int]) -> None:
        stamped = self._samples.stamp(sampler.sample(rank_pids))
        assert isinstance(stamped, HardwareSampled)
        self._newest = stamped
        self._tell_silence(stamped.driver_silent)
        if self._topology_due and not stamped.driver_silent:
            self._write_topology(sampler)
        self._memory.see(stamped.devices)
        for seen in self._newest.processes:
            held = seen.rss_bytes if seen.pss_bytes is None else seen.pss_bytes
            if held is not None:
                self.rank_memory_bytes[seen.rank] = held
        self._write_xids(sampler.take_xids())
        self._samples.append(stamped)

    def _tell_silence(self, silent: bool) -> None:
        if silent != self._silent:
            self._silent = silent
            told = "does not answer: what it tells is left out until it does" if silent else "answers again"
            self._log(f"the driver of the GPUs {told}")

    def _write_topology(self, sampler: Sampler) -> None:
        silent = sampler.driver_silent
        topology = sampler.topology()
        # It may have answered meanwhile, too late for this.
        self._topology_due = not topology.devices and (silent or sampler.driver_silent)
        if topology.devices:
            self._write(TopologySeen(topology=topology))

    def _wait_for_memory(self, sampler: Sampler) -> None:
        def read() -> tuple[DeviceSample, ...]:
            # Each look is a sample of the record too: the monitor shows what the driver said last.
            self._take_sample(sampler, {})
            return self._newest.devices if self._newest is not None else ()

        if self._newest is None or not self._newest.devices:
            return
        returned = self._memory.wait(read, sampler.holders, clock=time.monotonic, sleep=time.sleep)
        if returned is not None:
            self._write(returned)

    def _write_xids(self, found: Iterable[XidSeen]) -> None:
        """As far as a flood of them leaves room in the record."""
        for seen in found:
            if len(self._xids) < _XIDS_WRITTEN:
                self._xids.append(seen)
                self._write(seen)
