"""What is known of one rank, and how each event of its own changes that."""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from llmtop.profiler.fold.pace import Pace
from llmtop.profiler.record.checkpointevents import CheckpointLoaded
from llmtop.profiler.record.events import (
    BaselineMeasured,
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
from llmtop.profiler.record.scriptevents import RankDetached

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


class RankState(Struct, frozen=True, kw_only=True):
    rank: int
    pid: int | None = None
    replaced_at: float | None = None
    """Wall clock at which this process took the place of one that had ended; None where it took none's."""
    stages: tuple[StageTime, ...] = ()
    ops_built: tuple[OpBuilt, ...] = ()
    weights_read: WeightsRead | None = None
    """How far the reading of weights is."""
    weights_loaded: WeightsLoaded | None = None
    baseline: BaselineMeasured | None = None
    model: ModelBuilt | None = None
    last_step: StepFinished | None = None
    phase_seconds: dict[str, float | None] = field(default_factory=dict)
    """Of the newest step that tells its phases."""
    steps_seen: int = 0
    """Steps since this process started."""
    peaks: dict[str, PhaseMemory] = field(default_factory=dict)
    """Phase to the largest readings of any step so far."""
    peaks_in_use: dict[str, PhaseMemory] = field(default_factory=dict)
    """The same of the steps in which the process kept no freed memory (CPU)."""
    in_use_unknown: bool = False
    """Whether the setting was changed after those steps: what the process holds since then the largest
    setting may have freed, and what this one uses is not told."""
    phase_totals: dict[str, PhaseTotal] = field(default_factory=dict)
    """Phase to its time after warm-up."""
    untold_steps: int = 0
    """Steps after warm-up that tell none of their phases."""
    step_total: PhaseTotal = PhaseTotal()
    """Whole steps after warm-up."""
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
    detached: RankDetached | None = None
    """Of a script: why its process is not watched any more."""

    @property
    def tells_no_peak(self) -> bool:
        """On the CPU kind: what this setting uses is not to be told from what the process keeps."""
        return self.in_use_unknown and not self.peaks_in_use

    @property
    def told_steps(self) -> int:
        """Steps after warm-up that tell their phases."""
        return max((total.steps for total in self.phase_totals.values()), default=0)

    @property
    def seen_in_use(self) -> tuple[str, int] | None:
        """The classified moment at which most was in use, and how much: resident without what the heap kept
        (CPU)."""
        known = [
            (moment, event.total_bytes - event.components["fragmentation"])
            for moment, event in self.classified.items()
            if event.total_bytes is not None and "fragmentation" in event.components
        ]
        return max(known, key=lambda seen: seen[1], default=None)


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
        in_use_unknown=rank.in_use_unknown or bool(rank.peaks_in_use),
        phase_totals={},
        untold_steps=0,
        step_total=PhaseTotal(),
        alone=Pace(),
        classified={},
        peaks_classified={},
    )


def peaks_so_far(rank: RankState) -> dict[int, int]:
    """Setting to the largest peak of any phase of its steps; of what was in use where that is told."""
    if rank.tells_no_peak:
        most = rank.seen_in_use
        return rank.setting_peaks if most is None else {**rank.setting_peaks, rank.setting: most[1]}
    peaks = rank.peaks_in_use or rank.peaks
    seen = [memory.peak_bytes for memory in peaks.values() if memory.peak_bytes is not None]
    if not seen:
        return rank.setting_peaks
    return {**rank.setting_peaks, rank.setting: max(seen)}


def measure_outside(rank: RankState, event: OutsideMeasured) -> RankState:
    return replace(rank, outside={**rank.outside, event.moment: event})


def larger(first: int | None, second: int | None) -> int | None:
    """The larger of two readings, of which either may be unknown."""
    if first is None or second is None:
        return second if first is None else first
    return max(first, second)
