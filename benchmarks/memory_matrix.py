"""Predicted against measured memory over many configurations, each in fresh processes.

    python -m benchmarks.memory_matrix --design 1 --gpus 1 --jobs 4 --minutes 8
    python -m benchmarks.memory_matrix --cells CELLS.jsonl
    python -m benchmarks.memory_matrix --cells benchmarks/held_out_many.jsonl --gpus 8 --jobs 4
    python -m benchmarks.memory_matrix --list --design 1 --gpus 2
    python -m benchmarks.memory_matrix --summary benchmarks/results/memory_h200.jsonl

Cells come from the seeded design or from a file with one JSON object of run options a line. A cell that
the results already have is skipped, so an interrupted matrix goes on where it stopped. With several jobs
the device readings mix: then the device's bytes are those that the driver names for the run's own processes.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from benchmarks.admission import PAGED
from benchmarks.design import COUNTS, Drawn, counts, designed
from benchmarks.rows import Cell, read_rows
from benchmarks.session import RESULTS, add_options, run_all, run_main, runner
from benchmarks.summary import repredicted, summary


def cells_of(options: argparse.Namespace) -> list[Cell]:
    if options.cells is not None:
        lines = options.cells.read_text().splitlines()
        cells = [json.loads(line) for line in lines if line.strip()]
        return [cell for cell in cells if options.gpus in (None, cell.get("gpus", 1))]
    cells = [drawn.cell for drawn in _designed(options)]
    # Those that nothing may run beside wait for the end, so that the others need not stop for them.
    return sorted(cells, key=lambda cell: str(cell.get("optimizer")).startswith(PAGED))


def _designed(options: argparse.Namespace) -> list[Drawn]:
    return designed(options.design, options.gpus or 1, on_cpu=options.cpu)


def listing(drawn: list[Drawn]) -> str:
    lines = [f"{each.origin:<14}{json.dumps(each.cell)}" for each in drawn]
    lines.append(f"{len(drawn)} cells")
    by_axis: dict[str, list[str]] = {}
    for (axis, level), count in counts(drawn).items():
        by_axis.setdefault(axis, []).append(f"{level} {count}")
    return "\n".join([*lines, *(f"{axis}: {', '.join(levels)}" for axis, levels in by_axis.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--design", type=int, metavar="SEED", help="the built-in design")
    source.add_argument("--cells", type=Path, help="a file of cells")
    source.add_argument("--summary", type=Path, metavar="FILE", help="only say what a file of rows holds")
    parser.add_argument(
        "--repredict", action="store_true", help="with --summary: judge what is predicted today (H200 rows)"
    )
    parser.add_argument(
        "--gpus", type=int, choices=COUNTS, help="the design's cells for so many (default 1), or a file's"
    )
    parser.add_argument("--list", action="store_true", help="show the design and run nothing")
    add_options(parser, RESULTS / "memory_h200.jsonl")
    options = parser.parse_args()
    if options.summary is not None:
        rows = read_rows(options.summary)
        print(summary(repredicted(rows) if options.repredict else rows))
        return
    if options.list and options.design is not None:
        print(listing(_designed(options)))
        return
    facts = {"design_seed": options.design, "mode": "supervised" if options.supervised else "forked"}
    if options.cpu and options.cells is None:
        facts["space"] = "cpu"
    with runner(options) as run:
        run_all(cells_of(options), options, partial(run.row, name="matrix"), facts=facts)


if __name__ == "__main__":
    run_main(main)
