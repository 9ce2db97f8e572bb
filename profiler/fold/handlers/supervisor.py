"""How what the supervisor writes of the run, of its changes and of its troubles is folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from llmtop.profiler.fold import changestate, rankstate
from llmtop.profiler.fold.batch import Batch
from llmtop.profiler.fold.changestate import Changes
from llmtop.profiler.fold.handlers.gonecheckpoints import forget_what_is_gone
from llmtop.profiler.fold.handlers.handler import Handler
from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.record.changeevents import (
    ChangeAsked,
    ChangeRefused,
    RestageBegan,
    Restaged,
    RestageFailed,
)
from llmtop.profiler.record.endevents import MemoryReturned
from llmtop.profiler.record.events import (
    Compiling,
    ControlAnswered,
    HangSuspected,
    LogThinned,
    NvmeMeasured,
    RankExited,
    RankStarted,
    RunEnded,
    RunStarted,
    WritingResumed,
)
from llmtop.profiler.record.failureevents import HostMemoryRunsOut


def _run_started(batch: Batch, event: RunStarted) -> None:
    batch.set(
        # A record may have been copied, renamed or made up: what it is called here is what commands take.
        run_id=batch.state.run_id or event.run_id,
        name=event.name,
        supervisor_pid=event.pid,
        host=event.host,
        world_size=event.world_size,
        llmtop_version=event.llmtop_version,
        started=event.t if batch.state.started is None else batch.state.started,
        goes_on_after=event.goes_on_after,
    )
    ended = batch.state.ended
    if (left := _left_at(batch)) is not None and event.t > left:
        batch.set(paused_seconds=batch.state.paused_seconds + event.t - left)
        if ended is None:
            _go_on(batch, event.t)  # it was lost
    if ended is not None and event.t >= ended.t:
        _go_on(batch, event.t)


def _go_on(batch: Batch, t: float) -> None:
    """After its end, in new processes: nothing of the old ones is true of them."""
    after = batch.state.goes_on_after
    changes = changestate.go_on(batch.state.changes, after)
    batch.set(status="starting", ended=None, memory_returned=None, went_on=t, changes=changes)
    if after is not None:
        # What was made after it is lost, and there the run stands also where it ends before its next step.
        batch.set(steps_finished=after)
    batch.set(hang_seconds=None, hang_at=None, compiling=None, compiling_at=None, memory_runs_out=None)
    batch.set(hardware=None, lost_devices=frozenset(), peak_device_bytes={})
    batch.set(peak_rss_bytes={}, peak_pss_bytes={}, peak_compiler_bytes={})
    for number in batch.rank_numbers:
        batch.set_rank(_new_process(batch.rank(number)))
    forget_what_is_gone(batch)


def _new_process(rank: RankState) -> RankState:
    return RankState(rank=rank.rank, setting=rank.setting, setting_peaks=rankstate.peaks_so_far(rank))


def _left_at(batch: Batch) -> float | None:
    """When a run that is gone on with had ended; of one that was lost, when it made its last step."""
    state = batch.state
    if state.ended is not None:
        return state.ended.t
    return state.recent_steps[-1].t if state.recent_steps else None


def _rank_started(batch: Batch, event: RankStarted) -> None:
    rank = batch.rank(event.rank)
    if rank.exited is not None and rank.exited.pid != event.pid:
        rank = replace(_new_process(rank), replaced_at=event.t)
    batch.set_rank(replace(rank, pid=event.pid, setting=event.setting))


def _rank_exited(batch: Batch, event: RankExited) -> None:
    batch.set_rank(replace(batch.rank(event.rank), exited=event, pid=event.pid))


def _run_ended(batch: Batch, event: RunEnded) -> None:
    batch.set(status=event.state, ended=event, compiling=None, compiling_at=None)


def _control_answered(batch: Batch, event: ControlAnswered) -> None:
    state = batch.state
    stops = event.action == "stop" and event.answer != "refused" and state.status in ("starting", "running")
    batch.set(controls=(*state.controls, event), status="stopping" if stops else state.status)


def _change(fold_one: Callable[[Changes, Any], Changes]) -> Handler:
    return lambda batch, event: batch.set(changes=fold_one(batch.state.changes, event))


def _restage_began(batch: Batch, event: RestageBegan) -> None:
    _relaunched(batch, changestate.begin_restage(batch.state.changes, event), event.world_size)


def _restage_failed(batch: Batch, event: RestageFailed) -> None:
    _relaunched(batch, changestate.fail_restage(batch.state.changes, event), event.world_size)


def _relaunched(batch: Batch, changes: Changes, world_size: int) -> None:
    """All ranks have ended, and others take their place."""
    status = "starting" if batch.state.status == "running" else batch.state.status
    batch.set(changes=changes, status=status, world_size=world_size, peak_device_bytes={}, peak_rss_bytes={})
    batch.drop_ranks(world_size)


def _hang_suspected(batch: Batch, event: HangSuspected) -> None:
    batch.set(hang_seconds=event.quiet_seconds, hang_at=event.t)


def _writing_resumed(batch: Batch, event: WritingResumed) -> None:
    others = [one for one in batch.state.writing_resumed if one.src != event.src]
    batch.set(writing_resumed=(*others, event))


def _compiling(batch: Batch, event: Compiling) -> None:
    compiled = batch.state.compiled
    batch.set(
        compiling=event.what,
        compiling_at=event.t,
        compiled=compiled if event.what in compiled else (*compiled, event.what),
    )


HANDLERS: dict[type, Handler] = {
    RunStarted: _run_started,
    RankStarted: _rank_started,
    RankExited: _rank_exited,
    RunEnded: _run_ended,
    ControlAnswered: _control_answered,
    ChangeAsked: _change(changestate.ask),
    ChangeRefused: _change(changestate.refuse),
    RestageBegan: _restage_began,
    Restaged: _change(changestate.finish_restage),
    RestageFailed: _restage_failed,
    HangSuspected: _hang_suspected,
    Compiling: _compiling,
    WritingResumed: _writing_resumed,
    LogThinned: lambda batch, event: batch.set(thinned={**batch.state.thinned, event.src: event}),
    HostMemoryRunsOut: lambda batch, event: batch.set(memory_runs_out=event),
    MemoryReturned: lambda batch, event: batch.set(memory_returned=event),
    NvmeMeasured: lambda batch, event: batch.set(nvme=event),
}
