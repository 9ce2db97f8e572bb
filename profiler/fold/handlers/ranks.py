"""How what a rank writes is folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from llmtop.profiler.fold import changestate, rankstate
from llmtop.profiler.fold.batch import Batch
from llmtop.profiler.fold.handlers.gonecheckpoints import forget_what_is_gone
from llmtop.profiler.fold.handlers.handler import Handler
from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.fold.readingsfold import raise_peaks
from llmtop.profiler.fold.runstate import RECENT_STEPS, RunState
from llmtop.profiler.record.changeevents import ChangeApplied
from llmtop.profiler.record.checkpointevents import CheckpointLoaded, CheckpointRefused, CheckpointSaved
from llmtop.profiler.record.eventbase import rank_of
from llmtop.profiler.record.events import (
    AnyEvent,
    BaselineMeasured,
    KernelsSeen,
    MemoryClassified,
    ModelBuilt,
    OpBuilt,
    OutsideMeasured,
    PeakClassified,
    RankFailed,
    RankFinished,
    StageBegan,
    StageFinished,
    StepFinished,
    WeightsLoaded,
    WeightsRead,
)
from llmtop.profiler.record.failureevents import StepHealed


def _of_rank(change: Callable[[RankState, Any], RankState]) -> Handler:
    """A handler that changes only the state of the rank that wrote the event."""

    def handle(batch: Batch, event: AnyEvent) -> None:
        number = rank_of(event.src)
        if number is not None:
            batch.set_rank(change(batch.rank(number), event))

    return handle


_finish_stage = _of_rank(rankstate.finish_stage)


def _stage_finished(batch: Batch, event: StageFinished) -> None:
    _finish_stage(batch, event)
    # The stages that build ops; the others of a second rank may end while the first one compiles.
    if event.stage in ("process_group", "op_build", "engine", "partition", "first_step"):
        _clear_compiling(batch, event.t)


def _clear_compiling(batch: Batch, t: float) -> None:
    at = batch.state.compiling_at
    if at is not None and t >= at:
        batch.set(compiling=None, compiling_at=None)


def _change_applied(batch: Batch, event: ChangeApplied) -> None:
    number, before = rank_of(event.src), batch.state.changes
    changes = changestate.apply(before, event)
    if changes is not before:
        batch.set(changes=changes, peak_device_bytes={})
    if event.problem:
        return
    # The supervisor writes it for all ranks, where they made it by themselves.
    for rank in batch.rank_numbers if number is None else (number,):
        batch.set_rank(rankstate.change_setting(batch.rank(rank), event.setting))


def _checkpoint_saved(batch: Batch, event: CheckpointSaved) -> None:
    known = batch.state.checkpoints
    batch.set(last_saved=event, checkpoints=known if event.passing else (*known, event))
    forget_what_is_gone(batch)


def _checkpoint_loaded(batch: Batch, event: CheckpointLoaded) -> None:
    number = rank_of(event.src)
    if number is None or batch.state.is_of_before(event.t):
        return
    batch.set_rank(replace(batch.rank(number), checkpoint_loaded=event))
    state = batch.state
    is_told_first = state.went_on is not None and state.goes_on_after is None and state.made_no_step
    if is_told_first and number == state.first_rank:
        # A supervisor of many hosts does not see what there is to go on from.
        changes = changestate.go_back(state.changes, event.step)
        batch.set(goes_on_after=event.step, steps_finished=event.step, changes=changes)
    forget_what_is_gone(batch)


def _checkpoint_refused(batch: Batch, event: CheckpointRefused) -> None:
    if not event.passing:
        batch.set(checkpoints_refused=(*batch.state.checkpoints_refused, event))


def _rank_finished(batch: Batch, event: RankFinished) -> None:
    number = rank_of(event.src)
    if number is not None:
        batch.set_rank(replace(batch.rank(number), finished=event))
        peaks = raise_peaks(batch.state.peak_rss_bytes, [(number, event.peak_rss_bytes)])
        batch.set(peak_rss_bytes=peaks)


def _step_finished(batch: Batch, event: StepFinished) -> None:
    number = rank_of(event.src)
    state = batch.state
    came_late = state.is_of_before(event.t)
    # What the ranks are since then is of their new processes.
    if number is not None and not came_late:
        batch.add_step(number, event)
    if state.status == "starting" and not came_late:
        batch.set(status="running")
    if state.hang_at is not None and event.t >= state.hang_at:
        batch.set(hang_seconds=None, hang_at=None)
    if state.compiling_at is not None:
        _clear_compiling(batch, event.t)
    if number == state.first_rank:
        _step_of_run(batch, event)


def _step_of_run(batch: Batch, event: StepFinished) -> None:
    batch.set(energy=batch.state.energy.with_step(event))
    state = batch.state
    left_out = event.left_out
    changes: dict[str, Any] = {
        "steps_made": state.steps_made + 1 + (left_out.steps if left_out is not None else 0),
    }
    came_late = state.is_of_before(event.t)
    # It counts among those made; where the run stands, the steps say that it has made since.
    if not came_late or state.made_no_step:
        batch.add_point(event, state.changes.launch - came_late)
        changes |= {
            "steps_finished": _stands_at(state, event.step, came_late=came_late),
            "last_loss": event.loss,
            "recent_steps": (*state.recent_steps[1 - RECENT_STEPS :], event),
        }
    skipped = int(event.skipped) + (left_out.skipped if left_out is not None else 0)
    if skipped:
        changes["skipped_steps"] = state.skipped_steps + skipped
    # Rank 0 alone tells the loss, and it may be on another host.
    if not state.first_rank and (event.loss is None or left_out is not None):
        changes |= _nonfinite(state, event)
    if event.loss is not None and state.first_loss is None:
        changes["first_loss"] = event.loss
    if state.first_loss_scale is None and event.loss_scale is not None:
        changes["first_loss_scale"] = event.loss_scale
    batch.set(**changes)


def _stands_at(state: RunState, step: int, *, came_late: bool) -> int:
    """After one more step: of the processes before it was gone on with where that came late."""
    if came_late and state.goes_on_after is not None:
        return state.steps_finished
    is_first = not came_late and state.went_on is not None and state.made_no_step
    return step if is_first else max(state.steps_finished, step)


def _nonfinite(state: RunState, event: StepFinished) -> dict[str, Any]:
    left_out = event.left_out
    count = int(event.loss is None) + (left_out.nonfinite if left_out is not None else 0)
    if not count:
        return {}
    before = left_out.first_nonfinite_step if left_out is not None else None
    first = event.step if before is None else before
    known = state.first_nonfinite_step
    return {
        "nonfinite_losses": state.nonfinite_losses + count,
        "first_nonfinite_step": first if known is None else known,
    }


HANDLERS: dict[type, Handler] = {
    # The supervisor's change says what came of it, for all ranks.
    StepHealed: lambda batch, event: None,
    ChangeApplied: _change_applied,
    StageBegan: _of_rank(rankstate.begin_stage),
    StageFinished: _stage_finished,
    OpBuilt: _of_rank(lambda rank, event: replace(rank, ops_built=(*rank.ops_built, event))),
    WeightsRead: _of_rank(lambda rank, event: replace(rank, weights_read=event)),
    WeightsLoaded: _of_rank(lambda rank, event: replace(rank, weights_loaded=event)),
    BaselineMeasured: _of_rank(lambda rank, event: replace(rank, baseline=event)),
    ModelBuilt: _of_rank(lambda rank, event: replace(rank, model=event)),
    MemoryClassified: _of_rank(rankstate.classify),
    PeakClassified: _of_rank(rankstate.classify_peak),
    OutsideMeasured: _of_rank(rankstate.measure_outside),
    KernelsSeen: _of_rank(lambda rank, event: replace(rank, kernels=event)),
    StepFinished: _step_finished,
    CheckpointSaved: _checkpoint_saved,
    CheckpointRefused: _checkpoint_refused,
    CheckpointLoaded: _checkpoint_loaded,
    RankFinished: _rank_finished,
    RankFailed: _of_rank(lambda rank, event: replace(rank, failed=event)),
}
