"""What an out-of-memory was: when, which allocation, what grew beyond its prediction, and what would fit.

Pure: from the record alone, so that the report, the monitor and `llmtop resume --fix` number alike.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.breakdown import NEAR_PHASE, Breakdown, breakdown
from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Component, Moment, Prediction
from llmtop.profiler.oom.allocations import identify
from llmtop.profiler.oom.fixes import Fix, Room, fixes, host_fixes, room_of
from llmtop.profiler.record.failureevents import MemoryShortage

GREW_SHARE = 0.02
"""Of the measured peak; by less no component is said to have grown."""
_BESIDE = (Component.UNEXPLAINED, Component.RUNTIME, Component.OTHER_PROCESSES)
FRAGMENTED_SHARE = 1.0
"""Of the request: as much or more lay unused in the allocator's own pieces."""


class Grown(Struct, frozen=True, kw_only=True):
    """A component that is larger than it was predicted."""

    component: str
    predicted_bytes: int
    actual_bytes: int
    """As measured last, in an earlier step."""


class OutOfMemory(Struct, frozen=True, kw_only=True):
    rank: int
    step: int | None
    """None: before the first step."""
    stage: str | None
    """The phase of the step, or the stage of start-up."""
    micro_batch: int | None
    """Which of the step, counted from 1."""
    where: str
    """File and function that asked for the memory, as far as Python knows; empty where it does not."""
    shortage: MemoryShortage | None
    allocation: tuple[str, ...]
    """What has the size that was asked for, in words; several where they cannot be told apart."""
    component: str | None
    """That the allocation belongs to."""
    grown: Grown | None
    predicted_bytes: int
    """Allocated, as predicted for the largest moment of that phase."""
    predicted_upper_bytes: int
    room: Room | None
    fragmented: bool
    """The allocator held as much as was asked for, in pieces that did not fit."""
    fixes: tuple[Fix, ...]

    @property
    def on_host(self) -> bool:
        return self.shortage is not None and self.shortage.on_host


def rank_out_of_memory(state: RunState) -> RankState | None:
    """The rank that ran out of memory; the one at fault where several did."""
    failed = [rank for rank in state.ranks.values() if rank.failed and rank.failed.out_of_memory]
    # While the others are being ended nobody has judged yet.
    return min(failed, key=lambda rank: (rank.rank != state.rank_at_fault, rank.rank), default=None)


def diagnose(state: RunState, spec: RunSpec, prediction: Prediction) -> OutOfMemory | None:
    """None for a run in which no rank has told that its memory ran out."""
    rank = rank_out_of_memory(state)
    if rank is None or rank.failed is None:
        return None
    told, found = rank.failed, breakdown(state, spec, prediction)
    shortage = told.shortage
    known = identify(spec, shortage, told.stage) if shortage is not None else ()
    room = room_of(spec, shortage)
    return OutOfMemory(
        rank=rank.rank,
        step=told.step,
        stage=told.stage,
        micro_batch=told.micro_batch,
        where=told.where,
        shortage=shortage,
        allocation=tuple(one.name for one in known),
        component=str(known[0].component) if known else None,
        grown=_grown(found),
        predicted_bytes=_predicted_for(told.stage, prediction),
        predicted_upper_bytes=prediction.peak_allocated_upper_bytes,
        room=room,
        fragmented=_fragmented(shortage),
        fixes=_fixes(spec, prediction, room, state, on_host=_on_host(shortage)),
    )


def fixes_after(state: RunState, spec: RunSpec, prediction: Prediction) -> tuple[Fix, ...]:
    """What fits after a run that ran out of memory, also where its rank could not tell how."""
    if state.status != "out_of_memory":
        return ()
    found = diagnose(state, spec, prediction)
    if found is not None:
        return found.fixes
    rank = state.ranks.get(-1 if state.rank_at_fault is None else state.rank_at_fault)
    killed = rank is not None and rank.exited is not None and rank.exited.signal == "SIGKILL"
    return _fixes(spec, prediction, None, state, on_host=killed)


def _fixes(
    spec: RunSpec, prediction: Prediction, room: Room | None, state: RunState, *, on_host: bool
) -> tuple[Fix, ...]:
    """Of the memory that ran out: on the CPU kind the host's is the ranks' own."""
    if on_host and not spec.on_cpu:
        found = host_fixes(spec, state.command("resume"))
    else:
        found = fixes(spec, prediction, room, state.command("resume"))
    # A run that came from an archive is not gone on with: each of them needs one of its own.
    if state.imported:
        return tuple(replace(fix, number=None, command="") for fix in found)
    if state.steps_finished and state.last_saved is None:
        # Its steps are made again, which has to be asked for.
        return tuple(replace(fix, command=fix.command and f"{fix.command} --anew") for fix in found)
    return found


def _predicted_for(stage: str | None, prediction: Prediction) -> int:
    """Of the largest moment in the phase, in start-up of that moment; where neither is known, of all."""
    near = NEAR_PHASE.get(stage or "", (Moment.INIT,) if stage else ())
    sizes = [moment.total_bytes for moment in prediction.moments if moment.name in near]
    return max(sizes, default=prediction.peak_allocated_bytes)


def _grown(found: Breakdown) -> Grown | None:
    """The component that is furthest above its prediction, in the last step that was measured."""
    peak = found.actual_peak_bytes
    if peak is None or found.reclaimed:
        return None
    beyond = [
        (row.actual_bytes - (row.predicted_bytes or 0), row)
        for row in found.rows
        if row.in_peak and row.actual_bytes is not None and row.component not in _BESIDE
    ]
    if not beyond:
        return None
    most, row = max(beyond, key=lambda pair: pair[0])
    if most <= GREW_SHARE * peak or row.actual_bytes is None:
        return None
    return Grown(
        component=str(row.component), predicted_bytes=row.predicted_bytes or 0, actual_bytes=row.actual_bytes
    )


def _fragmented(shortage: MemoryShortage | None) -> bool:
    if shortage is None or shortage.cached_bytes is None or shortage.requested_bytes is None:
        return False
    return shortage.cached_bytes >= FRAGMENTED_SHARE * shortage.requested_bytes


def _on_host(shortage: MemoryShortage | None) -> bool:
    return shortage is not None and shortage.on_host
