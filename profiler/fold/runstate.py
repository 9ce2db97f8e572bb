"""The one fold: events in, one immutable `RunState` out.

Live view, replay and report all call `fold`; there is no other road from a log to what is shown.
Logs of different writers are merged by time, but only as far as they have been read, so no handler
relies on an order between two writers: a late line of a rank never undoes what its end has said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from llmtop.profiler.fold import changestate, rankstate
from llmtop.profiler.fold.changestate import Changes
from llmtop.profiler.fold.energy import EnergyUse, add_energy
from llmtop.profiler.fold.memorytrail import MemoryTrail, TrailBuilder
from llmtop.profiler.fold.rankstate import PhaseTotal, RankState, StageTime, larger
from llmtop.profiler.fold.readingsfold import count_throttles, first_ecc, lost_devices, raise_peaks
from llmtop.profiler.fold.series import Series, SeriesBuilder
from llmtop.profiler.fold.stepfold import StepFolder
from llmtop.profiler.record.changeevents import (
    ChangeApplied,
    ChangeAsked,
    ChangeRefused,
    RestageBegan,
    Restaged,
    RestageFailed,
)
from llmtop.profiler.record.deviceevents import Topology
from llmtop.profiler.record.events import (
    AnyEvent,
    BaselineMeasured,
    CheckpointLoaded,
    CheckpointRefused,
    CheckpointSaved,
    Compiling,
    ControlAnswered,
    HangSuspected,
    HardwareSampled,
    KernelsSeen,
    MemoryClassified,
    ModelBuilt,
    NvmeMeasured,
    OpBuilt,
    OutsideMeasured,
    PeakClassified,
    RankExited,
    RankFailed,
    RankFinished,
    RankStarted,
    RunEnded,
    RunStarted,
    StageBegan,
    StageFinished,
    StepFinished,
    TopologySeen,
    WeightsLoaded,
    WeightsRead,
    XidSeen,
)

__all__ = ["ENDED", "PhaseTotal", "RankState", "RunState", "Series", "StageTime", "Status", "fold", "rank_of"]

Status = Literal["starting", "running", "stopping", "completed", "stopped", "failed", "out_of_memory", "lost"]
"""`lost`: the supervisor is gone and wrote no end; only the reader of a run directory can tell."""

HISTORY_SAMPLES = 300
RECENT_STEPS = 64


class RunState(Struct, frozen=True, kw_only=True):
    run_id: str = ""
    name: str = ""
    status: Status = "starting"
    supervisor_pid: int | None = None
    host: str = ""
    llmtop_version: str = ""
    world_size: int = 1
    started: float | None = None
    """Wall clock."""
    ended: RunEnded | None = None
    now: float | None = None
    """Wall clock of the newest event folded."""
    ranks: dict[int, RankState] = field(default_factory=dict)
    series: Series = Series()
    recent_steps: tuple[StepFinished, ...] = ()
    """The newest steps of rank 0 whole, the oldest first."""
    steps_finished: int = 0
    """Largest step that rank 0 finished."""
    skipped_steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    """Of the newest step; None when that one is not finite."""
    nonfinite_losses: int = 0
    """Steps of rank 0 whose loss was not a number."""
    first_nonfinite_step: int | None = None
    first_loss_scale: float | None = None
    hardware: HardwareSampled | None = None
    """Newest sample."""
    hardware_history: tuple[HardwareSampled, ...] = ()
    """The last few hundred samples, oldest first."""
    memory_trail: MemoryTrail = MemoryTrail()
    """Memory since the run began."""
    hardware_samples: int = 0
    throttled_samples: dict[int, dict[str, int]] = field(default_factory=dict)
    """Device index to throttle reason to the number of samples that showed it."""
    peak_device_bytes: dict[int, int] = field(default_factory=dict)
    """Device index to the largest NVML reading."""
    peak_pss_bytes: dict[int, int] = field(default_factory=dict)
    """Rank to its process tree's largest PSS."""
    peak_rss_bytes: dict[int, int] = field(default_factory=dict)
    peak_host_bytes: int | None = None
    """Largest use of the machine's memory: total minus available."""
    peak_cgroup_bytes: int | None = None
    peak_swap_bytes: int | None = None
    checkpoints: tuple[CheckpointSaved, ...] = ()
    last_saved: CheckpointSaved | None = None
    """The newest of any kind, also of those that were made for a relaunch and are gone."""
    checkpoints_refused: tuple[CheckpointRefused, ...] = ()
    controls: tuple[ControlAnswered, ...] = ()
    changes: Changes = Changes()
    """What was changed while it ran, and which setting is in force."""
    energy: EnergyUse = EnergyUse()
    topology: Topology | None = None
    xids: tuple[XidSeen, ...] = ()
    """The first of each device and number."""
    xid_counts: dict[int, int] = field(default_factory=dict)
    """Device index to the number of Xid errors."""
    first_ecc_uncorrected: dict[int, int] = field(default_factory=dict)
    """Device index to the first reading of that count, which goes on from before the run."""
    lost_devices: frozenset[int] = frozenset()
    """Devices that any sample found gone."""
    hang_seconds: float | None = None
    """Set while the supervisor suspects a hang."""
    hang_at: float | None = None
    """Wall clock of that suspicion."""
    compiling: str | None = None
    """What is being compiled, while it is."""
    compiling_at: float | None = None
    compiled: tuple[str, ...] = ()
    """Everything that was compiled during the run."""
    nvme: NvmeMeasured | None = None
    """What the folder of an NVMe offload can do, measured before the ranks started."""
    skipped_lines: int = 0
    """Lines of unknown kind or newer version."""


ENDED: frozenset[Status] = frozenset({"completed", "stopped", "failed", "out_of_memory", "lost"})
"""Statuses after which nothing more happens."""


def fold(state: RunState, events: Iterable[AnyEvent]) -> RunState:
    """Apply events in order. Pure: the same events give the same state, however they are cut."""
    batch = _Batch(state)
    for event in events:
        batch.apply(event)
    return batch.freeze()


@lru_cache(maxsize=4096)
def rank_of(src: str) -> int | None:
    """The rank that wrote an event, from its `src`; None for the supervisor and the sampler."""
    number = src.removeprefix("rank")
    return int(number) if number != src and number.isdecimal() else None


class _Batch:
    """One call of `fold`: what grows with the run is kept mutable inside and frozen at the end.

    A batch costs its own events plus one copy of the bounded state, so folding is linear.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._now = state.now
        self._ranks: dict[int, RankState] | None = None
        self._series: SeriesBuilder | None = None
        self._trail: TrailBuilder | None = None
        self._steps: dict[int, StepFolder] = {}
        """Ranks with steps that are not in `_ranks` yet."""

    def apply(self, event: AnyEvent) -> None:
        if self._now is None or event.t > self._now:
            self._now = event.t
        _HANDLERS[type(event)](self, event)

    def freeze(self) -> RunState:
        self._settle(*self._steps)
        changes: dict[str, Any] = {}
        if self._now != self.state.now:
            changes["now"] = self._now
        if self._ranks is not None:
            changes["ranks"] = self._ranks
        if self._series is not None:
            changes["series"] = self._series.freeze()
        if self._trail is not None:
            changes["memory_trail"] = self._trail.freeze()
        return replace(self.state, **changes) if changes else self.state

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def _settle(self, *ranks: int) -> None:
        """What a rank's steps have changed becomes part of it."""
        for number in ranks:
            folder = self._steps.pop(number, None)
            if folder is not None:
                self.set_rank(folder.freeze())

    def add_step(self, number: int, event: StepFinished) -> None:
        folder = self._steps.get(number)
        if folder is None:
            folder = self._steps[number] = StepFolder(self.rank(number))
        folder.add(event)

    def rank(self, rank: int) -> RankState:
        self._settle(rank)
        known = self.state.ranks if self._ranks is None else self._ranks
        return known.get(rank) or RankState(rank=rank)

    def set_rank(self, rank: RankState) -> None:
        ranks = self.state.changes.ranks
        if ranks is not None and rank.rank >= ranks:
            return  # a late line of a rank that the run has no more
        if self._ranks is None:
            self._ranks = dict(self.state.ranks)
        self._ranks[rank.rank] = rank

    def drop_ranks(self, world_size: int) -> None:
        self._settle(*self._steps)
        known = self.state.ranks if self._ranks is None else self._ranks
        self._ranks = {number: rank for number, rank in known.items() if number < world_size}

    def add_point(self, event: StepFinished) -> None:
        if self._series is None:
            self._series = SeriesBuilder(self.state.series)
        self._series.add(event)

    def add_sample(self, event: HardwareSampled) -> None:
        if self._trail is None:
            self._trail = TrailBuilder(self.state.memory_trail)
        self._trail.add(event)


# --- the supervisor's events ----------------------------------------------------------------------


def _run_started(batch: _Batch, event: RunStarted) -> None:
    batch.set(
        run_id=event.run_id,
        name=event.name,
        supervisor_pid=event.pid,
        host=event.host,
        world_size=event.world_size,
        llmtop_version=event.llmtop_version,
        started=event.t if batch.state.started is None else batch.state.started,
    )


def _rank_started(batch: _Batch, event: RankStarted) -> None:
    rank = batch.rank(event.rank)
    if rank.exited is not None and rank.exited.pid != event.pid:
        # A new process in the place of one that ended: nothing of the old one is true of it.
        rank = RankState(rank=event.rank, setting_peaks=rankstate.peaks_so_far(rank))
    batch.set_rank(replace(rank, pid=event.pid, setting=event.setting))


def _rank_exited(batch: _Batch, event: RankExited) -> None:
    batch.set_rank(replace(batch.rank(event.rank), exited=event, pid=event.pid))


def _run_ended(batch: _Batch, event: RunEnded) -> None:
    batch.set(status=event.state, ended=event, compiling=None, compiling_at=None)


def _control_answered(batch: _Batch, event: ControlAnswered) -> None:
    state = batch.state
    stops = event.action == "stop" and event.answer != "refused" and state.status in ("starting", "running")
    batch.set(controls=(*state.controls, event), status="stopping" if stops else state.status)


# --- changes to a live run ------------------------------------------------------------------------


def _change(fold_one: Callable[[Changes, Any], Changes]) -> Callable[[_Batch, Any], None]:
    return lambda batch, event: batch.set(changes=fold_one(batch.state.changes, event))


def _change_applied(batch: _Batch, event: ChangeApplied) -> None:
    number, before = rank_of(event.src), batch.state.changes
    changes = changestate.apply(before, event)
    if changes is not before:
        batch.set(changes=changes, peak_device_bytes={})
    if number is not None and not event.problem:
        batch.set_rank(rankstate.change_setting(batch.rank(number), event.setting))


def _restage_began(batch: _Batch, event: RestageBegan) -> None:
    _relaunched(batch, changestate.begin_restage(batch.state.changes, event), event.world_size)


def _restage_failed(batch: _Batch, event: RestageFailed) -> None:
    _relaunched(batch, changestate.fail_restage(batch.state.changes, event), event.world_size)


def _relaunched(batch: _Batch, changes: Changes, world_size: int) -> None:
    """All ranks have ended, and others take their place."""
    status = "starting" if batch.state.status == "running" else batch.state.status
    batch.set(changes=changes, status=status, world_size=world_size, peak_device_bytes={})
    batch.drop_ranks(world_size)


# --- trouble --------------------------------------------------------------------------------------


def _hang_suspected(batch: _Batch, event: HangSuspected) -> None:
    batch.set(hang_seconds=event.quiet_seconds, hang_at=event.t)


def _compiling(batch: _Batch, event: Compiling) -> None:
    compiled = batch.state.compiled
    batch.set(
        compiling=event.what,
        compiling_at=event.t,
        compiled=compiled if event.what in compiled else (*compiled, event.what),
    )


def _xid_seen(batch: _Batch, event: XidSeen) -> None:
    state = batch.state
    counts = {**state.xid_counts, event.device: state.xid_counts.get(event.device, 0) + 1}
    is_new = not any((seen.device, seen.xid) == (event.device, event.xid) for seen in state.xids)
    batch.set(xid_counts=counts, xids=(*state.xids, event) if is_new else state.xids)


# --- the sampler's --------------------------------------------------------------------------------


def _hardware_sampled(batch: _Batch, event: HardwareSampled) -> None:
    batch.add_sample(event)
    state, host = batch.state, event.host
    used = None
    if host.memory_total_bytes is not None and host.memory_available_bytes is not None:
        used = host.memory_total_bytes - host.memory_available_bytes
    batch.set(
        hardware=event,
        hardware_history=(*state.hardware_history[1 - HISTORY_SAMPLES :], event),
        hardware_samples=state.hardware_samples + 1,
        throttled_samples=count_throttles(state.throttled_samples, event),
        energy=add_energy(state.energy, event),
        first_ecc_uncorrected=first_ecc(state.first_ecc_uncorrected, event),
        lost_devices=lost_devices(state.lost_devices, event),
        peak_device_bytes=raise_peaks(
            state.peak_device_bytes, ((d.index, d.memory_used_bytes) for d in event.devices)
        ),
        peak_pss_bytes=raise_peaks(state.peak_pss_bytes, ((p.rank, p.pss_bytes) for p in event.processes)),
        peak_rss_bytes=raise_peaks(state.peak_rss_bytes, ((p.rank, p.rss_bytes) for p in event.processes)),
        peak_host_bytes=larger(state.peak_host_bytes, used),
        peak_cgroup_bytes=larger(state.peak_cgroup_bytes, host.cgroup_used_bytes),
        peak_swap_bytes=larger(state.peak_swap_bytes, host.swap_used_bytes),
    )


# --- a rank's -------------------------------------------------------------------------------------


def _of_rank(change: Callable[[RankState, Any], RankState]) -> Callable[[_Batch, Any], None]:
    """A handler that changes only the state of the rank that wrote the event."""

    def handle(batch: _Batch, event: AnyEvent) -> None:
        number = rank_of(event.src)
        if number is not None:
            batch.set_rank(change(batch.rank(number), event))

    return handle


_finish_stage = _of_rank(rankstate.finish_stage)


def _stage_finished(batch: _Batch, event: StageFinished) -> None:
    _finish_stage(batch, event)
    # The stages that build ops; the others of a second rank may end while the first one compiles.
    if event.stage in ("process_group", "op_build", "engine", "partition", "first_step"):
        _clear_compiling(batch, event.t)


def _clear_compiling(batch: _Batch, t: float) -> None:
    at = batch.state.compiling_at
    if at is not None and t >= at:
        batch.set(compiling=None, compiling_at=None)


def _checkpoint_saved(batch: _Batch, event: CheckpointSaved) -> None:
    known = batch.state.checkpoints
    batch.set(last_saved=event, checkpoints=known if event.passing else (*known, event))


def _rank_finished(batch: _Batch, event: RankFinished) -> None:
    number = rank_of(event.src)
    if number is not None:
        batch.set_rank(replace(batch.rank(number), finished=event))
        peaks = raise_peaks(batch.state.peak_rss_bytes, [(number, event.peak_rss_bytes)])
        batch.set(peak_rss_bytes=peaks)


def _step_finished(batch: _Batch, event: StepFinished) -> None:
    number = rank_of(event.src)
    if number is not None:
        batch.add_step(number, event)
    state = batch.state
    if state.status == "starting":
        batch.set(status="running")
    if state.hang_at is not None and event.t >= state.hang_at:
        batch.set(hang_seconds=None, hang_at=None)
    if state.compiling_at is not None:
        _clear_compiling(batch, event.t)
    if number == 0:
        _step_of_run(batch, event)


def _step_of_run(batch: _Batch, event: StepFinished) -> None:
    state = batch.state
    batch.add_point(event)
    batch.set(energy=state.energy.with_step(event))
    state = batch.state
    changes: dict[str, Any] = {
        "steps_finished": max(state.steps_finished, event.step),
        "last_loss": event.loss,
        "recent_steps": (*state.recent_steps[1 - RECENT_STEPS :], event),
    }
    if event.skipped:
        changes["skipped_steps"] = state.skipped_steps + 1
    if event.loss is None:
        changes["nonfinite_losses"] = state.nonfinite_losses + 1
        if state.first_nonfinite_step is None:
            changes["first_nonfinite_step"] = event.step
    elif state.first_loss is None:
        changes["first_loss"] = event.loss
    if state.first_loss_scale is None and event.loss_scale is not None:
        changes["first_loss_scale"] = event.loss_scale
    batch.set(**changes)


_HANDLERS: dict[type, Callable[[_Batch, Any], None]] = {
    RunStarted: _run_started,
    RankStarted: _rank_started,
    RankExited: _rank_exited,
    RunEnded: _run_ended,
    ControlAnswered: _control_answered,
    ChangeAsked: _change(changestate.ask),
    ChangeRefused: _change(changestate.refuse),
    ChangeApplied: _change_applied,
    RestageBegan: _restage_began,
    Restaged: _change(changestate.finish_restage),
    RestageFailed: _restage_failed,
    HangSuspected: _hang_suspected,
    Compiling: _compiling,
    XidSeen: _xid_seen,
    TopologySeen: lambda batch, event: batch.set(topology=event.topology),
    HardwareSampled: _hardware_sampled,
    StageBegan: _of_rank(rankstate.begin_stage),
    StageFinished: _stage_finished,
    OpBuilt: _of_rank(lambda rank, event: replace(rank, ops_built=(*rank.ops_built, event))),
    WeightsRead: _of_rank(lambda rank, event: replace(rank, weights_read=event)),
    WeightsLoaded: _of_rank(lambda rank, event: replace(rank, weights_loaded=event)),
    NvmeMeasured: lambda batch, event: batch.set(nvme=event),
    BaselineMeasured: _of_rank(lambda rank, event: replace(rank, baseline=event)),
    ModelBuilt: _of_rank(lambda rank, event: replace(rank, model=event)),
    MemoryClassified: _of_rank(rankstate.classify),
    PeakClassified: _of_rank(rankstate.classify_peak),
    OutsideMeasured: _of_rank(rankstate.measure_outside),
    KernelsSeen: _of_rank(lambda rank, event: replace(rank, kernels=event)),
    StepFinished: _step_finished,
    CheckpointSaved: _checkpoint_saved,
    CheckpointRefused: lambda batch, event: batch.set(
        checkpoints_refused=(*batch.state.checkpoints_refused, event)
    ),
    CheckpointLoaded: _of_rank(lambda rank, event: replace(rank, checkpoint_loaded=event)),
    RankFinished: _rank_finished,
    RankFailed: _of_rank(lambda rank, event: replace(rank, failed=event)),
}
