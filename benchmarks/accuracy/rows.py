"""The measured rows that the accuracy is told from, all in the form of the memory matrix."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from benchmarks.accuracy.split import SEED, Half, half_of, listed_many
from benchmarks.design import design
from benchmarks.rows import Cell, Row, key_of, read_rows
from benchmarks.summary import outcome, repredicted

_RESULTS = Path(__file__).parents[1] / "results"
DESIGN_ROWS = _RESULTS / "memory_h200.jsonl"
EARLIER_ROWS = _RESULTS / "memory_matrix.jsonl"
FIRST_ROWS = Path(__file__).parents[2] / "tests" / "data" / "h200-memory.jsonl"
_FIRST_OPTIMIZERS = {"adamw8bit": "adamw_8bit", "paged_adamw8bit": "paged_adamw_8bit", "torch": "adamw_torch"}
BLIND_FROM = 42
"""Rows of the results from here on carry the prediction that the formulas made before they were measured."""
_UNREACHABLE_SCALE_POWER = 32
_INT8_GPUS = 2
"""Those on one GPU were measured again after the mend."""
SET_ASIDE = {
    "int8": "measured on two GPUs while the trainer held 8-bit weights in 16 bits before the first forward",
    "unstepped": "a loss scale of 2^32 skipped every step, so no optimizer state was ever made",
}
"""Completed rows that do not tell of the program of today, and why."""


class Sourced(Struct, frozen=True, kw_only=True):
    """A completed row with today's prediction, and the half that it belongs to."""

    row: Row
    half: Half
    earlier: bool
    """Recorded before the design: it served to write the formulas."""


class Coverage(Struct, frozen=True, kw_only=True):
    """How much of the design has been measured."""

    cells: int
    measured: int
    held_out_cells: int
    held_out_measured: int
    not_completed: tuple[tuple[str, Cell, str], ...]
    """Status, cell and reason of rows that ended otherwise."""
    many_cells: int
    """Those on four and eight GPUs, which are not among `cells`."""
    many_measured: int
    set_aside: tuple[tuple[str, int, float], ...]
    """Why completed rows are not scored, how many, and by how many percent their peaks were off at most."""


def aside(row: Row) -> str | None:
    """The key of `SET_ASIDE` that a completed row falls under."""
    cell = row["cell"]
    if cell.get("quantization") == "int8" and cell.get("gpus") == _INT8_GPUS:
        return "int8"
    scale = cell.get("deepspeed", {}).get("fp16", {}).get("initial_scale_power", 0)
    return "unstepped" if scale >= _UNREACHABLE_SCALE_POWER else None


def completed(first: int = 0) -> list[Row]:
    """The completed rows of the results, from the `first` on, that tell of today's program, as written."""
    rows = [row for row in read_rows(DESIGN_ROWS)[first:] if row["status"] == "completed"]
    return [row for row in rows if aside(row) is None]


def blind() -> list[Sourced]:
    """Rows with the prediction that was made before their run, by formulas that did not know them."""
    return [_of_design(row) for row in completed(BLIND_FROM)]


def sourced() -> list[Sourced]:
    """All completed rows, those of the design first."""
    earlier = [row for row in read_rows(EARLIER_ROWS) if row["status"] == "completed"] + first_rows()
    found = [_of_design(row) for row in repredicted(completed())]
    return found + [Sourced(row=row, half=Half.TUNED, earlier=True) for row in repredicted(earlier)]


def _of_design(row: Row) -> Sourced:
    return Sourced(row=row, half=half_of(row["cell"]), earlier=False)


def coverage() -> Coverage:
    """Of the design as it is drawn today."""
    rows = read_rows(DESIGN_ROWS)
    finished = [row for row in rows if row["status"] == "completed"]
    done = {key_of(row["cell"]) for row in finished}
    cells = {key_of(drawn.cell) for gpus in (1, 2) for drawn in design(SEED, gpus)}
    held_out = {key for key in cells if half_of(json.loads(key)) == Half.HELD_OUT}
    many = {key_of(cell) for cell in listed_many()}
    return Coverage(
        cells=len(cells),
        measured=len(done & cells),
        held_out_cells=len(held_out),
        held_out_measured=len(done & held_out),
        not_completed=tuple(
            (row["status"], row["cell"], str(row.get("reason") or ""))
            for row in rows
            if row["status"] != "completed"
        ),
        many_cells=len(many),
        many_measured=len(done & many),
        set_aside=tuple(_set_aside(finished)),
    )


def _set_aside(rows: Sequence[Row]) -> Iterator[tuple[str, int, float]]:
    for key, why in SET_ASIDE.items():
        found = [seen for row in rows if aside(row) == key and (seen := outcome(row)) is not None]
        if found:
            yield why, len(found), max(abs(seen.peak_percent) for seen in found)


def first_rows() -> list[Row]:
    """The runs that were made before there was a program, in the form of the others."""
    return [_first_row(json.loads(line)) for line in FIRST_ROWS.read_text().splitlines()]


def _first_row(row: Row) -> Row:
    phases = {
        name: max(phase[f"{key}_peak"] for phase in row["phases"])
        for name, key in (("forward", "fwd"), ("backward", "bwd"), ("optimizer", "step"))
    }
    rank = {"rank": 0, "largest": phases, "reserved": row["reserved_peak"], "step_seconds": [row["step_s"]]}
    return {
        "cell": first_cell(row["cell"], row["world"]),
        "status": "completed",
        "alone": True,
        "measured": {"ranks": [rank], "device_bytes": {"0": row["nvml_used"]}},
    }


def first_cell(cell: Row, world: int) -> Cell:
    """The options of such a run in today's words."""
    return {
        "model": cell["model"],
        "gpus": world,
        "zero": cell["stage"],
        "micro_batch": cell["mb"],
        "seq_len": cell["seq"],
        "precision": cell.get("prec", "bf16"),
        "attention": cell.get("attn", "sdpa"),
        "optimizer": _FIRST_OPTIMIZERS.get(cell.get("opt", "adamw"), "adamw"),
        "grad_accum": cell.get("ga", 1),
        "liger": bool(cell.get("liger")),
        "gradient_checkpointing": bool(cell.get("ckpt")),
        "checkpointing_reentrant": bool(cell.get("reentrant")),
        "offload_optimizer": "cpu" if cell.get("off_opt") else "none",
        "lora_rank": cell.get("lora", 0),
        "quantization": "nf4" if cell.get("q4") else "none",
    }
