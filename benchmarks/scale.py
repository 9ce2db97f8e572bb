"""What a run over many hosts costs: a host's summaries, and the viewer of all of them, from 1 to 4,096 hosts.

    python -m benchmarks.scale [--only host|viewer] [--hosts 1,16,1024] [--ranks 8] [--seconds 20]

Every rank's events are generated and go through the real fold and summaries (`simfleet`); the viewer is
`llmtop attach` in a terminal of 80 x 24. Each figure is one JSON line in the file, which is only added to,
with the machine's load beside it: other work on the machine is in the first paint, and little of it in shares
of the processor. Under `chrt --rr 5` all that is measured gets the processors first, and the line says so.
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
from llmtop.profiler.fleet.summariser import EVERY_SECONDS, LATER_SECONDS, Summariser
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.hosts import Host, HostDir
from llmtop.profiler.record.rundir import HARDWARE, RunDir

Figures = dict[str, Any]
HERE = Path(__file__).parent
HOSTS = (1, 4, 16, 64, 256, 1024, 4096)
STEPS = (100, 1_000, 10_000, 100_000)
MOST_AT_FIRST_PACE = 1024
"""Hosts that one process can play at the pace of a run's first hour; more of them tell as later hours do."""
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


def _summary_bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in run.glob("hosts/*/summary.jsonl"))


# --- all of them ------------------------------------------------------------------------------------


def measured(hosts: tuple[int, ...], ranks: int, seconds: float, only: str | None) -> Iterator[Figures]:
    for steps in STEPS if only != "viewer" else ():
        with tempfile.TemporaryDirectory(prefix="llmtop-scale-") as folder:
            yield in_a_process(Path(folder), steps, ranks)
    for count in hosts if only != "host" else ():
        with tempfile.TemporaryDirectory(prefix="llmtop-scale-") as folder:
            yield viewer_cost(Path(folder) / "runs", count, ranks, seconds)


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
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)), help="numbers joined by commas")
    parser.add_argument("--ranks", type=int, default=8, help="of each host")
    parser.add_argument("--seconds", type=float, default=20.0, help="that the viewer is watched for")
    parser.add_argument("--only", choices=("host", "viewer"))
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
