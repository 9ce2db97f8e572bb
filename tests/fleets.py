"""Runs over hosts for tests: real logs of ranks, folded by the real summariser, on clocks that are moved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtop.profiler.fleet.summariser import EVERY_SECONDS, Summariser
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample, ProcessSample
from llmtop.profiler.record.eventbase import Event
from llmtop.profiler.record.eventlog import Clock, EventWriter
from llmtop.profiler.record.events import (
    HardwareSampled,
    PhaseMemory,
    RankExited,
    RankFailed,
    RankFinished,
    RankStarted,
    RunEnd,
    RunEnded,
    RunStarted,
    StepFinished,
)
from llmtop.profiler.record.hostevents import ClockMeasured, HostFound, HostJoined, HostLeft, HostLost
from llmtop.profiler.record.hosts import Host, HostDir, Hosts, write_hosts
from llmtop.profiler.record.rundir import HARDWARE, SUPERVISOR, RunDir
from tests.recorded import BEGAN, ManualClock
from tests.recorded_spec import GIB, MIB, Kind, recorded_prediction, recorded_spec

_SHARES = {"data": 0.02, "forward": 0.33, "backward": 0.55, "optimizer": 0.1}


class PlayedHost:
    """One host: its ranks' logs, its own, and what folds them."""

    def __init__(self, run: RunDir, host: Host, time: ManualClock) -> None:
        self.host = host
        self.time = ManualClock(time.now)
        """The host's own clock, which may differ."""
        self.dir = HostDir(run.path, host)
        self.dir.own_path.mkdir(parents=True)
        clock = Clock(wall=lambda: self.time.now, monotonic=lambda: self.time.now)
        source = f"host:{host.name}"
        self.events = EventWriter(self.dir.events_path(SUPERVISOR), source, clock=clock)
        self.hardware = EventWriter(self.dir.events_path(HARDWARE), source, clock=clock)
        self.ranks = {n: EventWriter(run.events_path(n), f"rank{n}", clock=clock) for n in host.ranks}
        self.summariser = Summariser(self.dir, monotonic=lambda: self.time.now, clock=clock)
        self.dir.write_supervisor_pid()
        self.network = HostSample(network_errors=7, link_losses=1)

    def close(self) -> None:
        for writer in (self.events, self.hardware, *self.ranks.values(), self.summariser._writer):
            writer.close()


class PlayedFleet:
    """A run over `hosts` hosts that this process supervises; time passes in `step` alone."""

    def __init__(
        self,
        root: Path,
        *,
        hosts: int = 3,
        ranks: int = 2,
        kind: Kind = "cuda",
        steps: int = 60,
        **options: Any,
    ) -> None:
        self.spec = recorded_spec(kind, ranks=ranks, steps=steps, nodes=hosts, **options)
        self.prediction = recorded_prediction(self.spec)
        self.run = RunDir.create(root, self.spec, self.prediction, {})
        self.run.write_supervisor_pid()
        self.time = ManualClock(BEGAN)
        self.hosts = Hosts(
            hosts=tuple(
                Host(name=f"node{n + 1:02d}", first_rank=n * ranks, slots=tuple(range(ranks)))
                for n in range(hosts)
            )
        )
        write_hosts(self.run, self.hosts)
        self.lead = EventWriter(self.run.events_path(SUPERVISOR), SUPERVISOR, clock=self.time.clock())
        self.played = {host.name: PlayedHost(self.run, host, self.time) for host in self.hosts.hosts}
        self.silent: set[str] = set()
        """Hosts that tell nothing."""
        self.steps = 0

    def close(self) -> None:
        self.lead.close()
        for host in self.played.values():
            host.close()

    def start(self) -> None:
        self.lead.write(
            RunStarted(
                run_id=self.run.run_id,
                name=self.spec.name,
                pid=1,
                host="launcher",
                world_size=self.spec.world_size,
                llmtop_version="0.1.0",
            )
        )
        for name, played in self.played.items():
            joined = HostJoined(
                host=name,
                pid=2,
                first_rank=played.host.first_rank,
                ranks=len(played.ranks),
                node=f"{name}.test",
            )
            self.tell(joined)
            played.events.write(joined)
            for rank in played.ranks:
                played.events.write(RankStarted(rank=rank, pid=4000 + rank))
        self.summarise()

    def tell(self, event: Event) -> None:
        """Something that the lead says."""
        self.lead.write(event)

    def step(
        self, count: int = 1, slow: Mapping[int, float] | None = None, still: frozenset[str] = frozenset()
    ) -> None:
        """All ranks make steps of about a second; `slow` ranks load and compute that many times longer, which
        the others wait for; the hosts in `still` make none."""
        slow = slow or {}
        for _ in range(count):
            self.steps += 1
            wait = max(slow.values(), default=1.0)
            self.pass_time(1.0 * (1 + 0.35 * (wait - 1)))
            for name, played in self.played.items():
                if name in still:
                    continue
                for rank, writer in played.ranks.items():
                    writer.write(self._step(rank, slow.get(rank, 1.0), wait))
        self.sample()
        self.pass_time(EVERY_SECONDS)
        self.summarise()

    def _step(self, rank: int, factor: float, wait: float) -> StepFinished:
        phases = {
            name: share * (factor if name in ("data", "forward") else 1.0) for name, share in _SHARES.items()
        }
        phases["backward"] += 0.35 * (wait - factor)
        peak = self.prediction.peak_allocated_bytes + rank * MIB
        memory = PhaseMemory(allocated_bytes=peak, peak_bytes=peak, reserved_bytes=peak + GIB)
        return StepFinished(
            step=self.steps,
            loss=4.0 - 0.01 * self.steps if rank == 0 else None,
            tokens=self.spec.tokens_per_step,
            step_seconds=sum(phases.values()),
            phase_seconds=dict(phases),
            phase_memory={"backward": memory},
        )

    def sample(self) -> None:
        for played in self.played.values():
            devices = tuple(
                DeviceSample(
                    index=at,
                    memory_used_bytes=95 * GIB,
                    memory_total_bytes=140 * GIB,
                    utilization_percent=90.0 + at,
                    power_watts=600.0,
                    temperature_celsius=60.0,
                )
                for at in range(len(played.ranks) * (not self.spec.on_cpu))
            )
            played.hardware.write(
                HardwareSampled(
                    devices=devices,
                    host=HostSample(
                        memory_total_bytes=1000 * GIB,
                        memory_available_bytes=800 * GIB,
                        cpu_percent=20.0,
                        network_receive_bytes_per_second=2e9,
                        network_send_bytes_per_second=2e9,
                        network_errors=played.network.network_errors,
                        link_losses=played.network.link_losses,
                        links_down=played.network.links_down,
                    ),
                    processes=tuple(
                        ProcessSample(rank=rank, rss_bytes=(3 + rank) * GIB) for rank in played.ranks
                    ),
                )
            )

    def pass_time(self, seconds: float) -> None:
        self.time.advance(seconds)
        for played in self.played.values():
            played.time.advance(seconds)

    def summarise(self) -> None:
        for name, played in self.played.items():
            if name not in self.silent:
                played.summariser.turn()

    # --- what happens to hosts -------------------------------------------------------------------

    def lose(self, name: str, reason: str = "its connection broke") -> None:
        self.tell(HostLost(host=name, quiet_seconds=12.0, reason=reason))

    def find(self, name: str, away_seconds: float = 75.0) -> None:
        self.tell(HostFound(host=name, away_seconds=away_seconds))

    def leave(self, name: str, reason: str = "its ranks have ended") -> None:
        self.tell(HostLeft(host=name, reason=reason))

    def shift_clock(self, name: str, seconds: float, error: float = 0.0004) -> None:
        """The host's clock is ahead by that, and the lead finds it out."""
        self.played[name].time.advance(seconds)
        self.tell(ClockMeasured(host=name, offset_seconds=seconds, error_seconds=error))

    def network(self, name: str, **changes: Any) -> None:
        """From the next sample on."""
        self.played[name].network = HostSample(**{"network_errors": 7, "link_losses": 1, **changes})

    def fail(self, rank: int, message: str = "NCCL error: remote process exited") -> None:
        host = self.hosts.host_of(rank)
        assert host is not None
        played = self.played[host.name]
        played.ranks[rank].write(RankFailed(error_type="RuntimeError", message=message))
        played.events.write(RankExited(rank=rank, pid=4000 + rank, exit_code=1))

    def end(
        self, state: RunEnd = "completed", reason: str = "all ranks finished", rank: int | None = None
    ) -> None:
        for played in self.played.values():
            for number, writer in played.ranks.items():
                if state == "completed":
                    writer.write(RankFinished(reason="completed", last_step=self.steps))
                played.events.write(RankExited(rank=number, pid=4000 + number, exit_code=0))
            played.summariser.finish()
        self.tell(RunEnded(state=state, reason=reason, rank=rank))
