"""Many hosts of one run on one machine: generated events of every rank through the real fold and summaries.

    python -m benchmarks.simfleet RUNS HOSTS RANKS EVERY    prints its id and "ready", ends with its stdin

Events are made in memory and folded as each host's supervisor folds its logs; what is written are the run's
folder, the lead's log and each host's summaries, which is all that a viewer of hosts reads.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.ui_runs import long_spec, sample_event, step_event
from llmtop.presets.spec import RunSpec
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fleet.summarise import summarise
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.eventbase import EVENT_VERSION, Event
from llmtop.profiler.record.events import AnyEvent, RankStarted, RunStarted, StepFinished
from llmtop.profiler.record.hostevents import ClockMeasured, HostJoined, HostLost
from llmtop.profiler.record.hosts import Host, HostDir, Hosts, write_hosts
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir

STEP_SECONDS = 1.0
SLOW_RANK, SLOW_FACTOR = 3, 1.6
"""Of the host in the middle: who makes the others wait."""


class SimHost:
    """One host: the state of its ranks, and the log of their summaries."""

    def __init__(
        self, run: RunDir, host: Host, spec: RunSpec, prediction: Prediction, slow: int | None
    ) -> None:
        self.host, self.spec, self.prediction, self.slow = host, spec, prediction, slow
        self._path = HostDir(run.path, host).summary_path
        self._path.parent.mkdir(parents=True)
        self._state = RunState(
            run_id=run.run_id,
            first_rank=host.first_rank,
            host_ranks=len(host.slots),
            world_size=spec.world_size,
        )
        self._before: RunState | None = None
        self._encode = msgspec.json.Encoder().encode
        self.line_bytes = 0

    def advance(self, first: int, last: int, now: float) -> None:
        """Its ranks make these steps, the last of which ends now; then it says how they are."""
        self._state = fold(self._state, self._events(first, last, now))
        found = findings(self._state, self.spec, self.prediction)
        made = summarise(self.host.name, self._state, self.spec, found, self._before)
        self._before = self._state
        line = (
            self._encode(replace(made, v=EVENT_VERSION, t=now, m=now, src=f"host:{self.host.name}")) + b"\n"
        )
        # Not kept open: thousands of them are more than a process may have.
        with self._path.open("ab") as log:
            log.write(line)
        self.line_bytes = len(line)

    def _events(self, first: int, last: int, now: float) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        if first == 1:
            started = (
                RankStarted(v=1, t=now, src=SUPERVISOR, rank=rank, pid=rank + 10) for rank in self.host.ranks
            )
            events += started
        for step in range(first, last + 1):
            t = now - (last - step) * STEP_SECONDS
            events += (
                self._slowed(step_event(step, rank, t, STEP_SECONDS), rank) for rank in self.host.ranks
            )
            events.append(sample_event(t, step, len(self.host.slots)))
        return events

    def _slowed(self, event: StepFinished, rank: int) -> StepFinished:
        event = event if rank == 0 else replace(event, loss=None)
        if rank != self.slow:
            return event
        phases = {**event.phase_seconds, "forward": SLOW_FACTOR * (event.phase_seconds["forward"] or 0.0)}
        return replace(event, phase_seconds=phases)


class SimFleet:
    """A run over `hosts` hosts of `ranks` ranks; this process is its lead."""

    def __init__(self, root: Path, hosts: int, ranks: int) -> None:
        spec = long_spec(100_000, ranks)
        spec = replace(spec, options=replace(spec.options, nodes=hosts))
        prediction = predict(spec)
        self.run = RunDir.create(root, spec, prediction, {})
        self.run.write_supervisor_pid()
        named = tuple(
            Host(name=f"node{number:04d}", first_rank=number * ranks, slots=tuple(range(ranks)))
            for number in range(hosts)
        )
        write_hosts(self.run, Hosts(hosts=named))
        self.world_size = spec.world_size
        self._write_lead(named)
        middle = hosts // 2
        self.hosts = [
            SimHost(
                self.run,
                host,
                spec,
                prediction,
                host.first_rank + SLOW_RANK % ranks if at == middle else None,
            )
            for at, host in enumerate(named)
        ]
        self.step = 0

    def _write_lead(self, named: tuple[Host, ...]) -> None:
        now = time.time()
        told: list[Event] = [
            RunStarted(
                run_id=self.run.run_id,
                name="scale",
                pid=os.getpid(),
                host="lead",
                world_size=self.world_size,
                llmtop_version="0.1.0",
            )
        ]
        for at, host in enumerate(named):
            told += (RankStarted(rank=rank, pid=rank + 10) for rank in host.ranks)
            told.append(HostJoined(host=host.name, pid=9, first_rank=host.first_rank, ranks=len(host.slots)))
            told.append(ClockMeasured(host=host.name, offset_seconds=0.001 * (at % 7), error_seconds=2e-4))
        if len(named) > 2:
            told.append(HostLost(host=named[-1].name, quiet_seconds=15.0, reason="its connection broke"))
        encode = msgspec.json.Encoder().encode
        lines = (encode(replace(event, v=EVENT_VERSION, t=now, m=now, src=SUPERVISOR)) for event in told)
        self.run.events_path(SUPERVISOR).write_bytes(b"\n".join(lines) + b"\n")

    def history(self, rounds: int, steps: int) -> None:
        """What was told before somebody looks."""
        for _ in range(rounds):
            first, self.step = self.step + 1, self.step + steps
            for host in self.hosts:
                host.advance(first, self.step, time.time())

    def go_on(self, every_seconds: float) -> None:
        """Each host tells once in so many seconds, one after another, until stdin ends."""
        steps = max(1, round(every_seconds / STEP_SECONDS))
        while True:
            began, first = time.monotonic(), self.step + 1
            self.step += steps
            for at, host in enumerate(self.hosts):
                due = began + every_seconds * at / len(self.hosts)
                left = max(0.0, due - time.monotonic()) if at % 16 == 0 else 0.0
                if (left or at % 64 == 0) and select.select([sys.stdin], [], [], left)[0]:
                    return
                host.advance(first, self.step, time.time())
            left = began + every_seconds - time.monotonic()
            if left > 0 and select.select([sys.stdin], [], [], left)[0]:
                return


def main() -> None:
    root, hosts, ranks, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    fleet = SimFleet(root, hosts, ranks)
    fleet.history(3, 4)
    print(fleet.run.run_id, "ready", flush=True)
    fleet.go_on(every)


if __name__ == "__main__":
    main()
