"""The fastest changes after which a run that ran out of memory fits: by its prediction, corrected by what
really happened."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunSpec
from llmtop.profiler.findings.finding import NEW_RUN, change_words
from llmtop.profiler.memory.allocator import DRIVER_RESERVE_BYTES, context_bytes
from llmtop.profiler.memory.changes import apply, pace
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.memory.suggest import suggestions
from llmtop.profiler.record.failureevents import MemoryShortage
from llmtop.profiler.units import format_bytes

MOST = 5
"""As many as have a key in the monitor."""


class Room(Struct, frozen=True, kw_only=True):
    """What there was and what was needed on the device, at least, when the allocation failed."""

    available_bytes: int
    """For this rank: the device without what others hold of it."""
    needed_bytes: int
    """By this rank: what its process held and the allocation that failed. The step may need more later on."""
    others_bytes: int | None = None
    """Held by other processes and the driver; None where that is not known."""

    @property
    def shortfall_bytes(self) -> int:
        return max(0, self.needed_bytes - self.available_bytes)


class Fix(Struct, frozen=True, kw_only=True):
    """One change."""

    number: int | None
    """Under which `llmtop resume --fix` takes it, from 1 on; None: it needs a run of its own."""
    change: dict[str, object]
    text: str
    """In words, with what it costs."""
    peak_allocated_bytes: int
    """As predicted, without the correction."""
    tokens_per_second: float | None
    command: str
    """That makes it; empty where it needs a run of its own."""

    @property
    def words(self) -> tuple[str, ...]:
        """As `key=value`."""
        return change_words(self.change)


def room_of(spec: RunSpec, shortage: MemoryShortage | None) -> Room | None:
    """None where the failure does not tell: then it is only known that the run did not fit."""
    if (
        shortage is None
        or shortage.on_host
        or shortage.requested_bytes is None
        or shortage.total_bytes is None
    ):
        return None
    own = _own_bytes(spec, shortage)
    if own is None:
        return None
    others = None
    available = shortage.total_bytes
    if shortage.free_bytes is not None:
        others = max(0, shortage.total_bytes - shortage.free_bytes - own)
        available -= others
    if shortage.allowed_bytes is not None:
        available = min(available, shortage.allowed_bytes)
    return Room(available_bytes=available, needed_bytes=own + shortage.requested_bytes, others_bytes=others)


def _own_bytes(spec: RunSpec, shortage: MemoryShortage) -> int | None:
    """Of the device by the rank's process. In a container the driver's numbers of processes are others, so
    that the message cannot say which is its own: then what is known of the allocator and the context."""
    if shortage.own_bytes is not None:
        return shortage.own_bytes
    if shortage.allocated_bytes is None:
        return None
    context = context_bytes(spec) - DRIVER_RESERVE_BYTES
    return shortage.allocated_bytes + (shortage.cached_bytes or 0) + context


def fixes(spec: RunSpec, prediction: Prediction, room: Room | None, resume: str) -> tuple[Fix, ...]:
    """Those that fit, the fastest first, other trainings last; where none does, nothing is promised.

    A prediction that was too low is raised for every change by what it was too low by, so that what is left
    still fits though the error itself would shrink with the change.
    """
    from llmtop.profiler.memory.predict import predict  # for a run that failed so: no other waits for it

    available = room.available_bytes if room is not None else prediction.device_memory_bytes
    base = predict(spec)
    if available is None or base.needed_bytes is None:
        return ()
    # Without figures all that is known is that more was needed than there is.
    needed = room.needed_bytes if room is not None else available + 1
    # What the driver holds is in the prediction's need, and here among what others hold.
    apart = DRIVER_RESERVE_BYTES if room is not None and room.others_bytes is not None else 0
    excess = max(0, needed - (base.needed_bytes - apart)) - apart

    def corrected(changed: RunSpec) -> Prediction:
        found = predict(changed)
        if found.needed_bytes is None:
            return found
        needs = found.needed_bytes + excess
        return replace(found, needed_bytes=needs, device_memory_bytes=available, fits=needs <= available)

    failed = replace(corrected(spec), fits=False)
    numbered: list[Fix] = []
    for found in suggestions(spec, failed, corrected):
        if found.fits:
            # A command of the user's own is not llmtop's to change.
            needs_new_run = bool(NEW_RUN & found.change.keys()) or spec.script is not None
            taken = sum(fix.number is not None for fix in numbered)
            number = None if needs_new_run else taken + 1
            numbered.append(
                Fix(
                    number=number,
                    change=found.change,
                    text=found.words,
                    peak_allocated_bytes=found.peak_allocated_bytes,
                    tokens_per_second=found.tokens_per_second,
                    command="" if number is None else f"{resume} --fix {number}",
                )
            )
    return tuple(numbered[:MOST])


def host_fixes(spec: RunSpec, resume: str) -> tuple[Fix, ...]:
    """Changes of the offload that take less of the host's memory and fit on the device, the fastest first."""
    from llmtop.profiler.memory.predict import predict

    options, base = spec.options, predict(spec)
    offloads = (options.offload_optimizer, options.offload_param)
    changes: list[tuple[dict[str, object], str]] = []
    if "cpu" in offloads:
        changes.append(({"offload_optimizer": "none", "offload_param": "none"}, "no offload"))
    if options.offload_param == "cpu":
        changes.append(({"offload_param": "none"}, "the weights on the GPU"))
    if options.nvme_path is not None:
        changes += [
            ({key: "nvme"}, f"{words} on NVMe")
            for key, words in (("offload_optimizer", "optimizer state"), ("offload_param", "weights"))
            if getattr(options, key) == "cpu"
        ]
    found: list[Fix] = []
    for change, text in changes:
        changed = apply(spec, change)
        if refusals(changed):
            continue
        then = predict(changed)
        if then.fits is False or then.host_bytes >= base.host_bytes:
            continue
        number = None if spec.script is not None else len(found) + 1
        speed = f" ({faster})" if (faster := pace(base, then)) else ""
        host = f"host memory {format_bytes(base.host_bytes)} -> {format_bytes(then.host_bytes)}"
        found.append(
            Fix(
                number=number,
                change=change,
                text=f"{text}{speed}; {host}",
                peak_allocated_bytes=then.peak_allocated_bytes,
                tokens_per_second=then.tokens_per_second,
                command="" if number is None else f"{resume} --fix {number}",
            )
        )
    return tuple(found)
