"""What a run over many hosts costs: a host's summaries, and the viewer of all of them, from 1 to 4,096 hosts.

    python -m benchmarks.scale [--only host|viewer|elsewhere] [--hosts 1,16,1024] [--ranks 8] [--seconds 20]

Every rank's events are generated and go through the real fold and summaries (`simfleet`); the viewer is
`llmtop attach` in a terminal of 80 x 24. `elsewhere` is the same run seen from another machine, whose far end
runs here in place of ssh, and each of whose ranks has a megabyte of record and one of output. Each figure is
one JSON line in the file, which is only added to, with the machine's load beside it: other work on the
machine is in the first paint, and little of it in shares of the processor. Under `chrt --rr 5` all that is
measured gets the processors first, and the line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.ui import LLMTOP, environment
from benchmarks.ui_runs import BEGAN, long_spec, sample_event, step_event
from benchmarks.ui_terminal import BenchTerminal, Cost
from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.fleet.summariser import EVERY_SECONDS, LATER_SECONDS, Summariser
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.hosts import Host, HostDir, read_hosts
from llmtop.profiler.record.rundir import HARDWARE, RunDir
from llmtop.trainer.hosts.following import Following
from llmtop.trainer.hosts.start import environment_with

Figures = dict[str, Any]
HERE = Path(__file__).parent
HOSTS = (1, 4, 16, 64, 256, 1024, 4096)
STEPS = (100, 1_000, 10_000, 100_000)
MOST_AT_FIRST_PACE = 1024
"""Hosts that one process can play at the pace of a run's first hour; more of them tell as later hours do."""
RECORD_BYTES = 1 << 20
"""Of a rank seen from another machine: twice, for its record and its output."""
SETTLE_SECONDS = 5.0
TURNS = 20


# --- one host ---------------------------------------------------------------------------------------


def host_cost(root: Path, steps: int, ranks: int) -> Figures:
    """A turn of the summariser after so many steps: two seconds of new lines, folded, summarised, written."""
    spec = long_spec(steps, ranks)
    run = RunDir.create(root, spec, predict(spec), {})
    host = HostDir(run.path, Host(name="node", first_rank=0, slots=tuple(range(ranks))))
    host.own_path.mkdir(parents=True)
    host.write_supervisor_pid()
    encode = msgspec.json.Encoder().encode
    paths = {rank: run.events_path(rank) for rank in range(ranks)}

    def add(first: int, last: int) -> None:
        for rank, path in paths.items():
            with path.open("ab") as log:
                log.writelines(
                    encode(step_event(n, rank, BEGAN + n, 1.0)) + b"\n" for n in range(first, last + 1)
                )
        with host.events_path(HARDWARE).open("ab") as log:
            # Of a long history the samples of its last minutes; all of them would be tens of gigabytes.
            log.writelines(
                encode(sample_event(BEGAN + n, n, ranks)) + b"\n"
                for n in range(max(first, last - 300), last + 1)
            )

    add(1, steps)
    now = [0.0]
    summariser = Summariser(host, monotonic=lambda: now[0])
    while summariser._reader is None or summariser._reader.behind:
        now[0] += 1.0
        summariser.turn()
    costs = []
    for turn in range(TURNS):
        add(steps + 2 * turn + 1, steps + 2 * turn + 2)
        now[0] += 60.0
        began = time.process_time()
        summariser.turn()
        costs.append(time.process_time() - began)
    lines = host.summary_path.read_bytes().splitlines()
    costs.sort()
    return {
        "figure": "host",
        "steps": steps,
        "ranks": ranks,
        "cpu_milliseconds_per_summary": 1e3 * costs[len(costs) // 2],
        "core_share": costs[len(costs) // 2] / EVERY_SECONDS,
        "line_bytes": len(lines[-1]),
        "longest_line_bytes": max(map(len, lines)),
        "rss_bytes": psutil.Process().memory_info().rss,
    }


def in_a_process(root: Path, steps: int, ranks: int) -> Figures:
    """What one host takes of memory says nothing where another was measured before."""
    command = [sys.executable, "-m", "benchmarks.scale", "--one-host", str(root), str(steps), str(ranks)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE.parent)
    found: Figures = json.loads(told.stdout)
    return found


# --- the viewer of all ------------------------------------------------------------------------------


@contextmanager
def playing(root: Path, hosts: int, ranks: int, every: float) -> Iterator[str]:
    """A fleet that goes on in a process of its own; the run's id."""
    command = [sys.executable, "-m", "benchmarks.simfleet", str(root), str(hosts), str(ranks), str(every)]
    player = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
    )
    assert player.stdin is not None and player.stdout is not None
    try:
        told = player.stdout.readline().split()
        if told[1:] != ["ready"]:
            raise RuntimeError(f"the fleet of {hosts} hosts did not come up")
        yield told[0]
    finally:
        player.stdin.close()
        try:
            player.wait(60)
        except subprocess.TimeoutExpired:
            player.kill()
            player.wait()


def viewer_cost(root: Path, hosts: int, ranks: int, seconds: float) -> Figures:
    every = EVERY_SECONDS if hosts <= MOST_AT_FIRST_PACE else LATER_SECONDS
    with playing(root, hosts, ranks, every) as run_id:
        words = (f"/{hosts:,}", "worst first", "Help")
        first = []
        for _ in range(3):
            with BenchTerminal([LLMTOP, "attach", run_id], environment(root)) as terminal:
                first.append(terminal.wait_for(*words, give_up=60.0) - terminal.began)
        with BenchTerminal([LLMTOP, "attach", run_id], environment(root)) as terminal:
            terminal.wait_for(*words, give_up=60.0)
            time.sleep(SETTLE_SECONDS)
            summaries = _summary_bytes(root / run_id)
            cost = Cost(terminal)
            time.sleep(seconds)
            took, share, written = cost.so_far()
            added = _summary_bytes(root / run_id) - summaries
            rss = terminal.rss_bytes()
    first.sort()
    return {
        "figure": "viewer",
        "hosts": hosts,
        "ranks": hosts * ranks,
        "first_paint_seconds": first[len(first) // 2],
        "least_first_paint_seconds": first[0],
        "core_share": share,
        "rss_bytes": rss,
        "terminal_bytes_per_second": written,
        "summary_bytes_per_second": added / took,
        "summary_every_seconds": every,
    }


# --- from another machine ---------------------------------------------------------------------------


def elsewhere_cost(root: Path, hosts: int, ranks: int, seconds: float) -> Figures:
    """What comes before the first screen and how soon, how long one host takes that is opened, and both ends'
    share of a core from then on."""
    every = EVERY_SECONDS if hosts <= MOST_AT_FIRST_PACE else LATER_SECONDS
    with playing(root / "runs", hosts, ranks, every) as run_id, stand_in_for_ssh(root):
        run = root / "runs" / run_id
        for rank in range(hosts * ranks):
            for name in (f"rank-{rank}.jsonl", f"rank-{rank}.log"):
                with (run / name).open("wb") as file:
                    file.truncate(RECORD_BYTES)
        began = time.perf_counter()
        follows = Following("far", run_id, "screen")
        try:
            found = read_hosts(follows.run)
            assert found is not None
            reader = FleetReader(follows.run, found)
            reader.poll()
            first, came = time.perf_counter() - began, follows._link.came_bytes
            told = sum(host.summary is not None for host in reader.fleet.hosts.values())
            if told != hosts:
                raise RuntimeError(f"{told} of {hosts} hosts have come")
            began, host = time.perf_counter(), found.hosts[hosts // 2]
            number = follows.bring(host, host.ranks)
            while not follows.has_come(number):
                time.sleep(0.001)
            opened = time.perf_counter() - began
            (far,) = (one for one in psutil.Process().children() if "llmtop-link" in " ".join(one.cmdline()))
            both = (psutil.Process(), far)
            before, at = [sum(one.cpu_times()[:2]) for one in both], time.perf_counter()
            time.sleep(seconds)
            took = time.perf_counter() - at
            near, there = ((sum(one.cpu_times()[:2]) - b) / took for one, b in zip(both, before, strict=True))
        finally:
            follows.close()
    return {
        "figure": "elsewhere",
        "hosts": hosts,
        "ranks": hosts * ranks,
        "first_seconds": first,
        "first_bytes": came,
        "whole_bytes": 2 * hosts * ranks * RECORD_BYTES,
        "open_host_seconds": opened,
        "core_share_here": near,
        "core_share_there": there,
        "rss_bytes": psutil.Process().memory_info().rss,
    }


@contextmanager
def stand_in_for_ssh(root: Path) -> Iterator[None]:
    """A program of that name which runs the far end here, with the same folder of runs."""
    program = root / "bin" / "ssh"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\nfor word; do last=$word; done\nexport LLMTOP_RUNS_DIR={root}/runs\n"
        'exec sh -c "exec $last"\n'
    )
    program.chmod(0o755)
    own = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(root / "cache"),
        "LLMTOP_REMOTE_PYTHON": sys.executable,
    }
    with environment_with(own):
        yield


def _summary_bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in run.glob("hosts/*/summary.jsonl"))


# --- all of them ------------------------------------------------------------------------------------


def measured(hosts: tuple[int, ...], ranks: int, seconds: float, only: str | None) -> Iterator[Figures]:
    for steps in STEPS if only in (None, "host") else ():
        with tempfile.TemporaryDirectory(prefix="llmtop-scale-") as folder:
            yield in_a_process(Path(folder), steps, ranks)
    for kind, cost in (("viewer", viewer_cost), ("elsewhere", elsewhere_cost)):
        for count in hosts if only in (None, kind) else ():
            with tempfile.TemporaryDirectory(prefix="llmtop-scale-") as folder:
                yield cost(Path(folder) / "runs", count, ranks, seconds)


def table(rows: list[Figures]) -> str:
    """The curves, for people."""
    lines = [
        "one host of 8 ranks, by the length of its record",
        "  steps     ms a summary  line bytes  resident",
    ]
    for row in (row for row in rows if row["figure"] == "host"):
        lines.append(
            f"  {row['steps']:>7,}  {row['cpu_milliseconds_per_summary']:>12.2f}  {row['line_bytes']:>10,}"
            f"  {row['rss_bytes'] / 2**20:>4.0f} MiB"
        )
    lines += ["the viewer, by hosts", "  hosts   ranks   first paint  of a core  resident  reads"]
    for row in (row for row in rows if row["figure"] == "viewer"):
        lines.append(
            f"  {row['hosts']:>5,}  {row['ranks']:>6,}  {row['first_paint_seconds']:>9.2f} s"
            f"  {100 * row['core_share']:>7.1f} %  {row['rss_bytes'] / 2**20:>4.0f} MiB"
            f"  {row['summary_bytes_per_second'] / 1024:>6.0f} KiB/s"
        )
    lines += [
        "from another machine",
        "  hosts   ranks  all hosts here      of   one host opened  core here, there",
    ]
    for row in (row for row in rows if row["figure"] == "elsewhere"):
        lines.append(
            f"  {row['hosts']:>5,}  {row['ranks']:>6,}  {row['first_seconds']:>6.2f} s"
            f"  {row['first_bytes'] / 2**20:>5.1f} MiB {row['whole_bytes'] / 2**30:>5.1f} GiB"
            f"  {row['open_host_seconds']:>6.2f} s          {100 * row['core_share_here']:.1f} %"
            f"  {100 * row['core_share_there']:.1f} %"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)), help="numbers joined by commas")
    parser.add_argument("--ranks", type=int, default=8, help="of each host")
    parser.add_argument("--seconds", type=float, default=20.0, help="that the viewer is watched for")
    parser.add_argument("--only", choices=("host", "viewer", "elsewhere"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scale.jsonl")
    parser.add_argument("--one-host", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_host:
        root, steps, ranks = args.one_host
        print(json.dumps(host_cost(Path(root), int(steps), int(ranks))))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    counts = tuple(map(int, args.hosts.split(",")))
    for figures in measured(counts, args.ranks, args.seconds, args.only):
        row = {
            **figures,
            "load": [round(value, 2) for value in os.getloadavg()],
            "before_other_work": os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
        with args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
