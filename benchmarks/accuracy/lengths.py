"""What an allocator holds after batches of many lengths, simulated for published rows that were made so.

    python -m benchmarks.accuracy.lengths

A row's data is told by the mean, deviation, least and largest of its lengths; in which order they came is not
known. So the simulated device of `profiler.memory.tape` is given several orders, drawn from two distributions
with that mean and deviation, and each gives a figure. Adds rows to `results/lengths.jsonl` and skips those
that are there. Minutes of one core; no GPU.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.cells import plan
from benchmarks.rows import Cell, Row, RowLog, read_rows
from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.allocator import context_bytes
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.memory.tape.build import Builder, engine_plan
from llmtop.profiler.memory.tape.engine import Engine
from llmtop.profiler.memory.tape.run import machine_of

DATA = Path(__file__).parents[1] / "data"
RESULTS = Path(__file__).parents[1] / "results" / "lengths.jsonl"
MANY_LENGTHS = "many_lengths"
"""The difference that names such rows."""
SEEDS = (1, 2, 3, 4, 5, 6)
MOST_BATCHES = 1000
"""Of an order. Of six orders tried none held more after 800 batches than it did before."""


class Lengths(Struct, frozen=True, kw_only=True):
    """What is told of the samples of a data set, in tokens."""

    mean: float
    deviation: float
    least: int
    largest: int
    samples: int
    """Drawn by the row's script; those longer than its limit are left out."""


Draw = Callable[[random.Random, Lengths], float]


def _lognormal(source: random.Random, told: Lengths) -> float:
    variance = math.log(1 + (told.deviation / told.mean) ** 2)
    return source.lognormvariate(math.log(told.mean) - variance / 2, math.sqrt(variance))


def _gamma(source: random.Random, told: Lengths) -> float:
    shape = (told.mean / told.deviation) ** 2
    return source.gammavariate(shape, told.mean / shape)


DISTRIBUTIONS: dict[str, Draw] = {"lognormal": _lognormal, "gamma": _gamma}


def order(told: Lengths, limit: int, draw: Draw, seed: int) -> Iterator[int]:
    """Lengths one after another, of those samples that are within the limit."""
    source = random.Random(seed)
    for _ in range(told.samples):
        length = 0
        while not told.least <= length <= told.largest:
            length = int(draw(source, told))
        if length <= limit:
            yield length


def held_bytes(spec: RunSpec, lengths: Sequence[int]) -> int:
    """The most that the allocator holds over micro-batches of these lengths, if the device has it."""
    memory = spec.gpu.memory_bytes
    room = None if memory is None else memory - context_bytes(spec)
    sizes = sizes_of(spec)
    machine = machine_of(spec, room)
    engine = Engine(machine, engine_plan(spec, sizes, 0))
    engine.start()
    every = spec.options.grad_accum
    for place, length in enumerate(lengths):
        index = place % every
        one = replace(spec, options=replace(spec.options, seq_len=length))
        model = Builder(one, sizes_of(one), machine, engine).model()
        engine.begin(index, boundary=index == every - 1)
        model.run()
        engine.end_backward()
        if index == every - 1:
            engine.step()
    return machine.peak_reserved_bytes


def simulated(row: Row, done: Collection[tuple[str, str, int]] = ()) -> Iterator[Row]:
    """One result for each distribution and seed; those that are `done` are left out."""
    told = Lengths(**row["lengths"])
    cell: Cell = row["cell"]
    machine = Machine(gpu=cell["gpu"], gpus=1, host_memory_bytes=None)
    model = str(cell["model"])
    located = str(DATA / model) if model.startswith("models/") else model
    spec = plan({**cell, "model": located}, machine, name="lengths").spec
    for name, draw in DISTRIBUTIONS.items():
        for seed in SEEDS:
            if (row["id"], name, seed) in done:
                continue
            lengths = [*order(told, spec.options.seq_len, draw, seed)][:MOST_BATCHES]
            key = {"id": row["id"], "distribution": name, "seed": seed}
            yield {"cell": key, "batches": len(lengths), "reserved_bytes": held_bytes(spec, lengths)}


def reserved_of(published_id: str) -> list[int]:
    """Every figure that was simulated for a row, the smallest first."""
    return sorted(row["reserved_bytes"] for row in read_rows(RESULTS) if row["cell"]["id"] == published_id)


def likely_bytes(published_id: str) -> int | None:
    """The median of a row's figures; None where none was simulated."""
    found = reserved_of(published_id)
    return round(statistics.median(found)) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    log = RowLog(options.out)
    done = {tuple(row["cell"].values()) for row in read_rows(options.out)}
    for row in read_rows(DATA / "published.jsonl"):
        if MANY_LENGTHS not in row["differs"]:
            continue
        for found in simulated(row, done):
            log.add(found)
            print(found, flush=True)


if __name__ == "__main__":
    main()
