"""What watching costs: the same training with and without the probes, in one process, in turns.

    python -m benchmarks.overhead [--minutes 4] [--inside] [--cell '{"micro_batch": 8}']

Blocks of steps run on one engine and one stream of data, in random order within each round: without
anything (`bare`), with the worker's probes and reports (`watched`), and with one exact classification of
all tensors in the block (`classified`). A second series compares bare blocks with and without the hardware
sampler of a supervisor running in its own process. Differences are taken within a round; the interval
is a bootstrap of their trimmed mean over the rounds. On a machine with other work that is wide; so the
processor time inside the probes' own calls is measured first, without and with that of the thread that
writes what they tell (`--inside` measures nothing else). On a GPU that is done twice: with an idle device
before each call, where there is nothing to wait for, and as the training runs.

Each series has its time (`--seconds` for what is inside the calls, `--minutes` for the others), is a row of
its own as soon as it is done, and every block of the first says its figures. Before all that come the
imports, on a new machine the compiling of DeepSpeed's Adam (over a minute), and the model. A call that takes
much longer than it should says where each thread stands, and ends (`--limit` sets the time of all).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from benchmarks.cells import plan
from benchmarks.rows import Cell, Row
from benchmarks.session import RESULTS, run_main
from benchmarks.stats import BlockTime, Interval, bootstrap, percentile
from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.hardware.sampler import Sampler
from llmtop.trainer.pdeath import die_with_parent

if TYPE_CHECKING:
    from benchmarks.blocks import Arm, Bench, Inside

GOAL_MS = 0.1
GOAL_PERCENT = 0.5
CLASSIFY_EVERY = 100
"""The default of the option: a classification's cost is spread over so many steps."""
_BLOCK_SECONDS = 0.5
_SAMPLED_BLOCK_SECONDS = 2.0
"""The sampler reads once a second."""
_SHORTEST_BLOCK = 5
_WARM_UP_STEPS = 26
"""Until the probes know what their readings cost, and mark as many borders as ever after."""
_INSIDE_BLOCKS = 6
"""As long as there is time."""
_FEWEST_BLOCKS = 2
_INSIDE_STEPS = 50
"""Some of what is told by steps is told of every twentieth or fiftieth."""
_READY_SECONDS = 400.0
"""For imports, compiling an op, the model and some first steps."""
_FIXED_STEPS = 1000
"""More than what has to be done however long it takes, warm-up and the fewest blocks."""
_TRIM = 0.1
_GPU: Cell = {"model": "llama-3.2-1b", "zero": 2, "micro_batch": 4, "seq_len": 1024}
"""About 100 ms a step on an H200."""
_CPU: Cell = {"model": "tiny-llama-cpu", "zero": 2, "micro_batch": 8, "seq_len": 128, "threads_per_rank": 1}


Round = dict[str, BlockTime]
Block = Callable[[], BlockTime]


class Cost(Struct, frozen=True, kw_only=True):
    """What something adds to a step, by one clock."""

    name: str
    milliseconds: Interval
    percent: Interval
    rounds: int

    @property
    def verdict(self) -> str:
        """Against the goal, as far as the interval lets one tell."""
        if self.milliseconds.high <= GOAL_MS and self.percent.high <= GOAL_PERCENT:
            return "within"
        if self.milliseconds.low > GOAL_MS or self.percent.low > GOAL_PERCENT:
            return "beyond"
        return "too noisy to tell from"

    def __str__(self) -> str:
        return (
            f"{self.name:<44} {self.milliseconds} ms, {self.percent} % of a step "
            f"({self.verdict} the goal of {GOAL_MS} ms and {GOAL_PERCENT} %; {self.rounds} rounds)"
        )


def cost(name: str, added_seconds: Sequence[float], bare_seconds: Sequence[float]) -> Cost:
    """From the seconds that each round's blocks took longer a step."""
    added = bootstrap(added_seconds, trimmed_mean)
    return Cost(
        name=name,
        milliseconds=added.scaled(1e3),
        percent=added.scaled(100 / statistics.median(bare_seconds)),
        rounds=len(added_seconds),
    )


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the tenth at either end: a block that was disturbed from outside says nothing."""
    cut = int(_TRIM * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def inside_text(what: str, inside_seconds: Sequence[float], step_seconds: float) -> str:
    """What the probes' own calls take, which no other work on the machine blurs."""
    spent = bootstrap(inside_seconds, statistics.fmean)
    share = spent.scaled(100 / step_seconds)
    verdict = "within" if 1e3 * spent.high <= GOAL_MS and share.high <= GOAL_PERCENT else "beyond"
    name = f"cpu time: {what}"
    return (
        f"{name:<44} {spent.scaled(1e3)} ms, {share} % of a step "
        f"({verdict} the goal; {len(inside_seconds)} blocks)"
    )


def probe_costs(rounds: Sequence[Round], steps: int) -> list[Cost]:
    """Of plain steps, and with a classification spread over the steps between two of them."""
    found: list[Cost] = []
    for clock in ("wall", "cpu"):
        bare, watched, classified = (
            [float(getattr(times[arm], clock)) for times in rounds]
            for arm in ("bare", "watched", "classified")
        )
        plain = [w - b for w, b in zip(watched, bare, strict=True)]
        once = [(c - w) * steps for c, w in zip(classified, watched, strict=True)]
        spread = [p + o / CLASSIFY_EVERY for p, o in zip(plain, once, strict=True)]
        found.append(cost(f"{clock} time: probes, plain steps", plain, bare))
        found.append(cost(f"{clock} time: probes, classified every {CLASSIFY_EVERY}", spread, bare))
    return found


def in_turns(arms: dict[str, Block], seconds: float, *, seed: int = 0, at_least: int = 3) -> list[Round]:
    """Rounds of all arms in random order, until the time is up; each round arm to its time."""
    order = random.Random(seed)
    deadline = time.monotonic() + seconds
    rounds: list[Round] = []
    while len(rounds) < at_least or time.monotonic() < deadline:
        names = list(arms)
        order.shuffle(names)
        rounds.append({name: arms[name]() for name in names})
    return rounds


class SamplerProcess:
    """Samples this process and its devices as a supervisor does; halted outside its blocks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.overhead", "--sample", str(os.getpid())],
            cwd=Path(__file__).resolve().parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._process.send_signal(signal.SIGSTOP)

    def during(self, block: Block) -> BlockTime:
        self._process.send_signal(signal.SIGCONT)
        try:
            return block()
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def sample_for_ever(pid: int, every_seconds: float = 1.0) -> None:
    """Until the process that is measured ends."""
    # It is halted most of the time, and could not see the end of the process that is measured.
    die_with_parent()
    sampler = Sampler()
    print("ready", flush=True)
    while True:
        began = time.monotonic()
        sampler.sample({0: pid})
        time.sleep(max(0.0, every_seconds - (time.monotonic() - began)))


class Tell(Struct, frozen=True, kw_only=True):
    """Whom a measurement tells what."""

    ready: Callable[[float], object]
    """The series begin, and a step takes so many seconds."""
    say: Callable[[str], object]
    keep: Callable[[Row], object]


def measure(bench: Bench, seconds: float, minutes: float, tell: Tell) -> None:
    """All series on one engine, each row kept when it is there; without minutes only what is inside the
    probes' calls, for which there are so many seconds."""
    bare = bench.bare()
    bench.step_seconds(bare, _SHORTEST_BLOCK)
    step = bench.step_seconds(bare, 2 * _SHORTEST_BLOCK).wall
    steps = max(_SHORTEST_BLOCK, math.ceil(_BLOCK_SECONDS / step))
    tell.ready(step)
    tell.say(f"a step takes {1e3 * step:.2f} ms, blocks have {steps}")
    row = {"step_seconds": step, "steps_of_block": steps}
    tell.keep({**row, "series": "inside", **_inside(bench, steps, step, seconds, tell.say)})
    if minutes:
        tell.keep({**row, "series": "probes", **_probes(bench, bare, steps, minutes)})
        tell.keep({**row, "series": "sampler", **_sampler(bench, bare, step, minutes)})


def _inside(
    bench: Bench, steps: int, step_seconds: float, seconds: float, say: Callable[[str], object]
) -> Row:
    """What the probes' own calls take."""
    deadline = time.monotonic() + seconds
    steps = max(steps, _INSIDE_STEPS)
    nothing = bench.nothing_seconds(steps)
    # One for all blocks: the first steps of a process import, allocate, and are looked at more closely.
    watched = bench.watched(classify_every=0)
    bench.inside_seconds(watched, _WARM_UP_STEPS, nothing)
    say("warm")
    found: list[Inside] = []
    while len(found) < _INSIDE_BLOCKS and (len(found) < _FEWEST_BLOCKS or time.monotonic() < deadline):
        found.append(bench.inside_seconds(watched, steps, nothing))
        say(f"block {len(found)}: {1e3 * found[-1].work:.4f} ms of work a step")
    figures = {
        "work inside the probes' calls": [each.work for each in found],
        "that and the writer's thread": [each.work + each.beside for each in found],
        "inside the probes' calls as it runs": [each.running for each in found if each.running is not None],
    }
    parts = _means([each.parts for each in found])
    running_parts = _means([each.running_parts for each in found if each.running_parts is not None])
    return {
        "inside_milliseconds": [1e3 * each.work for each in found],
        "parts_milliseconds": parts,
        "beside_milliseconds": [1e3 * each.beside for each in found],
        "running_milliseconds": [1e3 * each.running for each in found if each.running is not None],
        "running_parts_milliseconds": running_parts,
        "text": [
            *(inside_text(what, seconds, step_seconds) for what, seconds in figures.items() if seconds),
            f"work by call in ms: {_by_call(parts)}",
            *([f"as it runs, by call in ms: {_by_call(running_parts)}"] if running_parts else []),
        ],
    }


def _means(blocks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Milliseconds by call, over the blocks."""
    names = blocks[0] if blocks else ()
    return {name: 1e3 * statistics.fmean(block.get(name, 0.0) for block in blocks) for name in names}


def _by_call(milliseconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {spent:.4f}" for name, spent in milliseconds.items())


def _probes(bench: Bench, bare: Arm, steps: int, minutes: float) -> Row:
    """Blocks with and without the probes, in turns."""
    arms = {
        "bare": bare,
        "watched": bench.watched(classify_every=0),
        # One block has one step of which this many is a factor.
        "classified": bench.watched(classify_every=steps),
    }
    blocks = {name: _block(bench, arm, steps) for name, arm in arms.items()}
    in_turns(blocks, 0.0, at_least=2)  # the first blocks of an arm import and allocate
    rounds = in_turns(blocks, 60 * minutes * 0.65)
    bare_seconds = [times["bare"].wall for times in rounds]
    return {
        "step_seconds": statistics.median(bare_seconds),
        "step_seconds_p95": percentile(bare_seconds, 0.95),
        **_told(probe_costs(rounds, steps)),
        "rounds": msgspec.to_builtins(rounds),
    }


def _sampler(bench: Bench, bare: Arm, step: float, minutes: float) -> Row:
    """Blocks with and without the supervisor's sampler, in turns."""
    steps = max(_SHORTEST_BLOCK, math.ceil(_SAMPLED_BLOCK_SECONDS / step))
    sampler = SamplerProcess()
    try:
        plain = _block(bench, bare, steps)
        rounds = in_turns({"bare": plain, "sampled": lambda: sampler.during(plain)}, 60 * minutes * 0.35)
    finally:
        sampler.close()
    found = cost(
        "wall time: the supervisor's sampler",
        [times["sampled"].wall - times["bare"].wall for times in rounds],
        [times["bare"].wall for times in rounds],
    )
    return {"steps_of_block": steps, **_told([found]), "sampler_rounds": msgspec.to_builtins(rounds)}


def _told(costs: Sequence[Cost]) -> Row:
    return {
        "costs": [
            {
                "name": each.name,
                "milliseconds": [each.milliseconds.value, each.milliseconds.low, each.milliseconds.high],
                "percent": [each.percent.value, each.percent.low, each.percent.high],
                "rounds": each.rounds,
                "verdict": each.verdict,
            }
            for each in costs
        ],
        "text": [str(each) for each in costs],
    }


def _block(bench: Bench, arm: Arm, steps: int) -> Block:
    return lambda: bench.step_seconds(arm, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=4.0, help="of the series with and without")
    parser.add_argument("--seconds", type=float, default=60.0, help="of what is inside the probes' calls")
    parser.add_argument("--limit", type=float, help="seconds of all; default: by what a step takes")
    parser.add_argument("--inside", action="store_true", help="only what is inside the probes' calls")
    parser.add_argument("--cpu", action="store_true", help="the CPU demo's model, whatever devices there are")
    parser.add_argument("--cell", type=json.loads, default={}, help="run options as JSON, over the default's")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead.jsonl")
    parser.add_argument("--sample", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample is not None:
        sample_for_ever(options.sample)
        return
    minutes = 0.0 if options.inside else options.minutes
    began = time.monotonic()
    faulthandler.dump_traceback_later(options.limit or _READY_SECONDS, exit=True)
    machine = detect_machine()
    if options.cpu:
        machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=machine.host_memory_bytes)
    cell = {**(_CPU if machine.gpu == "cpu" else _GPU), **options.cell, "gpus": 1}
    planned = plan({"steps": 10**9, "lr_schedule": "constant", **cell}, machine, name="overhead")
    root = Path(tempfile.mkdtemp(prefix="llmtop-overhead-"))
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def ready(step_seconds: float) -> None:
        if options.limit is None:
            limit = 2 * (options.seconds + 60 * minutes) + _FIXED_STEPS * step_seconds
            faulthandler.dump_traceback_later(limit, exit=True)

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {words}", flush=True)

    def keep(row: Row) -> None:
        with options.out.open("a") as log:
            log.write(json.dumps({"cell": cell, "device": machine.gpu, **row}) + "\n")
        print("\n".join(row["text"]), flush=True)

    try:
        os.environ["DS_ACCELERATOR"] = "cpu" if machine.gpu == "cpu" else "cuda"
        from benchmarks.blocks import Bench

        tell = Tell(ready=ready, say=say, keep=keep)
        measure(Bench(planned, root, say), options.seconds, minutes, tell)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    # Taking a process group of gloo down can abort the process.
    os._exit(0)


if __name__ == "__main__":
    run_main(main)
