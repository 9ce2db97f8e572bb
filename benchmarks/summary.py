"""What a file of memory rows says: errors of the prediction, overall and by stratum; unexplained bytes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from benchmarks.cells import plan, predicted_row
from benchmarks.rows import Row
from benchmarks.stats import percentile
from llmtop.presets.resolve import Machine
from llmtop.profiler.memory.allocator import DRIVER_RESERVE_BYTES

_BANDS = ((1024, "up to 1k"), (4096, "to 4k"), (16384, "to 16k"))


class Outcome(Struct, frozen=True, kw_only=True):
    """What is judged of a completed row. Percents are of the measured figure; above zero is too high."""

    row: Row
    peak_percent: float
    """Predicted allocated peak against the largest rank's."""
    bound_holds: bool
    device_percent: float | None
    """Predicted device use against NVML's, or against its own processes where it was not alone."""
    unexplained_percent: float | None


def outcome(row: Row) -> Outcome | None:
    """None for a row without a measured peak."""
    if row.get("status") != "completed":
        return None
    measured = max(peak for rank in row["measured"]["ranks"] for peak in rank["largest"].values() if peak)
    predicted = row["predicted"]
    return Outcome(
        row=row,
        peak_percent=_percent(predicted["peak_allocated_bytes"], measured),
        bound_holds=predicted["peak_allocated_upper_bytes"] >= measured,
        device_percent=_device_percent(row),
        unexplained_percent=(row.get("breakdown") or {}).get("unexplained_percent"),
    )


def repredicted(rows: Sequence[Row]) -> list[Row]:
    """The rows with what the program of today predicts for their cells."""
    return [_repredicted(row) for row in rows]


def _repredicted(row: Row) -> Row:
    if row.get("status") != "completed":
        return row
    cell = row["cell"]
    gpus = cell.get("gpus", 1)
    machine = Machine(gpu="h200", gpus=gpus, host_memory_bytes=None)
    planned = plan({"gpu": "h200", **cell}, machine, name="repredicted")
    return {**row, "predicted": predicted_row(planned.prediction)}


def _percent(predicted: float, measured: float) -> float:
    return 100.0 * (predicted - measured) / measured


def _device_percent(row: Row) -> float | None:
    predicted = row["predicted"].get("peak_device_bytes")
    used = (row["measured"].get("device_bytes") or {}).values()
    own = (row["measured"].get("own_device_bytes") or {}).values()
    if predicted and used:
        return _percent(predicted, max(used))
    # What the driver holds for itself is no process's.
    return _percent(predicted - DRIVER_RESERVE_BYTES, max(own)) if predicted and own else None


def _checkpointing(cell: Row) -> str:
    if not cell.get("gradient_checkpointing"):
        return "none"
    if cell.get("checkpointing_reentrant"):
        return "reentrant"
    every = cell.get("checkpointing_every", 1)
    return "all" if every == 1 else f"every {every}"


def _liger(cell: Row) -> str:
    return str(cell.get("liger_kernels", "all")) if cell.get("liger") else "off"


def _offload(cell: Row) -> str:
    parts = [name for name in ("optimizer", "param") if cell.get(f"offload_{name}", "none") != "none"]
    return " and ".join(parts) or "none"


def _adapter(cell: Row) -> str:
    kind = cell.get("quantization", "none")
    return str(kind) if kind != "none" else "lora" if cell.get("lora_rank") else "full"


def _band(cell: Row) -> str:
    length = cell.get("seq_len", 2048)
    return next((name for bound, name in _BANDS if length <= bound), "above 16k")


STRATA: dict[str, Callable[[Row], str]] = {
    "GPUs": lambda row: str(row["cell"].get("gpus", 1)),
    "ZeRO stage": lambda row: str(row["cell"].get("zero", 2)),
    "precision": lambda row: str(row["cell"].get("precision", "bf16")),
    "offload": lambda row: _offload(row["cell"]),
    "attention": lambda row: str(row["cell"].get("attention", "default")),
    "liger": lambda row: _liger(row["cell"]),
    "checkpointing": lambda row: _checkpointing(row["cell"]),
    "optimizer": lambda row: str(row["cell"].get("optimizer", "adamw")),
    "weights": lambda row: _adapter(row["cell"]),
    "length": lambda row: _band(row["cell"]),
    "family": lambda row: str(row.get("family") or row["cell"]["model"]),
}


def summary(rows: Sequence[Row], worst: int = 8) -> str:
    """The whole text."""
    return "\n".join(_lines(rows, worst))


def _lines(rows: Sequence[Row], worst: int) -> Iterator[str]:
    states = Counter(str(row.get("status", "refused")) for row in rows)
    yield f"{len(rows)} cells: " + ", ".join(f"{count} {state}" for state, count in states.most_common())
    found = [seen for row in rows if (seen := outcome(row)) is not None]
    if not found:
        return
    broken = sum(not seen.bound_holds for seen in found)
    yield f"upper bound exceeded in {broken} of {len(found)}"
    yield ""
    yield _line("percent of the measured figure", ("n", "bias", "mean", "p95", "worst"))
    yield _line("allocated peak", _figures([seen.peak_percent for seen in found]))
    yield _line("device, or own processes on it", _figures(_known(seen.device_percent for seen in found)))
    yield _line("unexplained of the peak", _figures(_known(seen.unexplained_percent for seen in found)))
    for title, level in STRATA.items():
        yield ""
        yield f"allocated peak by {title}"
        for name in sorted({level(seen.row) for seen in found}):
            of_level = [seen.peak_percent for seen in found if level(seen.row) == name]
            yield _line(f"  {name}", _figures(of_level))
    yield ""
    yield "furthest off"
    for seen in sorted(found, key=lambda seen: -abs(seen.peak_percent))[:worst]:
        yield f"  {seen.peak_percent:+7.2f} %  {_words(seen.row['cell'])}"
    for row in rows:
        if row.get("status") not in ("completed", "refused"):
            yield f"  {row.get('status')}: {_words(row['cell'])}: {str(row.get('reason'))[:160]}"


def _figures(percents: Sequence[float]) -> tuple[str, ...]:
    if not percents:
        return ("0", "n/a", "n/a", "n/a", "n/a")
    sizes = [abs(percent) for percent in percents]
    figures = (statistics.fmean(percents), statistics.fmean(sizes), percentile(sizes, 0.95), max(sizes))
    return (str(len(percents)), f"{figures[0]:+.2f}", *(f"{figure:.2f}" for figure in figures[1:]))


def _known(values: Iterator[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _line(title: str, columns: Sequence[str]) -> str:
    return f"{title:<34}" + "".join(f"{column:>8}" for column in columns)


def _words(cell: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in cell.items())
