"""What an allocator holds after batches of many lengths, simulated for published rows that were made so.

    python -m benchmarks.accuracy.lengths
    python -m benchmarks.accuracy.lengths --jobs 2

A row's data is told by the mean, deviation, least and largest of its lengths; in which order they came is not
known. So the simulated device of `profiler.memory.tape` is given many orders, drawn from two distributions
with that mean and deviation, and each gives a figure: so many that their median is certain to a few percent.
Adds rows to `results/lengths.jsonl` and skips those that are there. More than an hour of one core; no GPU.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
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
SEEDS = range(1, 36)
MOST_BATCHES = 1000
"""Of an order. Of six orders tried none held more after 800 batches than it did before."""


_FEWEST = 9
"""Figures of which a median has an error that is told."""


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


def simulated(row: Row, name: str, seed: int) -> Row:
    """The result of one order of a published row."""
    told = Lengths(**row["lengths"])
    cell: Cell = row["cell"]
    machine = Machine(gpu=cell["gpu"], gpus=1, host_memory_bytes=None)
    model = str(cell["model"])
    located = str(DATA / model) if model.startswith("models/") else model
    spec = plan({**cell, "model": located}, machine, name="lengths").spec
    lengths = [*order(told, spec.options.seq_len, DISTRIBUTIONS[name], seed)][:MOST_BATCHES]
    key = {"id": row["id"], "distribution": name, "seed": seed}
    return {"cell": key, "batches": len(lengths), "reserved_bytes": held_bytes(spec, lengths)}


def left(done: Collection[tuple[str, str, int]]) -> list[tuple[Row, str, int]]:
    """The orders that are not `done`: row, distribution and seed; all rows of a seed before the next."""
    rows = [row for row in read_rows(DATA / "published.jsonl") if MANY_LENGTHS in row["differs"]]
    return [
        (row, name, seed)
        for seed in SEEDS
        for row in rows
        for name in DISTRIBUTIONS
        if (row["id"], name, seed) not in done
    ]


@lru_cache(maxsize=1)
def _all_reserved() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in read_rows(RESULTS):
        found.setdefault(row["cell"]["id"], []).append(row["reserved_bytes"])
    return {name: sorted(sizes) for name, sizes in found.items()}


def orders_of_a_row() -> int:
    return len(SEEDS) * len(DISTRIBUTIONS)


def reserved_of(published_id: str) -> list[int]:
    """Every figure that was simulated for a row, the smallest first."""
    return _all_reserved().get(published_id, [])


def likely_bytes(published_id: str) -> int | None:
    """The median of a row's figures; None where none was simulated."""
    found = reserved_of(published_id)
    return round(statistics.median(found)) if found else None


def likely_error_bytes(published_id: str) -> int | None:
    """The standard error of that median, whatever the figures' distribution: half the distance between those
    that are half a root of their number above and below it. None below nine figures."""
    found = reserved_of(published_id)
    if len(found) < _FEWEST:
        return None
    away = math.sqrt(len(found)) / 2
    below, above = (math.floor(len(found) / 2 - away), math.ceil(len(found) / 2 + away) - 1)
    return round((found[above] - found[below]) / 2)


def _simulated(asked: tuple[Row, str, int]) -> Row:
    return simulated(*asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=1, help="orders at a time")
    options = parser.parse_args()
    log = RowLog(options.out)
    done = {tuple(row["cell"].values()) for row in read_rows(options.out)}
    with ProcessPoolExecutor(options.jobs) as workers:
        for found in workers.map(_simulated, left(done)):
            log.add(found)
            print(found, flush=True)


if __name__ == "__main__":
    main()
