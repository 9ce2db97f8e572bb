"""What the app costs and how fast it answers: starts, first screen, processor, bytes, memory, keys.

    python -m benchmarks.ui [--only NAME ...] [--out FILE] [--peers VENV]

Each figure is one JSON line with the machine's load beside it, since other work on the machine is in every
time; processor times and ratios suffer least. Under `chrt --rr 5` all that is measured gets the processors
before other work, and the line says so. `--peers` names a virtual environment that holds nvitop, memray
and wandb; without it, and for a peer that cannot run here, the line says n/a and why.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.stats import percentile
from benchmarks.ui_peers import peers_at_rest, peers_of
from benchmarks.ui_runs import BEGAN, LiveRun, make_long_run
from benchmarks.ui_terminal import BenchTerminal, Cost, cost_at_rest
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.bookmarking import Bookmarker
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.feed import RunStream
from llmtop.profiler.record.recording import PART_BYTES

Figures = dict[str, Any]
HERE = Path(__file__).parent
LLMTOP = str(Path(sys.executable).with_name("llmtop"))
_PLAN = ("--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8", "--zero", "3")
BARE = (sys.executable, "-c", "import argparse, msgspec")


def environment(root: Path) -> dict[str, str]:
    """With compiled modules, as an installed program has them, and not those of the checkout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    compiled = Path(tempfile.gettempdir()) / "llmtop-ui-pycache"
    return {
        **env,
        "LLMTOP_RUNS_DIR": str(root),
        "XDG_CONFIG_HOME": str(root / "config"),
        "PYTHONPYCACHEPREFIX": str(compiled),
    }


# --- start of commands ------------------------------------------------------------------------------


def run_once(command: tuple[str, ...], env: dict[str, str]) -> tuple[float, float]:
    """Wall and processor seconds of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def starts(root: Path, rounds: int = 15) -> Iterator[Figures]:
    """Commands in turn with a bare interpreter, so that both meet the same load; `ls` has one run to list."""
    live = LiveRun(root, steps=10, ranks=8)
    live.end(BEGAN + 1)
    Bookmarker(live.run).finish()
    env = environment(root)
    commands = {
        "bare": BARE,
        "--help": (LLMTOP, "--help"),
        "ls": (LLMTOP, "ls"),
        "plan": (LLMTOP, "plan", *_PLAN),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            took = run_once(command, env)
            # The first turn compiles.
            times[name] += [took] if turn else []
    bare_wall = statistics.median(wall for wall, _ in times["bare"])
    bare_cpu = statistics.median(cpu for _, cpu in times["bare"])
    for name, found in times.items():
        wall = statistics.median(wall for wall, _ in found)
        cpu = statistics.median(cpu for _, cpu in found)
        yield {
            "figure": f"start {name}",
            "wall_seconds": wall,
            "least_wall_seconds": min(wall for wall, _ in found),
            "cpu_seconds": cpu,
            "wall_ratio": wall / bare_wall,
            "cpu_ratio": cpu / bare_cpu,
            "rounds": rounds,
        }


_WHOLE_SCREEN = ("40/400", "GPU0", "tok/s", "step 40 loss", "Help")


# --- first screen -----------------------------------------------------------------------------------


def first_screens(root: Path, peers: Path | None, rounds: int = 9) -> Iterator[Figures]:
    """From the start of the process to the first whole screen, in turn with a minimal Textual app; of llmtop
    until the app itself has painted that too (`app_seconds`)."""
    live = _eight_gpus(root)
    env = environment(root)
    commands: dict[str, tuple[list[str], tuple[str, ...]]] = {
        "minimal Textual app": ([sys.executable, str(HERE / "ui_minimal.py")], ("panel 7", "Quit")),
        "llmtop attach": ([LLMTOP, "attach", live.run.run_id], _WHOLE_SCREEN),
    }
    extra: dict[str, dict[str, str]] = {}
    tells: dict[str, str] = {}
    for name, peer in (peers_of(peers, root) if peers is not None else {}).items():
        commands[name] = (peer.command, peer.words)
        extra[name], tells[name] = peer.env, peer.tells
    times: dict[str, list[float]] = {name: [] for name in commands}
    costs: dict[str, list[float]] = {name: [] for name in commands}
    failed: dict[str, str] = {}
    taken_over: list[float] = []
    for turn in range(rounds + 1):
        for name, (command, words) in commands.items():
            if name in failed:
                continue
            try:
                with BenchTerminal(command, {**env, **extra.get(name, {})}) as terminal:
                    wall = terminal.wait_for(*words, give_up=30.0) - terminal.began
                    # The first turn compiles.
                    times[name] += [wall] if turn else []
                    if name == "llmtop attach":
                        # What came was painted from the record; the app paints the same when it has loaded.
                        terminal.forget()
                        whole = terminal.wait_for(*words, give_up=30.0) - terminal.began
                        taken_over += [whole] if turn else []
                    costs[name] += [terminal.cpu_seconds()] if turn else []
            except (TimeoutError, OSError) as error:
                failed[name] = str(error)[:300]
    live.close()
    base = statistics.median(times["minimal Textual app"])
    for name in commands:
        row: Figures = {"figure": f"first screen {name}", "rounds": len(times[name])}
        if tells.get(name):
            row["how"] = tells[name]
        if name in failed:
            yield {**row, "value": "n/a", "why": failed[name]}
            continue
        wall = statistics.median(times[name])
        if name == "llmtop attach":
            row["app_seconds"] = statistics.median(taken_over)
        yield {
            **row,
            "wall_seconds": wall,
            "least_wall_seconds": min(times[name]),
            "cpu_seconds": statistics.median(costs[name]),
            "ratio": wall / base,
        }


def _eight_gpus(root: Path) -> LiveRun:
    """Forty steps of a run on eight GPUs that goes on."""
    live = LiveRun(root, steps=400, ranks=8, began=time.time() - 100)
    for step in range(1, 41):
        live.step(step, time.time() - 100 + step, 1.0)
        live.sample(time.time() - 100 + step, step)
        live.log_line(f"step {step} loss {3 - step / 40:.4f}")
    live.flush()
    return live


# --- cost at rest -----------------------------------------------------------------------------------


class Ticker(threading.Thread):
    """Writes the run on, so many steps a second and a sample each second."""

    def __init__(self, live: LiveRun, steps_a_second: float) -> None:
        super().__init__(daemon=True)
        self._live, self._pace = live, 1.0 / steps_a_second
        self.stopped = threading.Event()

    def run(self) -> None:
        step, due, sampled = 40, time.monotonic(), 0.0
        while not self.stopped.is_set():
            step += 1
            now = time.time()
            self._live.step(step, now, self._pace)
            self._live.log_line(f"step {step} loss {2.0 + 1 / step:.4f}")
            if now - sampled >= 1.0:
                self._live.sample(now, step)
                sampled = now
            self._live.flush()
            due += self._pace
            self.stopped.wait(max(0.0, due - time.monotonic()))


@contextmanager
def ticking(live: LiveRun, steps_a_second: float) -> Iterator[None]:
    ticker = Ticker(live, steps_a_second)
    ticker.start()
    try:
        yield
    finally:
        ticker.stopped.set()
        ticker.join()
        live.close()


def at_rest(root: Path, peers: Path | None, seconds: float = 40.0) -> Iterator[Figures]:
    """The overview of eight GPUs, one step and one sample a second, at three terminal sizes; then peers."""
    for columns, rows in ((80, 24), (120, 40), (200, 60)):
        live = _eight_gpus(root)
        with (
            ticking(live, 1.0),
            BenchTerminal(
                [LLMTOP, "attach", live.run.run_id], environment(root), columns=columns, rows=rows
            ) as terminal,
        ):
            terminal.wait_for("GPU0", "Help")
            yield {"figure": f"at 1 Hz, 8 GPUs, {columns}x{rows}", **cost_at_rest(terminal, seconds)}
    yield _least_at_rest(root, seconds)
    if peers is not None:
        yield from peers_at_rest(peers, root, environment(root), seconds)


def _least_at_rest(root: Path, seconds: float) -> Figures:
    """What the toolkit takes for as many panels of plain text: no app of its kind can take less."""
    command = [sys.executable, str(HERE / "ui_minimal.py"), "--ticking"]
    with BenchTerminal(command, environment(root), columns=120, rows=40) as terminal:
        terminal.wait_for("GPU0", "Quit")
        return {"figure": "at 1 Hz, minimal Textual app, 120x40", **cost_at_rest(terminal, seconds)}


# --- memory over a day --------------------------------------------------------------------------------


def over_a_day(root: Path, hours: float = 24.0) -> Iterator[Figures]:
    """A day of record, a step a second and a sample each ten, poured into the app by the minute."""
    live = LiveRun(root, steps=10**6, ranks=8)
    with BenchTerminal([LLMTOP, "attach", live.run.run_id], environment(root)) as terminal:
        terminal.wait_for("Help")
        step = sample = 0
        resident: list[tuple[float, int]] = []
        minutes = int(hours * 60)
        for minute in range(minutes):
            begin = BEGAN + 60.0 * minute
            for second in range(60):
                step += 1
                live.step(step, begin + second, 1.0)
                if second % 10 == 0:
                    sample += 1
                    live.sample(begin + second, sample)
            live.flush()
            # So that it is read as it comes and not at once.
            time.sleep(0.02)
            if minute % max(1, minutes // 24) == 0:
                resident.append((minute / 60, terminal.rss_bytes()))
        terminal.wait_for(f"{step}/")
        resident.append((hours, terminal.rss_bytes()))
    live.close()
    first = next(size for hour, size in resident if hour >= 1.0)
    yield {
        "figure": "resident over 24 h of record",
        "rss_bytes": resident[-1][1],
        "largest_rss_bytes": max(size for _, size in resident),
        "after_an_hour_rss_bytes": first,
        "by_hour": resident,
    }


# --- keys -----------------------------------------------------------------------------------------------


_INSIDE = (("1", "processes:"), ("4", "by PaLM"), ("5", "peak RSS"), ("6", "NVLink recv"), ("9", "occupancy"))
"""Keys of panels, and words that stand in them only when they are opened."""


def keys(root: Path, presses: int = 120) -> Iterator[Figures]:
    """From the press to the painted panel, while 8 ranks write 20 steps a second."""
    live = _eight_gpus(root)
    found: dict[str, list[float]] = {"open": [], "back": []}
    command = [LLMTOP, "attach", live.run.run_id]
    with ticking(live, 20.0), BenchTerminal(command, environment(root)) as terminal:
        terminal.wait_for("GPU0", "Help")
        time.sleep(5.0)
        cost = Cost(terminal)
        for press in range(presses // 2):
            key, words_inside = _INSIDE[press % len(_INSIDE)]
            for kind, typed, words in (("open", key, words_inside), ("back", "\x1b", "8 Log")):
                terminal.forget()
                began = time.perf_counter()
                terminal.type(typed)
                found[kind].append(terminal.wait_for(words, give_up=20.0) - began)
                time.sleep(0.15)
        _, share, rate = cost.so_far()
    for kind, times in found.items():
        yield {
            "figure": f"key to paint, {kind}, 20 steps/s on 8 ranks",
            "p50_seconds": percentile(times, 0.5),
            "p95_seconds": percentile(times, 0.95),
            "worst_seconds": max(times),
            "presses": len(times),
            "cpu_percent_of_a_core": 100 * share,
            "terminal_bytes_per_second": rate,
        }


# --- a long run --------------------------------------------------------------------------------------


def long_run(root: Path, steps: int = 100_000, ranks: int = 8) -> Iterator[Figures]:
    """A run that has ended: until its header stands, and until its last step does; and the parts of that.

    With the bookmark that its supervisor leaves, and without one, as a run is whose supervisor was killed
    in its first minute.
    """
    run = make_long_run(root, steps=steps, ranks=ranks, sample_every=10)
    size = sum(path.stat().st_size for path in run.path.glob("*.jsonl"))
    began = time.process_time()
    Bookmarker(run).finish(most_seconds=600.0)
    kept = run.bookmark_path.read_bytes()
    yield {
        "figure": f"fold {steps} steps x {ranks} ranks and keep the bookmark",
        "cpu_seconds": time.process_time() - began,
        "bookmark_bytes": len(kept),
        "log_bytes": size,
    }
    for attempt in range(3):
        for how in ("with its bookmark", "without a bookmark"):
            if how == "without a bookmark":
                run.bookmark_path.unlink(missing_ok=True)
            else:
                run.bookmark_path.write_bytes(kept)
            with BenchTerminal([LLMTOP, "attach", run.run_id], environment(root)) as terminal:
                first = terminal.wait_for("bench", "Help") - terminal.began
                whole = terminal.wait_for(f"steps {steps}/{steps}") - terminal.began
                yield {
                    "figure": f"open {steps} steps x {ranks} ranks {how}",
                    "first_paint_seconds": first,
                    "complete_seconds": whole,
                    "cpu_seconds": terminal.cpu_seconds(),
                    "rss_bytes": terminal.rss_bytes(),
                    "log_bytes": size,
                    "attempt": attempt,
                }
    yield from _decoding(run.path)


def _decoding(path: Path) -> Iterator[Figures]:
    from llmtop.profiler.record.rundir import RunDir

    run = RunDir.open(path)
    began, tail, count = time.process_time(), EventTail(run.events_path(3)), 0
    while tail.offset < 32 << 20:
        count += len(tail.poll(PART_BYTES))
    decode = (time.process_time() - began) / count
    yield {"figure": "decode an event", "cpu_microseconds": 1e6 * decode, "events": count}
    events = list(itertools.islice(RunStream(run).poll(), 80_000))
    began = time.process_time()
    fold(RunState(), events)
    spent = (time.process_time() - began) / len(events)
    yield {"figure": "fold an event", "cpu_microseconds": 1e6 * spent, "events": len(events)}


# --- all of them -------------------------------------------------------------------------------------


def measures(peers: Path | None) -> dict[str, Callable[[Path], Iterator[Figures]]]:
    return {
        "starts": starts,
        "first": lambda root: first_screens(root, peers),
        "rest": lambda root: at_rest(root, peers),
        "keys": keys,
        "long": long_run,
        "day": over_a_day,
    }


def _keep(out: Path, new: list[Figures]) -> None:
    """The file holds of each figure what was measured last."""
    figures = {row["figure"] for row in new}
    lines = out.read_text().splitlines() if out.exists() else []
    kept = [row for row in map(json.loads, lines) if row["figure"] not in figures]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in (*kept, *new)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=None, choices=list(measures(None)))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ui.jsonl")
    parser.add_argument("--peers", type=Path, default=None)
    args = parser.parse_args()
    new: list[Figures] = []
    for name, measure in measures(args.peers).items():
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory(prefix="llmtop-ui-") as folder:
            for figures in measure(Path(folder) / "runs"):
                row = {
                    **figures,
                    "load": [round(value, 2) for value in os.getloadavg()],
                    "before_other_work": os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO),
                    "cores": os.cpu_count(),
                    "python": platform.python_version(),
                    "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                }
                print(json.dumps(row), flush=True)
                new.append(row)
                _keep(args.out, new)


if __name__ == "__main__":
    main()
