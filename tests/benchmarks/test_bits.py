"""The table of training in 8 and 4 bits is made of measured rows, and the document has it as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.bits import MODES, section
from benchmarks.rows import read_rows
from llmtop.presets import catalog

ROOT = Path(__file__).parents[2]
GIB = 2**30


def row(peak_gib: float, **options: Any) -> dict[str, Any]:
    cell = {"model": "m", "zero": 2, "micro_batch": 1, "seq_len": 2048, "attention": "sdpa", **options}
    rank = {"largest": {"forward": int(peak_gib * GIB)}, "peaks": {"optimizer": [GIB, 2 * GIB]}}
    return {"cell": cell, "status": "completed", "measured": {"ranks": [rank]}}


def test_runs_that_differ_in_nothing_else_are_put_beside_each_other() -> None:
    rows = [
        row(10, optimizer="adamw"),
        row(8, optimizer="adamw_8bit"),
        row(3, optimizer="adamw", lora_rank=16, quantization="nf4"),
        row(99, optimizer="adamw", seq_len=4096),
        {**row(77, optimizer="adamw", lora_rank=16), "status": "failed"},
    ]
    text = "\n".join(section(rows))
    assert "| every weight, AdamW in 8 bits | 8.00 GiB | 1.00 GiB | `full-adam-8bit` |" in text
    assert "99.0" not in text and "77.0" not in text and "bf16 |" not in text
    assert section(rows[:2]) == []


def test_the_document_has_the_tables_of_the_rows_that_there_are() -> None:
    rows = read_rows(ROOT / "benchmarks" / "results" / "memory_h200.jsonl")
    paragraphs = section(rows)
    assert len(paragraphs) > 2
    assert "\n\n".join(paragraphs) in (ROOT / "docs" / "techniques.md").read_text()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.recipe)
def test_each_mode_has_a_recipe_with_its_options(mode: Any) -> None:
    values = catalog.load_recipe(mode.recipe).values
    told = {key: values.get(key) for key in mode.options if key != "optimizer"}
    assert told == {key: value for key, value in mode.options.items() if key != "optimizer"}
    assert ("8bit" in str(values["optimizer"])) == (
        "8bit" in str(mode.options["optimizer"]) or "nf4" in told.values()
    )
