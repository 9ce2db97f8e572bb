"""The section of `docs/techniques.md` on training in 8 and 4 bits: runs that differ in nothing else."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.rows import Row
from llmtop.profiler.units import format_bytes


class Mode(NamedTuple):
    """A way of training, by the options that make it, and the recipe that has it."""

    name: str
    options: dict[str, object]
    recipe: str


MODES = (
    Mode("every weight, AdamW in 32 bits", {"optimizer": "adamw"}, "full-zero2"),
    Mode("every weight, AdamW in 8 bits", {"optimizer": "adamw_8bit"}, "full-adam-8bit"),
    Mode("LoRA on a base in bf16", {"optimizer": "adamw", "lora_rank": 16}, "lora"),
    Mode(
        "LoRA on a base in 8 bits",
        {"optimizer": "adamw", "lora_rank": 16, "quantization": "int8"},
        "lora-int8",
    ),
    Mode(
        "LoRA on a base in 4 bits",
        {"optimizer": "adamw", "lora_rank": 16, "quantization": "nf4"},
        "qlora-nf4",
    ),
    Mode("every weight, rounding to 4 bits", {"optimizer": "adamw", "qat": "int8-int4"}, "qat-int8-int4"),
)
_CHOSEN = ("optimizer", "lora_rank", "quantization", "qat", "qat_group")
_FEWEST = 3
"""Modes of one setting that are worth a table."""


def section(rows: Sequence[Row]) -> list[str]:
    """Paragraphs; none where no setting was measured in several modes."""
    tables = [_table(setting, found) for setting, found in _settings(rows)]
    if not tables:
        return []
    return [
        "## Training in 8 and 4 bits",
        "Runs of the memory design (`benchmarks/results/memory_h200.jsonl`) that differ in nothing else;"
        " what was not measured on a GPU is not in the table. Speed is not told: other runs shared the"
        " device. What the modes are, and when to take which: "
        "[weights.md](weights.md#training-in-8-and-4-bits).",
        *tables,
    ]


def _settings(rows: Sequence[Row]) -> list[tuple[Row, dict[str, Row]]]:
    """What the runs have in common, and the mode's name to its run; the most modes first."""
    groups: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cell = row["cell"]
        mode = _mode_of(cell)
        if row["status"] == "completed" and mode is not None and _peak(row):
            common = {key: value for key, value in cell.items() if key not in _CHOSEN}
            groups[json.dumps(common, sort_keys=True)][mode.name] = row
    told = [(json.loads(key), found) for key, found in groups.items() if len(found) >= _FEWEST]
    return sorted(told, key=lambda one: (-len(one[1]), str(one[0]["model"])))


def _mode_of(cell: Row) -> Mode | None:
    chosen = {key: cell[key] for key in _CHOSEN if key in cell}
    return next((mode for mode in MODES if mode.options == chosen), None)


def _table(setting: Row, found: dict[str, Row]) -> str:
    batch = f"{setting['micro_batch']} x {setting['seq_len']:,} tokens"
    head = f"{setting['model']}, ZeRO-{setting['zero']}, {batch}, {setting['attention']}"
    lines = [
        f"| {head}{', Liger' if setting.get('liger') else ''} | peak | between steps | recipe |",
        "|---|---|---|---|",
    ]
    for mode in MODES:
        row = found.get(mode.name)
        if row is not None:
            figures = (format_bytes(_peak(row)), format_bytes(_between(row)))
            lines.append(f"| {mode.name} | {figures[0]} | {figures[1]} | `{mode.recipe}` |")
    return "\n".join(lines)


def _peak(row: Row) -> int | None:
    peaks = [peak for rank in _ranks(row) for peak in rank["largest"].values() if peak]
    return max(peaks, default=None)


def _between(row: Row) -> int | None:
    """Allocated when the optimizer has stepped."""
    held = [rank["peaks"]["optimizer"][0] for rank in _ranks(row) if "optimizer" in rank["peaks"]]
    return max(held, default=None)


def _ranks(row: Row) -> list[Row]:
    ranks: list[Row] = row.get("measured", {}).get("ranks", [])
    return ranks
