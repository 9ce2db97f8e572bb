"""What an out-of-memory was, in lines that a person reads: of the report, the finding and the monitor."""

from __future__ import annotations

from collections.abc import Iterator

from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.oom.diagnosis import OutOfMemory
from llmtop.profiler.oom.fixes import Fix, Room
from llmtop.profiler.units import format_bytes, format_percent, format_tokens_rate

UNFRAGMENT = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment of llmtop run or resume"


def moment_words(found: OutOfMemory) -> str:
    """As `rank 1 in backward of step 3, micro-batch 2`."""
    where = f" in {found.stage.replace('_', ' ')}" if found.stage else ""
    when = f" of step {found.step:,}" if found.step is not None else ""
    part = f", micro-batch {found.micro_batch}" if found.micro_batch is not None else ""
    return f"rank {found.rank}{where}{when}{part}"


def request_words(found: OutOfMemory) -> str:
    """The allocation that failed; empty where the error tells of none."""
    shortage = found.shortage
    if shortage is None or shortage.requested_bytes is None:
        return ""
    asked = f"asked for {format_bytes(shortage.requested_bytes)}"
    asked += " of host memory" if shortage.on_host else ""
    if found.allocation:
        return f"{asked}: {' or '.join(found.allocation)}"
    return f"{asked}, which no large tensor of this run has for its size"


def room_words(found: OutOfMemory) -> str:
    """How the device was shared, and by how much it was too small."""
    room, shortage = found.room, found.shortage
    if room is None or shortage is None or shortage.total_bytes is None:
        return ""
    others = ""
    if room.others_bytes is not None:
        share = format_percent(100 * room.others_bytes / shortage.total_bytes)
        others = f", {format_bytes(room.others_bytes)} ({share}) held by other processes and the driver"
    return (
        f"{format_bytes(shortage.total_bytes)} on the device{others}; this rank would have had"
        f" {format_bytes(room.needed_bytes)}: {format_bytes(room.shortfall_bytes)} too much, at least"
    )


def predicted_words(found: OutOfMemory) -> str:
    """Prediction against actual, in allocated bytes."""
    text = f"predicted for it {format_bytes(found.predicted_bytes)} allocated"
    text += f", {format_bytes(found.predicted_upper_bytes)} at the very most"
    shortage = found.shortage
    if shortage is None or shortage.allocated_bytes is None or shortage.requested_bytes is None:
        return text
    allocated, asked = shortage.allocated_bytes, shortage.requested_bytes
    return (
        f"{text}; there were {format_bytes(allocated)}, and {format_bytes(allocated + asked)} with what was"
        " asked for"
    )


def grown_words(found: OutOfMemory) -> str:
    grown = found.grown
    if grown is not None:
        return (
            f"larger than predicted in the steps before: {grown.component.replace('_', ' ')},"
            f" {format_bytes(grown.actual_bytes)} for {format_bytes(grown.predicted_bytes)}"
        )
    if found.component is not None:
        return f"what grew when it failed: {found.component.replace('_', ' ')}"
    return ""


def fragmented_words(found: OutOfMemory) -> str:
    if not found.fragmented or found.shortage is None:
        return ""
    held = format_bytes(found.shortage.cached_bytes)
    return f"the allocator held {held} more in pieces that did not fit; {UNFRAGMENT} may be enough"


def evidence(found: OutOfMemory) -> Iterator[tuple[str, str]]:
    """Everything but the moment and the fixes: a label and a line each."""
    rows = (
        ("allocation", request_words(found)),
        ("device", room_words(found)),
        ("predicted", predicted_words(found)),
        ("grown", grown_words(found)),
        ("in pieces", fragmented_words(found)),
    )
    yield from ((label, text) for label, text in rows if text)


def nothing_fits(prediction: Prediction, room: Room | None) -> str:
    """What to say where no change is offered."""
    if room is None and prediction.device_memory_bytes is None:
        return "smaller --micro-batch or --seq-len, or --gradient-checkpointing"
    return (
        "nothing that was tried is predicted to fit: a smaller model, --lora-rank 16, or more GPUs;"
        " llmtop plan shows what each needs"
    )


def fix_words(fix: Fix) -> str:
    rate = f", {format_tokens_rate(fix.tokens_per_second)}" if fix.tokens_per_second else ""
    return f"{fix.text}: predicted peak {format_bytes(fix.peak_allocated_bytes)}{rate}"
