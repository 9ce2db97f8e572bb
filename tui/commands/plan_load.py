"""`plan --load`: what a model needs to be loaded, at each precision."""

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

_SMALLEST = ((3, "smallest GPUs"), (1, "smallest GPU"))
"""How many are named, as there is room."""


def load_answer(spec: RunSpec, context: int, requests: int) -> dict[str, Any]:
    """The same as data."""
    rows = loaded(spec.model, context=context, requests=requests)
    gpus = _by_memory()
    return {
        "model": spec.model.name,
        "gpu": spec.gpu.name,
        "gpu_memory_bytes": spec.gpu.memory_bytes,
        "context": context,
        "requests": requests,
        "forms": [_row(row, spec.gpu, gpus) for row in rows],
        "assumptions": [ASSUMED],
    }


def load_text(spec: RunSpec, context: int, requests: int, width: int = WIDTH) -> str:
    """A row for each precision, with the smallest GPUs that hold it."""
    rows = loaded(spec.model, context=context, requests=requests)
    lines = [*wrapped(load_head(spec, context, requests), "", width), "", *load_table(spec.gpu, rows, width)]
    best = [*wrapped(best_words(rows), "", width), ""]
    return "\n".join([*lines, "", *best, *wrapped(ASSUMED, "", width)])


def load_head(spec: RunSpec, context: int, requests: int) -> str:
    tokens = f"{context:,} tokens kept"
    made_for = spec.model.max_positions
    beyond = f"; it was made for {made_for:,} positions" if made_for and context > made_for else ""
    return f"{spec.model.name}, loaded with {tokens} for {counted(requests, 'request')}{beyond}"


def load_table(gpu: GpuSpec, rows: tuple[Loaded, ...], width: int) -> list[str]:
    """Its head, then a line for each precision; what has no room is left out from the right."""
    gpus = _by_memory()
    heads = ["weights as", "weights", "cache", "other", "in all", f"on {gpu.name}"]
    cells = [
        [
            row.form,
            *map(format_bytes, (row.weights_bytes, row.cache_bytes, row.other_bytes, row.total_bytes)),
            _fits_word(row, gpu),
        ]
        for row in rows
    ]
    for most, head in _SMALLEST:
        named = [[", ".join(_smallest(row, gpus, most)) or "none"] for row in rows]
        told = [[*heads, head], *([*row, *names] for row, names in zip(cells, named, strict=True))]
        lines = table(told, right=(1, 2, 3, 4))
        if max(map(len, lines)) <= width:
            return lines
    return table([heads, *cells], right=(1, 2, 3, 4))


def best_words(rows: tuple[Loaded, ...]) -> str:
    """Of each precision the GPUs on which it is the largest that fits, those with least memory last."""
    by_form: dict[str, list[str]] = {}
    for gpu in reversed(_by_memory()):
        largest = next((row.form for row in rows if fits(row, gpu)), "nothing")
        by_form.setdefault(largest, []).append(gpu.name)
    told = "; ".join(f"{form} on {', '.join(names)}" for form, names in by_form.items())
    return f"the largest that fits: {told}"


def _row(row: Loaded, gpu: GpuSpec, gpus: list[GpuSpec]) -> dict[str, Any]:
    return {
        "form": row.form,
        "weights_bytes": row.weights_bytes,
        "cache_bytes": row.cache_bytes,
        "other_bytes": row.other_bytes,
        "total_bytes": row.total_bytes,
        "fits": fits(row, gpu),
        "fits_on": _smallest(row, gpus, len(gpus)),
    }


def fits(row: Loaded, gpu: GpuSpec) -> bool | None:
    """None where the GPU's memory is not known."""
    return None if gpu.memory_bytes is None else row.total_bytes <= gpu.memory_bytes


def _fits_word(row: Loaded, gpu: GpuSpec) -> str:
    return {None: "n/a", True: "fits", False: "does not fit"}[fits(row, gpu)]


def _by_memory() -> list[GpuSpec]:
    known = [gpu for gpu in map(catalog.load_gpu, gpu_names()) if gpu.memory_bytes is not None]
    return sorted(known, key=lambda gpu: (gpu.memory_bytes or 0, gpu.name))


def _smallest(row: Loaded, gpus: list[GpuSpec], most: int) -> list[str]:
    return [gpu.name for gpu in gpus if (gpu.memory_bytes or 0) >= row.total_bytes][:most]
