"""A run over hosts, for as long as somebody wants: real ranks, cables pulled again and again, a host killed.

    python -m benchmarks.hosts [--hosts 3] [--pulls 10] [--pull-seconds 15] [--zero 2,3] [--out FILE]

Hosts are network namespaces of this machine with an sshd each (`tests/hosts/lab.py`), without a common file
system; ranks are the real worker over gloo. Needs root, iproute2 and openssh-server. Each stage of ZeRO is
one JSON line in the file, with how long everything took, and whether every byte that the hosts have written
came to the launching machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from llmtop.profiler.record.changeevents import Restaged
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent, RunEnded, StepFinished
from llmtop.profiler.record.hostevents import ClockMeasured, HostFound, HostLost
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir, list_runs
from llmtop.trainer import control
from tests.hosts import lab
from tests.hosts.lab import Lab, wait_for, why_not

GRACES = "peers=2,host=60"
_PATIENCE_SECONDS = 600.0
"""A machine that has other work to do as well."""


class Story:
    """One run in the lab, and how long what was done to it took."""

    def __init__(self, made: Lab, zero: int) -> None:
        self.lab = made
        self.figures: dict[str, Any] = {"zero": zero, "hosts": len(made.names), "load": os.getloadavg()[0]}
        began = time.monotonic()
        made.llmtop(
            *("run", "cpu-demo", "--gpu", "cpu", "--zero", str(zero), "--micro-batch", "1", "--detach"),
            *("--force", "--steps", "1000000", "--hostfile", str(made.hostfile()), "--env", "LLMTOP_GRACES"),
            variables={"LLMTOP_GRACES": GRACES},
        )
        self.run = list_runs(made.lead_runs)[0]
        self.wait_for_steps(3)
        self.figures["launch_seconds"] = time.monotonic() - began

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events(SUPERVISOR) if isinstance(event, kind)]

    def events(self, src: str | int) -> list[AnyEvent]:
        return EventTail(self.run.events_path(src)).poll()

    def steps(self) -> int:
        """That the slowest host's rank has told of here."""
        told = [self.events(rank) for rank in range(len(self.lab.names))]
        return min((max((_step(one) for one in events), default=0) for events in told), default=0)

    def wait_for_steps(self, more: int) -> None:
        target, ends = self.steps() + more, len(self.of(RunEnded))
        wait_for(lambda: self.steps() >= target or len(self.of(RunEnded)) > ends, self.why)
        assert self.steps() >= target, self.why()

    def why(self) -> str:
        return f"{self.of(RunEnded)} {[path.read_text()[-500:] for path in self.run.path.glob('rank-*.log')]}"

    def pull(self, name: str, seconds: float) -> None:
        """A cable is out for a while: the ranks wait, and go on."""
        lost, found = len(self.of(HostLost)), len(self.of(HostFound))
        self.lab.pull_cable(name)
        began = time.monotonic()
        wait_for(lambda: len(self.of(HostLost)) > lost or time.monotonic() - began > seconds)
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        self.lab.plug_in(name)
        began = time.monotonic()
        wait_for(lambda: len(self.of(HostFound)) > found or len(self.of(HostLost)) == lost)
        self.figures.setdefault("found_seconds", []).append(time.monotonic() - began)
        self.wait_for_steps(2)
        self.figures.setdefault("stepped_seconds", []).append(time.monotonic() - began)

    def change(self, words: str, figure: str) -> None:
        began = time.monotonic()
        asked = control.change(self.run, control.SetParams(words=(words,)))
        answer = control.wait_until_settled(self.run, asked, 300)
        assert answer is not None and answer.answer == "done", answer
        self.figures[figure] = time.monotonic() - began

    def stop(self) -> None:
        began = time.monotonic()
        lead = psutil.Process(self.run.supervisor_identity().pid)  # type: ignore[union-attr]
        used = lead.cpu_times()
        lived = time.time() - lead.create_time()
        self.figures["lead_cpu_percent"] = 100 * (used.user + used.system) / lived
        self.lab.llmtop("stop", self.run.run_id, "--save")
        self.figures["stop_seconds"] = time.monotonic() - began
        clocks = self.of(ClockMeasured)
        self.figures["clock_error_seconds"] = max(one.error_seconds for one in clocks)
        self.figures["down_seconds"] = [one.down_seconds for one in self.of(Restaged)]

    def resume(self) -> None:
        began = time.monotonic()
        self.lab.llmtop("resume", self.run.run_id, "--detach", variables={"LLMTOP_GRACES": GRACES})
        self.wait_for_steps(2)
        self.figures["resume_seconds"] = time.monotonic() - began

    def kill(self, name: str) -> None:
        """A host dies: the run ends on all others, by its name."""
        began = time.monotonic()
        self.lab.pull_cable(name)
        self.lab.kill_processes(name)
        ended = control.wait_for_end(self.run, 300)
        assert ended is not None and name in ended.reason, ended
        self.figures["end_after_kill_seconds"] = time.monotonic() - began
        self.figures["end_reason"] = ended.reason
        self.lab.plug_in(name)
        self.lab.start_host(name)

    def missing_bytes(self) -> int:
        """Of all logs of all hosts: what has not come here, or came otherwise."""
        missing = 0
        for name in self.lab.names:
            far = RunDir(self.lab.runs_of(name) / self.run.run_id).path
            for path in [*far.glob("rank-*.jsonl"), *far.glob(f"hosts/{name}/*.jsonl")]:
                if path.name == "orders.jsonl":
                    continue
                near = self.run.path / path.relative_to(far)
                theirs, ours = path.read_bytes(), near.read_bytes() if near.exists() else b""
                missing += 0 if ours == theirs else max(1, len(theirs) - len(ours))
        return missing


def _step(event: AnyEvent) -> int:
    return event.step if isinstance(event, StepFinished) else 0


def measure(root: Path, zero: int, args: argparse.Namespace) -> dict[str, Any]:
    with Lab(root, hosts=args.hosts) as made:
        story = Story(made, zero)
        story.change("learning_rate=0.001", "hot_change_seconds")
        for number in range(args.pulls):
            story.pull(made.names[number % len(made.names)], args.pull_seconds)
        story.change("zero=2" if zero == 3 else "zero=3", "relaunch_seconds")
        story.stop()
        story.figures["missing_bytes"] = story.missing_bytes()
        story.resume()
        story.kill(made.names[-1])
        story.figures["left_processes"] = sum(max(0, len(made.processes(name)) - 1) for name in made.names)
        return story.figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--pulls", type=int, default=10)
    parser.add_argument("--pull-seconds", type=float, default=15.0)
    parser.add_argument("--zero", default="2,3")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hosts.jsonl")
    args = parser.parse_args()
    if why_not():
        sys.exit(f"no hosts can be made here: {why_not()}")
    lab.TIMEOUT_SECONDS = _PATIENCE_SECONDS
    for zero in map(int, args.zero.split(",")):
        with tempfile.TemporaryDirectory() as root:
            figures = measure(Path(root), zero, args)
        print(json.dumps(figures, indent=1))
        with args.out.open("a") as file:
            file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
