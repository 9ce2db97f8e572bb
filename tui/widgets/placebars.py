"""Whether a plan fits where it would run: a bar for each GPU, with what others have of it, and the host's."""

from __future__ import annotations

from collections.abc import Sequence

from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware.gpuuse import GpuUse
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.units import counted, format_bytes
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import fit, gauge, used_of

_LABEL_CELLS = 8
_MARK_CELLS = 2
_LEAST_BAR_CELLS = 6
MOST_BARS = 4
_IDLE_SHARE = 0.02
"""Of a GPU's memory: what its driver keeps where nobody uses it."""


def gpu_bars(prediction: Prediction, gpus: Sequence[GpuUse], width: int) -> list[Content]:
    """One for each GPU that others use; those that nobody uses share one."""
    need, limit = prediction.needed_bytes, prediction.device_memory_bytes
    if need is None or limit is None or not gpus:
        return []
    busy = [gpu for gpu in gpus if _others_bytes(gpu)]
    idle = len(gpus) - len(busy)
    rows = []
    if idle:
        label = f"GPU{gpus[0].index}" if len(gpus) == 1 else "each"
        rows.append(_bar(label, need, 0, limit, width))
    shown = busy[: MOST_BARS - len(rows)]
    for gpu in shown:
        rows.append(_bar(f"GPU{gpu.index}", need, _others_bytes(gpu), gpu.memory_total_bytes or limit, width))
    if len(busy) > len(shown):
        more = counted(len(busy) - len(shown), "GPU")
        rows.append(Content.styled(f"{more} more in use: d shows them", "$muted"))
    return rows


def crowded(prediction: Prediction, gpus: Sequence[GpuUse]) -> tuple[GpuUse, ...]:
    """Those that others use so much of that the plan has no room beside them."""
    need, limit = prediction.needed_bytes, prediction.device_memory_bytes
    if need is None or limit is None or need > limit:
        return ()
    return tuple(gpu for gpu in gpus if need + _others_bytes(gpu) > (gpu.memory_total_bytes or limit))


def crowded_words(prediction: Prediction, gpus: Sequence[GpuUse]) -> tuple[str, ...]:
    """A sentence for each of them."""
    need = format_bytes(prediction.needed_bytes)
    return tuple(
        f"GPU{gpu.index} has {format_bytes(_others_bytes(gpu))} in use by others: the run needs up to {need}"
        f" of {format_bytes(gpu.memory_total_bytes)}"
        for gpu in crowded(prediction, gpus)
    )


def _others_bytes(gpu: GpuUse) -> int:
    """What is in use now; nothing where it is no more than a driver keeps."""
    used, total = gpu.memory_used_bytes or 0, gpu.memory_total_bytes or 0
    return used if used > _IDLE_SHARE * total else 0


def _bar(label: str, need: int, others: int, limit: int, width: int) -> Content:
    fits = need + others <= limit
    mark, style = ("✓ ", "$text-success") if fits else ("✗ ", "$text-error")
    numbers = used_of(need + others, limit)
    told = f"{format_bytes(others)} in use  {numbers}"
    taken = _LABEL_CELLS + _MARK_CELLS + 1
    if others and width - taken - len(told) >= _LEAST_BAR_CELLS:
        numbers = told
    room = width - taken - len(numbers)
    bar = gauge(need / limit, room, others=others / limit) if room >= _LEAST_BAR_CELLS else Content("")
    return Content.assemble((fit(label, _LABEL_CELLS), "$muted"), (mark, style), bar, " ", numbers)


def host_bar(prediction: Prediction, machine: Machine | None, width: int) -> Content | None:
    """Against this machine's memory; None where that is not known, or the plan is for another."""
    limit = machine.host_memory_bytes if machine is not None else None
    if not limit:
        return None
    need = prediction.host_bytes
    mark, style = ("✓ ", "$text-success") if need <= limit else ("✗ ", "$text-error")
    numbers = used_of(need, limit)
    room = width - _LABEL_CELLS - _MARK_CELLS - len(numbers) - 1
    if room < _LEAST_BAR_CELLS:
        return None
    bar = gauge(need / limit, room)
    return Content.assemble((fit("host", _LABEL_CELLS), "$muted"), (mark, style), bar, " ", numbers)
