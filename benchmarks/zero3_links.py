"""NVLink's bytes during steps at ZeRO-3 against those that the algorithm must move.

    NCCL_NVLS_ENABLE=0 python -m benchmarks.zero3_links --gpus 8 --minutes 8
    python -m benchmarks.zero3_links --cpu --gpus 4
    python -m benchmarks.zero3_links --summary benchmarks/results/zero3_links.jsonl

Each cell is a real run of our worker. A row has, for one step in its steady state, what the arithmetic says
(`zero3_traffic.py`), what the collectives of every rank carried, which has to be the same to the byte, and on
GPUs what NVLink's counters say, within 2 % of the ring's bytes. On a CPU there are no links, only the rest.
NCCL is told to use its ring and its plain protocol, whose bytes are known; multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.carried import carried_path
from benchmarks.cells import Planned, Runner
from benchmarks.forkserver import ForkServerError
from benchmarks.nvlink_allreduce import NCCL, TOLERANCE
from benchmarks.rows import Cell, Row, read_rows
from benchmarks.session import RESULTS, add_options, run_all, run_main, runner
from benchmarks.window import first_and_last
from benchmarks.zero3_traffic import Moved, Sharding, Tour, Traffic, sent_bytes, step_traffic
from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir

ENTRY = "benchmarks.carried:main"
_STEPS: Cell = {"steps": 8, "classify_every": 0}
_LIVE = 4_000_000
"""Elements: less than any of the models has, so that layers are gathered and let go one after the other."""


def _keys(**keys: object) -> Cell:
    return {"deepspeed": {"zero_optimization": keys}}


def cells(gpus: int, *, on_cpu: bool) -> Iterator[Cell]:
    """Defaults; accumulation; checkpointing; nothing kept; adapters; a second shard where there is room."""
    if on_cpu:
        base: Cell = {"model": "tiny-llama-cpu", "seq_len": 32, "threads_per_rank": 1, "micro_batch": 1}
        small, live = 1000, _LIVE // 10
    else:
        base = {"model": "llama-3.1-8b", "seq_len": 2048, "micro_batch": 1, "gradient_checkpointing": True}
        small, live = 100_000, 100_000_000
    one: Cell = {"gpus": gpus, "zero": 3, **_STEPS, **base}
    bare = {
        "stage3_param_persistence_threshold": small,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": live // 4,
    }
    yield one
    yield {**one, "grad_accum": 2, **_keys(**bare)}
    yield {**one, "gradient_checkpointing": not base.get("gradient_checkpointing"), **_keys(**bare)}
    yield {**one, "gradient_checkpointing": True, "lora_rank": 8, **_keys(**bare)}
    yield {**one, **_keys(**{**bare, "stage3_prefetch_bucket_size": 0})}
    if gpus > 2:
        hpz = {**bare, "zero_hpz_partition_size": gpus // 2}
        yield {**one, "grad_accum": 2, **_keys(**hpz)}
    if not on_cpu:
        yield {**one, "model": "llama-3.2-1b", "gradient_checkpointing": False}


def sharding_of(spec: RunSpec, gradient_bytes: int) -> Sharding:
    """How a run is set, in the words of the arithmetic."""
    zero = sizes_of(spec).zero
    return Sharding(
        ranks=spec.world_size,
        gradient_bytes=gradient_bytes,
        grad_accum=spec.options.grad_accum,
        prefetch=zero.prefetch_bucket_size,
        max_live=zero.max_live_parameters,
        max_reuse=zero.max_reuse_distance,
        persistence=zero.param_persistence_threshold,
        model_persistence=zero.model_persistence_threshold,
        hpz=zero.hpz_partition_size,
    )


def by_collective(traffic: Traffic) -> dict[str, int]:
    """In the words of the ranks' own counting: kind and group size."""
    found: dict[str, int] = {}
    for moved, size in traffic.items():
        key = f"{moved.kind}/{moved.ranks}"
        found[key] = found.get(key, 0) + size
    return found


def row_of(cell: Cell, seconds: float, run: Runner) -> Row:
    """One run and what it moved; a refusal is a row as well."""
    try:
        planned = run.plan(cell, name="zero3-links")
        carried = run.forked(planned, seconds, entry=ENTRY)
    except ForkServerError:
        raise
    except LlmtopError as error:
        return {"cell": cell, "status": "refused", "reason": str(error)}
    state = read_state(carried.run)
    row: Row = {"cell": cell, **_end(state), "cut_after_seconds": carried.cut_after_seconds}
    ranks = [read_carried(carried.run, rank) for rank in range(planned.spec.world_size)]
    if state.status != "completed" or not all(ranks):
        return row
    return {**row, **moved(planned, ranks)}


def _end(state: RunState) -> Row:
    versions = next((rank.model.versions for rank in state.ranks.values() if rank.model), {})
    reason = state.ended.reason if state.ended and state.status != "completed" else ""
    return {"status": state.status, "reason": reason, "versions": versions}


def read_carried(run: RunDir, rank: int) -> Row:
    """What a rank says that it moved; empty where it did not get that far."""
    path = carried_path(run, rank)
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    return found


def moved(planned: Planned, ranks: Sequence[Row]) -> Row:
    """What was to be moved by a step in its steady state, and what was."""
    first = ranks[0]
    tour = msgspec.convert(first["tour"], Tour)
    traffic = step_traffic(tour, sharding_of(planned.spec, first["gradient_bytes"]))
    expected = by_collective(traffic)
    begin, end = first_and_last(planned.spec.options.steps)
    counted = [rank["steps"][str(step)] for rank in ranks for step in range(begin + 1, end + 1)]
    same = all(_large(each) == expected for each in counted)
    return {
        "order_is_known": first["order_is_known"],
        "expected": {_words(moved): size for moved, size in traffic.items()},
        "expected_sent_bytes": sent_bytes(traffic),
        "counted": counted[0],
        "same_in_every_rank_and_step": same,
        **_links(first["links"], (end - begin) * sent_bytes(traffic)),
    }


def _words(moved: Moved) -> str:
    return f"{moved.kind} {moved.phase} of {moved.ranks}"


def _large(counted: dict[str, int]) -> dict[str, int]:
    """Without norms, flags, losses and what the worker's ranks agree on: all-reduces of a few bytes each."""
    return {key: size for key, size in counted.items() if not key.startswith("all_reduce")}


def _links(read: Sequence[Sequence[dict[str, int | None]]], expected: int) -> Row:
    """Measured over expected, each way of each device, over the whole window."""
    if len(read) < 2:
        return {}
    before, after = read
    ratios: list[float] = []
    for old, new in zip(before, after, strict=True):
        for way in ("tx", "rx"):
            was, now = old[way], new[way]
            if was is None or now is None:
                return {"links": "the driver tells no NVLink totals"}
            ratios.append((now - was) / expected)
    worst = max(abs(ratio - 1) for ratio in ratios)
    return {"ratios": ratios, "worst_error": worst, "within_tolerance": worst <= TOLERANCE, "nccl": NCCL}


def summary(rows: Sequence[Row]) -> str:
    return "\n".join(_line(row) for row in rows) or "no rows"


def _line(row: Row) -> str:
    cell = json.dumps({key: value for key, value in row["cell"].items() if key not in _STEPS})
    if "expected" not in row:
        return f"{row['status']}: {cell}: {row['reason']}"
    exact = "to the byte" if row["same_in_every_rank_and_step"] else "NOT as expected"
    links = "no links" if "ratios" not in row else f"links off by {100 * row['worst_error']:.2f} %"
    return f"{row['expected_sent_bytes'] / 1e9:9.4f} GB a step and rank, collectives {exact}, {links}: {cell}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--summary", type=Path, help="only say what a file of rows holds")
    add_options(parser, RESULTS / "zero3_links.jsonl")
    options = parser.parse_args()
    if options.summary is not None:
        print(summary(read_rows(options.summary)))
        return
    # Before the process that forks the ranks: they inherit it.
    os.environ.update(NCCL)
    with runner(options) as run:
        run_all(cells(options.gpus, on_cpu=options.cpu), options, partial(row_of, run=run))
    print(summary(read_rows(options.out)))


if __name__ == "__main__":
    run_main(main)
