"""The recorded H200 runs as run specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import RunSpec, ValueSource

ROWS: tuple[dict[str, Any], ...] = tuple(
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "h200-memory.jsonl").read_text().splitlines()
)
_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "memory_matrix.jsonl"
MATRIX: tuple[dict[str, Any], ...] = tuple(json.loads(line) for line in _RESULTS.read_text().splitlines())
"""Runs of `benchmarks/memory_matrix.py` that completed."""
OPTIMIZERS = {"adamw8bit": "adamw_8bit", "paged_adamw8bit": "paged_adamw_8bit", "torch": "adamw_torch"}
MACHINE = Machine(gpu="h200", gpus=1, host_memory_bytes=None)


def spec_of(row: dict[str, Any]) -> RunSpec:
    cell = row["cell"]
    values: dict[str, Any] = {
        "model": cell["model"],
        "gpu": "h200",
        "gpus": row["world"],
        "zero": cell["stage"],
        "micro_batch": cell["mb"],
        "seq_len": cell["seq"],
        "precision": cell.get("prec", "bf16"),
        "attention": cell.get("attn", "sdpa"),
        "optimizer": OPTIMIZERS.get(cell.get("opt", "adamw"), "adamw"),
        "grad_accum": cell.get("ga", 1),
        "liger": bool(cell.get("liger")),
        "gradient_checkpointing": bool(cell.get("ckpt")),
        "checkpointing_reentrant": bool(cell.get("reentrant")),
        "offload_optimizer": "cpu" if cell.get("off_opt") else "none",
        "lora_rank": cell.get("lora", 0),
        "quantization": "nf4" if cell.get("q4") else "none",
    }
    return resolve(
        [Layer(source=ValueSource.COMMAND_LINE, detail="recorded", values=values)],
        name="recorded",
        machine=MACHINE,
    )


def name_of(row: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in row["cell"].items()) + f" x{row['world']}"


def measured_peak_bytes(row: dict[str, Any]) -> int:
    return max(int(phase[key]) for phase in row["phases"] for key in ("fwd_peak", "bwd_peak", "step_peak"))
