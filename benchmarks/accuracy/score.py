"""What one measured row says of its prediction: every figure that a goal is set for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from benchmarks.accuracy.rows import Sourced
from benchmarks.accuracy.split import Half
from benchmarks.rows import Cell, Row
from benchmarks.summary import outcome
from llmtop.profiler.memory.allocator import DRIVER_RESERVE_BYTES

STATES = ("parameters", "gradients", "master_parameters", "optimizer_state")
TEMPORARIES = ("activations", "logits", "communication_buffers")
LEAST_SHARE = 0.01
"""A component below this share of the peak is judged against that share, not against its own few bytes."""
_DEFAULTS: Cell = {
    "gpus": 1, "zero": 2, "seq_len": 2048, "micro_batch": 1, "grad_accum": 1, "precision": "bf16",
    "optimizer": "adamw", "attention": "sdpa", "lora_rank": 0,
}  # fmt: skip
_SHORT = {
    "seq_len": "length",
    "micro_batch": "batch",
    "gradient_checkpointing": "checkpointing",
    "checkpointing_reentrant": "reentrant",
    "checkpointing_every": "every",
    "liger_kernels": "kernels",
    "flash_attention_2": "FA2",
}


class Score(Struct, frozen=True, kw_only=True):
    """Percents are of the measured figure unless they say otherwise; above zero is too high. None: the row
    does not tell."""

    row: Row
    half: Half
    earlier: bool
    measured_peak_bytes: int
    predicted_peak_bytes: int
    peak_percent: float
    bound_holds: bool
    device_percent: float | None
    host_percent: float | None
    step_percent: float | None
    unexplained_percent: float | None
    """Of its peak: what has no name in the measured breakdown."""
    need: tuple[int, int] | None
    """Measured and predicted bytes that the run needs of a device: allocated and what lies outside."""
    resident: dict[str, float]
    """By component, between steps, percent of the component itself (or of `LEAST_SHARE` of the peak)."""
    at_peak: dict[str, float]
    """By component, at the measured peak, percent of that peak; empty where its trace is not whole."""
    begins_late: bool
    """The trace of the peak began in the middle of its step: what earlier phases made has no name in it."""

    @property
    def cell(self) -> Cell:
        cell: Cell = self.row["cell"]
        return cell

    @property
    def name(self) -> str:
        return words(self.cell)


def score(of: Sourced) -> Score | None:
    """None for a row without a measured peak."""
    seen = outcome(of.row)
    if seen is None:
        return None
    ranks = of.row["measured"]["ranks"]
    predicted = of.row["predicted"]
    peak = max(size for rank in ranks for size in rank["largest"].values() if size)
    return Score(
        row=of.row,
        half=of.half,
        earlier=of.earlier,
        measured_peak_bytes=peak,
        predicted_peak_bytes=predicted["peak_allocated_bytes"],
        peak_percent=seen.peak_percent,
        bound_holds=seen.bound_holds,
        device_percent=seen.device_percent,
        host_percent=_host_percent(of.row),
        step_percent=_step_percent(of.row),
        unexplained_percent=seen.unexplained_percent,
        need=_need(of.row, peak),
        resident=_resident(of.row, peak),
        at_peak=_at_peak(of.row, peak),
        begins_late=_begins_late(of.row),
    )


def words(cell: Cell) -> str:
    """A cell in few words: what differs from the defaults."""
    return " ".join(_words(cell))


def _words(cell: Cell) -> Iterator[str]:
    yield str(cell["model"])
    for key, value in cell.items():
        off = value is False or value in ("none", None, {})
        if key in ("model", "steps") or off or _DEFAULTS.get(key) == value:
            continue
        if key == "deepspeed":
            yield from (f"{name}={size}" for section in value.values() for name, size in section.items())
        elif value is True:
            yield _SHORT.get(key, key)
        else:
            yield f"{_SHORT.get(key, key)}={_SHORT.get(str(value), value)}"


def percent(predicted: float, measured: float) -> float:
    return 100.0 * (predicted - measured) / measured


def offloads(cell: Cell) -> bool:
    return any(cell.get(f"offload_{what}", "none") != "none" for what in ("optimizer", "param"))


def _host_percent(row: Row) -> float | None:
    measured = host_bytes(row)
    if not offloads(row["cell"]) or measured is None:
        return None
    # Pinned pages count in a process's resident set, so nothing is added for them.
    return percent(row["predicted"]["host_bytes"], measured)


def host_bytes(row: Row) -> int | None:
    """What the ranks of a node held at most, pages that they share counted once.

    The kernel's own high-water mark misses no moment, as a sampled PSS does. Ranks that were forked share
    library pages with the process that they came from, and so with each other; what they shared is the
    difference of resident and proportional set before they did anything. Rows that lack the mark have PSS.
    """
    ranks = [rank.get("events", {}) for rank in row["measured"]["ranks"]]
    peaks = [int(events.get("rank_finished", {}).get("peak_rss_bytes") or 0) for events in ranks]
    first = ranks[0].get("baseline_measured", {})
    if all(peaks) and first.get("pss_bytes"):
        shared = int(first["rss_bytes"]) - int(first["pss_bytes"])
        return sum(peaks) - (len(peaks) - 1) * shared
    sizes = [int(size or 0) for size in (row["measured"].get("pss_bytes") or {}).values()]
    return sum(sizes) if sizes and all(sizes) else None


def _step_percent(row: Row) -> float | None:
    predicted, measured = row["predicted"].get("step_seconds"), step_seconds(row)
    return percent(predicted, measured) if predicted and measured else None


def step_seconds(row: Row) -> float | None:
    """Of a run that shared its devices with no other: the fastest step, as some are slowed by measuring."""
    if not row.get("alone"):
        return None
    by_rank = [rank["step_seconds"] for rank in row["measured"]["ranks"]]
    if not all(isinstance(steps, list) and steps for steps in by_rank):
        return None
    slowest: float = max(min(steps[1:] or steps) for steps in by_rank)
    return slowest


def _need(row: Row, peak: int) -> tuple[int, int] | None:
    predicted = row["predicted"].get("needed_bytes")
    outside = [seen for rank in row["measured"]["ranks"] if (seen := _outside(row, rank)) is not None]
    return (peak + max(outside), predicted) if outside and predicted else None


def _outside(row: Row, rank: Row) -> int | None:
    """Bytes on the device that the allocator does not know, the driver's own among them."""
    end = rank.get("events", {}).get("outside_measured.end")
    if end is not None and end.get("process_used_bytes"):
        return int(end["process_used_bytes"]) - int(end["reserved_bytes"]) + DRIVER_RESERVE_BYTES
    used = (row["measured"].get("device_bytes") or {}).get(str(rank["rank"]))
    return int(used) - int(rank["reserved"]) if used and rank.get("reserved") else None


def _resident(row: Row, peak: int) -> dict[str, float]:
    measured = _between_steps(row["measured"]["ranks"][0])
    predicted = row["predicted"]["moments"]["between_steps"]
    found: dict[str, float] = {}
    for name in STATES if measured else ():
        seen, said = measured.get(name, 0), predicted.get(name, 0)
        if seen or said:
            found[name] = 100.0 * (said - seen) / max(seen, LEAST_SHARE * peak)
    return found


def _between_steps(rank: Row) -> Mapping[str, int]:
    event = rank.get("events", {}).get("memory_classified.between_steps")
    if event is not None:
        found: dict[str, int] = event["components"]
        return found
    recorded = rank.get("classified", {}).get("between_steps")
    older: dict[str, int] = recorded[0] if recorded else {}
    return older


def _at_peak(row: Row, peak: int) -> dict[str, float]:
    seen: dict[str, Any] | None = row.get("breakdown")
    if not seen or not seen.get("exact") or _begins_late(row):
        return {}
    predicted = _nearest(row["predicted"], seen, peak)
    if predicted is None:
        return {}
    actual = {
        part["component"]: part["actual_bytes"]
        for part in seen["rows"]
        if part["in_peak"] and part["actual_bytes"] is not None
    }
    names = (*STATES, *TEMPORARIES, "workspace")
    return {
        name: 100.0 * (predicted.get(name, 0) - actual.get(name, 0)) / peak
        for name in names
        if name in predicted or name in actual
    }


def _begins_late(row: Row) -> bool:
    """Whether the step of the traced peak has a later phase in its trace and no forward pass.

    So did traces begin until 2026-11-30 that the growth of the peak itself asked for, in the middle of its
    step; now each begins with a step or not at all (`profiler/probes/training.py:_begin_trace`).
    """
    seen: dict[str, Any] | None = row.get("breakdown")
    if not seen or not seen.get("exact"):
        return False
    events = row["measured"]["ranks"][seen["peak_rank"] or 0].get("events", {})
    traced = [event for name, event in events.items() if name.startswith("peak_classified.")]
    of_peak = {event["step"] for event in traced if event["moment"] == seen["actual_moment"]}
    forward = {event["step"] for event in traced if event["phase"] == "forward"}
    return bool(of_peak) and not of_peak <= forward


def _nearest(prediction: Row, seen: Mapping[str, Any], peak: int) -> dict[str, int] | None:
    """The moment that a peak was measured in, or the one predicted to have it, whichever total is nearer.

    Neighbours have the same peak under two names: a fused loss makes its gradient in the forward pass.
    """
    moments: dict[str, dict[str, int]] = prediction["moments"]
    names = [name for name in (seen.get("actual_moment"), prediction["peak_moment"]) if name in moments]
    return min((moments[name] for name in names), key=lambda m: abs(sum(m.values()) - peak), default=None)


def scores(rows: Sequence[Sourced]) -> list[Score]:
    return [found for row in rows if (found := score(row)) is not None]
