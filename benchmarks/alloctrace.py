"""Every allocation of a run on the device, and whether `profiler.memory.pool` makes of them what torch made.

    python -m benchmarks.alloctrace --cells CELLS.jsonl --out FOLDER --minutes 4
    python -m benchmarks.alloctrace --check FOLDER

A run is recorded from its first allocation to its last. The check replays its requests and compares the
bytes that are held at the end and at most with those that torch's own segments add up to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy

from benchmarks.rows import Cell, Row, key_of
from benchmarks.session import add_options, of_part, run_main, runner, time_left
from llmtop.profiler.memory.pool import Block, Pool

ENTRY = "benchmarks.alloctrace:record"
ACTIONS = ("alloc", "free_completed", "segment_alloc", "segment_free")
_FILE = "allocations.npz"
_MOST_ENTRIES = 4_000_000


def record(arguments: list[str]) -> NoReturn:
    """In a rank: as the worker, with the allocator's history from the beginning. Never returns."""
    import torch
    import torch.cuda.memory as memory

    import llmtop.profiler.probes.training as training
    import llmtop.trainer.worker.__main__ as worker

    # The probes' own recording would end this one.
    vars(training)["is_classified"] = lambda step, every, first_step=1: False
    history: Any = memory._record_memory_history
    history("all", context=None, stacks="python", max_entries=_MOST_ENTRIES)
    leave = worker._leave

    def dump_and_leave(code: int) -> NoReturn:
        if os.environ.get("RANK") == "0":
            traces: Any = memory._snapshot()["device_traces"]
            save(Path(arguments[0]) / _FILE, traces[torch.cuda.current_device()])
        leave(code)

    worker._leave = dump_and_leave
    worker.main(arguments)


def save(path: Path, entries: list[dict[str, Any]]) -> None:
    """Columns: action, size, address, stream, microseconds."""
    kept = [entry for entry in entries if entry["action"] in ACTIONS]
    numpy.savez_compressed(
        path,
        action=numpy.array([ACTIONS.index(entry["action"]) for entry in kept], dtype=numpy.uint8),
        size=numpy.array([entry["size"] for entry in kept], dtype=numpy.uint64),
        address=numpy.array([entry["addr"] for entry in kept], dtype=numpy.uint64),
        stream=numpy.array([entry["stream"] for entry in kept], dtype=numpy.uint64),
        time_us=numpy.array([entry["time_us"] for entry in kept], dtype=numpy.int64),
    )


def replay(columns: Any) -> dict[str, int]:
    """Held by torch and by our pool, at most and at the end, in bytes."""
    pool = Pool()
    blocks: dict[int, Block] = {}
    held = peak = unknown = 0
    before = ""
    rows = zip(*(columns[name].tolist() for name in ("action", "size", "address", "stream")), strict=True)
    for action, size, address, stream in rows:
        name = ACTIONS[action]
        match name:
            case "alloc":
                pool.on_stream(stream)
                blocks[address] = pool.allocate(size)
            case "free_completed":
                block = blocks.pop(address, None)
                unknown += block is None
                if block is not None:
                    pool.free(block)
            case "segment_alloc":
                held += size
                peak = max(peak, held)
            case "segment_free":
                held -= size
                if before != name:  # one call of `empty_cache` frees several
                    pool.release_cached()
        before = name
    return {
        "held_bytes": held,
        "peak_held_bytes": peak,
        "pool_held_bytes": pool.reserved_bytes,
        "pool_peak_held_bytes": pool.peak_reserved_bytes,
        "peak_allocated_bytes": pool.peak_allocated_bytes,
        "frees_of_unknown": unknown,
    }


def check(folder: Path) -> str:
    lines = []
    for path in sorted(folder.glob("*.npz")):
        found = replay(numpy.load(path))
        error = found["pool_peak_held_bytes"] / max(1, found["peak_held_bytes"]) - 1
        lines.append(f"{path.name}: pool off by {100 * error:+.2f} % of torch's, {json.dumps(found)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", type=Path, help="a file of cells")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="only compare what was recorded")
    add_options(parser, Path("alloctraces"))
    options = parser.parse_args()
    if options.check is not None:
        print(check(options.check))
        return
    cells: list[Cell] = [json.loads(line) for line in options.cells.read_text().splitlines() if line.strip()]
    options.out.mkdir(parents=True, exist_ok=True)
    left = time_left(options)
    with runner(options) as run:
        for cell in of_part(cells, options)[: options.limit]:
            seconds = left.seconds_for_a_run()
            name = hashlib.sha256(key_of(cell).encode()).hexdigest()[:12]
            if seconds is None or (options.out / f"{name}.npz").exists():
                continue
            carried = run.forked(run.plan(cell, name="alloctrace"), seconds, entry=ENTRY)
            recorded = carried.run.path / _FILE
            if recorded.exists():
                (options.out / f"{name}.npz").write_bytes(recorded.read_bytes())
            row: Row = {"cell": cell, "file": f"{name}.npz", "recorded": recorded.exists()}
            with (options.out / "cells.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    print(check(options.out))


if __name__ == "__main__":
    run_main(main)
