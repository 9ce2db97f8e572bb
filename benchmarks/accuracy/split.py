"""Which cells the formulas may be mended with (`tuned`) and which only judge them (`held-out`).

    python -m benchmarks.accuracy.split --write
    python -m benchmarks.accuracy.split --write-many

The half is decided by the cell alone. Held out are runs on more than one GPU, lengths above the longest of
the other half (up to four times it), and whole families. The design's held-out cells stand in
`held_out.jsonl`, committed before any of the design's rows served to mend a formula; a test holds its
SHA-256. Rows recorded before the design (which served to write the formulas) count as tuned, all of them.

The cells on four and eight GPUs have a list of their own, `held_out_many.jsonl`: by the same rule all of them
are held out, and it was committed before any of them had run. What is run is the list, so a formula that is
mended later changes nothing about which cells there are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from benchmarks.design import MANY_COUNTS, design, designed
from benchmarks.rows import Cell, key_of
from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import ValueSource

SEED = 1
"""Of the design whose cells are listed."""
LONGEST_TUNED = 8192
TUNED_FAMILIES = frozenset({"llama", "qwen2", "qwen3", "gemma2", "gpt2"})
"""Held out are mistral, of which the runs that served to write the formulas have none, gpt_neox, of which
they have one, and every family that is named nowhere."""
LISTED = Path(__file__).parents[1] / "held_out.jsonl"
LISTED_MANY = LISTED.with_name("held_out_many.jsonl")
_DEFAULT_LENGTH = 2048


class Half(StrEnum):
    TUNED = "tuned"
    HELD_OUT = "held-out"


def half_of(cell: Cell) -> Half:
    """The same for the same cell, whatever is predicted or measured of it."""
    return Half.HELD_OUT if reasons(cell) else Half.TUNED


def reasons(cell: Cell) -> tuple[str, ...]:
    """Why a cell is held out; empty for one of the tuned half."""
    found: list[str] = []
    if cell.get("gpus", 1) > 1:
        found.append("GPUs")
    if cell.get("seq_len", _DEFAULT_LENGTH) > LONGEST_TUNED:
        found.append("length")
    if family_of(str(cell["model"])) not in TUNED_FAMILIES:
        found.append("family")
    return tuple(found)


@lru_cache(maxsize=256)
def family_of(model: str) -> str:
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="cell", values={"model": model, "gpu": "h200"})
    machine = Machine(gpu="h200", gpus=1, host_memory_bytes=None)
    return resolve([layer], name="family", machine=machine).model.family


def held_out_text() -> str:
    """The design's held-out cells, a line each, in an order that does not depend on the drawing."""
    keys = {key_of(drawn.cell) for gpus in (1, 2) for drawn in design(SEED, gpus)}
    return "".join(f"{key}\n" for key in sorted(keys) if half_of(json.loads(key)) == Half.HELD_OUT)


def held_out_many_text() -> str:
    """The cells on four and eight GPUs, a line each, in the order in which they are to be run."""
    return "".join(f"{key_of(drawn.cell)}\n" for gpus in MANY_COUNTS for drawn in designed(SEED, gpus))


def listed_many() -> list[Cell]:
    return [json.loads(line) for line in LISTED_MANY.read_text().splitlines()]


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write the list anew")
    parser.add_argument("--write-many", action="store_true", help="that of four and eight GPUs")
    options = parser.parse_args()
    if options.write:
        LISTED.write_text(held_out_text())
    if options.write_many:
        LISTED_MANY.write_text(held_out_many_text())
    for path in (LISTED, LISTED_MANY):
        print(f"{sha256_of(path)}  {path.name}: {len(path.read_text().splitlines())} cells")


if __name__ == "__main__":
    main()
