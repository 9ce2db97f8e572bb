"""What is known of one rank, and how each event of its own changes that."""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from llmtop.profiler.events import (
    BaselineMeasured,
    CheckpointLoaded,
    KernelsSeen,
    MemoryClassified,
    ModelBuilt,
    OpBuilt,
    OutsideMeasured,
    PeakClassified,
    PhaseMemory,
    RankExited,
    RankFailed,
    RankFinished,
    StageBegan,
    StageFinished,
    StepFinished,
    WeightsLoaded,
    WeightsRead,
)

PACE_BUCKETS = 32
WARMUP_STEPS = 2
"""The first steps compile, allocate and fill caches; steady figures leave them out."""


class StageTime(Struct, frozen=True, kw_only=True):
    stage: str
    began: float
    """Wall clock."""
    seconds: float | None = None
    """None while it goes on."""


class PhaseTotal(Struct, frozen=True, kw_only=True):
    """One phase of a rank, summed over the steps after warm-up that measured it."""

    seconds: float = 0.0
    steps: int = 0


class Pace(Struct, frozen=True, kw_only=True):
    """What a rank does alone in a step, over all steps after warm-up, in buckets of equal number."""

    sums: tuple[float, ...] = ()
    """Seconds of the steps in each bucket; the last one may be of fewer steps."""
    steps: int = 0
    stride: int = 1
    first_step: int = 0
    last_step: int = 0

    def mean(self, first: int, end: int) -> float:
        """Of the steps in the buckets from `first` up to `end`."""
        steps = min(self.steps, end * self.stride) - first * self.stride
        return sum(self.sums[first:end]) / steps

    def coarser(self, stride: int) -> Pace:
        """The same in larger buckets; `stride` is this one's times a power of two."""
        pace = self
        while pace.stride < stride:
            sums = (*pace.sums, 0.0) if len(pace.sums) % 2 else pace.sums
            joined = tuple(a + b for a, b in zip(sums[::2], sums[1::2], strict=True))
            pace = replace(pace, sums=joined, stride=2 * pace.stride)
        return pace

    def began(self, bucket: int) -> int:
        """About the first step of a bucket; steps that are left out of a pace make it earlier."""
        return self.first_step + bucket * self.stride


class RankState(Struct, frozen=True, kw_only=True):
    rank: int
    pid: int | None = None
    stages: tuple[StageTime, ...] = ()
    ops_built: tuple[OpBuilt, ...] = ()
    weights_read: WeightsRead | None = None
    """How far the reading of weights is."""
    weights_loaded: WeightsLoaded | None = None
    baseline: BaselineMeasured | None = None
    model: ModelBuilt | None = None
    last_step: StepFinished | None = None
    steps_seen: int = 0
    """Steps since this process started."""
    peaks: dict[str, PhaseMemory] = field(default_factory=dict)
    """Phase to the largest readings of any step so far."""
    peaks_in_use: dict[str, PhaseMemory] = field(default_factory=dict)
    """The same of the steps in which the process kept no freed memory (CPU)."""
    phase_totals: dict[str, PhaseTotal] = field(default_factory=dict)
    """Phase to its time after warm-up."""
    alone: Pace = Pace()
    """Loading and forward, in which a rank waits for no other below ZeRO-3."""
    classified: dict[str, MemoryClassified] = field(default_factory=dict)
    """Moment to its newest classification."""
    peaks_classified: dict[str, PeakClassified] = field(default_factory=dict)
    """Phase to what its largest traced peak held (CUDA)."""
    outside: dict[str, OutsideMeasured] = field(default_factory=dict)
    """Moment of the rank's life to the device's reading."""
    kernels: KernelsSeen | None = None
    """What the profiler saw run, once it has looked (rank 0)."""
    checkpoint_loaded: CheckpointLoaded | None = None
    """What this process went on from; None for one that began anew."""
    setting: int = 0
    """Number of the setting that it trains on; its peaks and times are those of steps on it."""
    setting_peaks: dict[int, int] = field(default_factory=dict)
    """Setting to the largest peak of its steps, for the settings before."""
    exited: RankExited | None = None
    failed: RankFailed | None = None
    finished: RankFinished | None = None


def begin_stage(rank: RankState, event: StageBegan) -> RankState:
    return replace(rank, stages=(*rank.stages, StageTime(stage=event.stage, began=event.t)))


def finish_stage(rank: RankState, event: StageFinished) -> RankState:
    for at in reversed(range(len(rank.stages))):
        stage = rank.stages[at]
        if stage.stage == event.stage and stage.seconds is None:
            finished = replace(stage, seconds=event.seconds)
            return replace(rank, stages=(*rank.stages[:at], finished, *rank.stages[at + 1 :]))
    lone = StageTime(stage=event.stage, began=event.t - event.seconds, seconds=event.seconds)
    return replace(rank, stages=(*rank.stages, lone))


def classify(rank: RankState, event: MemoryClassified) -> RankState:
    return replace(rank, classified={**rank.classified, event.moment: event})


def classify_peak(rank: RankState, event: PeakClassified) -> RankState:
    known = rank.peaks_classified.get(event.phase)
    if known is not None and known.total_bytes > event.total_bytes:
        return rank
    return replace(rank, peaks_classified={**rank.peaks_classified, event.phase: event})


def change_setting(rank: RankState, setting: int) -> RankState:
    """From here on another setting is measured: what the old one reached says nothing about it."""
    return replace(
        rank,
        setting=setting,
        setting_peaks=peaks_so_far(rank),
        peaks={},
        peaks_in_use={},
        phase_totals={},
        alone=Pace(),
        classified={},
        peaks_classified={},
    )


def peaks_so_far(rank: RankState) -> dict[int, int]:
    """Setting to the largest peak of any phase of its steps."""
    seen = [memory.peak_bytes for memory in rank.peaks.values() if memory.peak_bytes is not None]
    if not seen:
        return rank.setting_peaks
    return {**rank.setting_peaks, rank.setting: max(seen)}


def measure_outside(rank: RankState, event: OutsideMeasured) -> RankState:
    return replace(rank, outside={**rank.outside, event.moment: event})


def finish_step(rank: RankState, event: StepFinished) -> RankState:
    return replace(
        rank,
        last_step=event,
        steps_seen=rank.steps_seen + 1,
        peaks=_raised_peaks(rank.peaks, event),
        # The record of kernels takes memory of its own.
        peaks_in_use=_raised_peaks(rank.peaks_in_use, event)
        if event.in_use_only and not event.profiled
        else rank.peaks_in_use,
        phase_totals=_added_times(rank.phase_totals, event)
        if rank.steps_seen >= WARMUP_STEPS and not event.profiled
        else rank.phase_totals,
        alone=_paced(rank.alone, event)
        if rank.steps_seen >= WARMUP_STEPS and not event.profiled
        else rank.alone,
    )


def _paced(pace: Pace, event: StepFinished) -> Pace:
    forward = event.phase_seconds.get("forward")
    if forward is None:
        return pace
    seconds = forward + (event.phase_seconds.get("data") or 0.0)
    sums, stride = pace.sums, pace.stride
    if pace.steps % stride:
        sums = (*sums[:-1], sums[-1] + seconds)
    else:
        if len(sums) == PACE_BUCKETS:
            sums = tuple(a + b for a, b in zip(sums[::2], sums[1::2], strict=True))
            stride *= 2
        sums = (*sums, seconds)
    return Pace(
        sums=sums,
        steps=pace.steps + 1,
        stride=stride,
        first_step=pace.first_step or event.step,
        last_step=event.step,
    )


def _raised_peaks(peaks: dict[str, PhaseMemory], event: StepFinished) -> dict[str, PhaseMemory]:
    for phase, memory in event.phase_memory.items():
        old = peaks.get(phase, PhaseMemory())
        new = PhaseMemory(
            allocated_bytes=larger(old.allocated_bytes, memory.allocated_bytes),
            peak_bytes=larger(old.peak_bytes, memory.peak_bytes),
            reserved_bytes=larger(old.reserved_bytes, memory.reserved_bytes),
        )
        if new != old:
            peaks = {**peaks, phase: new}
    return peaks


def _added_times(totals: dict[str, PhaseTotal], event: StepFinished) -> dict[str, PhaseTotal]:
    totals = dict(totals)
    for phase, seconds in event.phase_seconds.items():
        if seconds is not None:
            so_far = totals.get(phase, PhaseTotal())
            totals[phase] = PhaseTotal(seconds=so_far.seconds + seconds, steps=so_far.steps + 1)
    return totals


def larger(first: int | None, second: int | None) -> int | None:
    """The larger of two readings, of which either may be unknown."""
    if first is None or second is None:
        return second if first is None else first
    return max(first, second)
