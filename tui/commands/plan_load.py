"""`plan --load`: what a model needs to be loaded and asked, at each precision."""

from __future__ import annotations

from typing import Any

from llmtop.presets import catalog
from llmtop.presets.spec import GpuSpec, RunSpec
from llmtop.profiler.cost.where import gpu_names
from llmtop.profiler.memory.loading import PROMPT_TOKENS, Loaded, loaded
from llmtop.profiler.units import counted, format_bytes
from llmtop.tui.commands.output import WIDTH, table, wrapped

ASSUMED = (
    f"one GPU holds the whole model; keys and values in 16 bits; prompts are read {PROMPT_TOKENS} tokens at a"
    " time; int8 and nf4 by bitsandbytes, gguf by llama.cpp, whose files hold some MB of vocabulary more"
)


def load_answer(spec: RunSpec, context: int, requests: int) -> dict[str, Any]:
    """The same as data."""
    rows = loaded(spec.model, context=context, requests=requests)
    return {
        "model": spec.model.name,
        "gpu": spec.gpu.name,
        "gpu_memory_bytes": spec.gpu.memory_bytes,
        "context": context,
        "requests": requests,
        "forms": [_row(row, spec.gpu) for row in rows],
        "assumptions": [ASSUMED],
    }


def load_text(spec: RunSpec, context: int, requests: int, width: int = WIDTH) -> str:
    """A row for each precision, with the smallest GPUs that hold it."""
    rows = loaded(spec.model, context=context, requests=requests)
    gpus = _by_memory()
    tokens = f"{context:,} tokens kept"
    head = f"{spec.model.name}, loaded with {tokens} for {counted(requests, 'request')}"
    cells = [["weights as", "weights", "cache", "other", "in all", f"on {spec.gpu.name}", "smallest GPUs"]]
    cells += [
        [
            row.form,
            *map(format_bytes, (row.weights_bytes, row.cache_bytes, row.other_bytes, row.total_bytes)),
            _fits_word(row, spec.gpu),
            ", ".join(_smallest(row, gpus)) or "none",
        ]
        for row in rows
    ]
    lines = table(cells, right=(1, 2, 3, 4))
    if max(map(len, lines)) > width:
        lines = table([row[:-1] for row in cells], right=(1, 2, 3, 4))
    return "\n".join([*wrapped(head, "", width), "", *lines, "", *wrapped(ASSUMED, "", width)])


def _row(row: Loaded, gpu: GpuSpec) -> dict[str, Any]:
    memory = gpu.memory_bytes
    return {
        "form": row.form,
        "weights_bytes": row.weights_bytes,
        "cache_bytes": row.cache_bytes,
        "other_bytes": row.other_bytes,
        "total_bytes": row.total_bytes,
        "fits": None if memory is None else row.total_bytes <= memory,
    }


def _fits_word(row: Loaded, gpu: GpuSpec) -> str:
    if gpu.memory_bytes is None:
        return "n/a"
    return "fits" if row.total_bytes <= gpu.memory_bytes else "does not fit"


def _by_memory() -> list[GpuSpec]:
    known = [gpu for gpu in map(catalog.load_gpu, gpu_names()) if gpu.memory_bytes is not None]
    return sorted(known, key=lambda gpu: (gpu.memory_bytes or 0, gpu.name))


def _smallest(row: Loaded, gpus: list[GpuSpec], most: int = 3) -> list[str]:
    return [gpu.name for gpu in gpus if (gpu.memory_bytes or 0) >= row.total_bytes][:most]
