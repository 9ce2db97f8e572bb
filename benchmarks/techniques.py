"""What each technique buys: peak memory and tokens a second, one technique after the other, by length.

    python -m benchmarks.techniques --gpus 1 --minutes 8
    python -m benchmarks.techniques --document

A run that does not fit is a row as well. `--document` writes `docs/techniques.md` and its plots from the
rows, and refuses while one that a claim rests on is missing; the ladder's say so.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from benchmarks.cells import Runner
from benchmarks.rows import Cell, Row, read_rows
from benchmarks.series import cells, cpu_cells
from benchmarks.session import RESULTS, add_options, run_all, run_main, runner
from benchmarks.techniques_doc import write_document

MEMORY = RESULTS / "memory_h200.jsonl"
DOCS = Path(__file__).resolve().parents[1] / "docs"


def row_of(cell: Cell, seconds: float, run: Runner) -> Row:
    """The few figures that the document needs."""
    options = {key: value for key, value in cell.items() if key not in ("series", "name")}
    row = run.row(options, seconds, name="techniques")
    kept: Row = {"cell": cell}
    for key in ("status", "reason", "device", "versions", "wall_seconds", "tokens_per_second"):
        kept[key] = row.get(key)
    measured = row.get("measured", {})
    ranks = measured.get("ranks", [])
    peaks = [peak for rank in ranks for peak in rank["largest"].values() if peak]
    steady = [rank["peaks"]["optimizer"][0] for rank in ranks if "optimizer" in rank["peaks"]]
    predicted = row.get("predicted", {})
    return {
        **kept,
        "peak_allocated_bytes": max(peaks, default=None) if row["status"] == "completed" else None,
        "steady_bytes": max(steady, default=None),
        "device_bytes": measured.get("device_bytes") or measured.get("own_device_bytes"),
        "predicted_peak_allocated_bytes": predicted.get("peak_allocated_bytes"),
        "predicted_fits": predicted.get("fits"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--document", action="store_true", help="only write docs/techniques.md from the rows")
    add_options(parser, RESULTS / "techniques.jsonl")
    options = parser.parse_args()
    if options.document:
        for path in write_document(read_rows(options.out), DOCS, read_rows(MEMORY)):
            print(path)
        return
    wanted = cpu_cells() if options.cpu else cells(options.gpus)
    with runner(options) as run:
        run_all(wanted, options, partial(row_of, run=run))


if __name__ == "__main__":
    run_main(main)
