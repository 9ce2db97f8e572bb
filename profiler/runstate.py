"""The one fold: events in, one immutable `RunState` out.

Live view, replay and report all call `fold`; there is no other road from a log to what is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, field

from llmtop.profiler.events import (
    AnyEvent,
    BaselineMeasured,
    CheckpointSaved,
    ControlAnswered,
    HardwareSampled,
    MemoryClassified,
    ModelBuilt,
    PhaseMemory,
    RankExited,
    RankFailed,
    RankFinished,
    RunEnded,
    StepFinished,
)

Status = Literal["starting", "running", "stopping", "completed", "stopped", "failed", "out_of_memory", "lost"]
"""`lost`: the supervisor is gone and wrote no end; only the reader of a run directory can tell."""


class StageTime(Struct, frozen=True, kw_only=True):
    stage: str
    began: float
    """Wall clock."""
    seconds: float | None = None
    """None while it goes on."""


class RankState(Struct, frozen=True, kw_only=True):
    rank: int
    pid: int | None = None
    stages: tuple[StageTime, ...] = ()
    baseline: BaselineMeasured | None = None
    model: ModelBuilt | None = None
    last_step: StepFinished | None = None
    peaks: dict[str, PhaseMemory] = field(default_factory=dict)
    """Phase to the largest readings of any step so far."""
    classified: dict[str, MemoryClassified] = field(default_factory=dict)
    """Moment to its newest classification."""
    exited: RankExited | None = None
    failed: RankFailed | None = None
    finished: RankFinished | None = None


class Series(Struct, frozen=True, kw_only=True):
    """Rank 0's steps as columns, oldest first; thinned by halving when long, so first and last stay."""

    steps: tuple[int, ...] = ()
    times: tuple[float, ...] = ()
    losses: tuple[float | None, ...] = ()
    learning_rates: tuple[float | None, ...] = ()
    grad_norms: tuple[float | None, ...] = ()
    step_seconds: tuple[float, ...] = ()
    tokens_per_second: tuple[float, ...] = ()


class RunState(Struct, frozen=True, kw_only=True):
    run_id: str = ""
    name: str = ""
    status: Status = "starting"
    supervisor_pid: int | None = None
    host: str = ""
    world_size: int = 1
    started: float | None = None
    """Wall clock."""
    ended: RunEnded | None = None
    now: float | None = None
    """Wall clock of the newest event folded."""
    ranks: dict[int, RankState] = field(default_factory=dict)
    series: Series = Series()
    steps_finished: int = 0
    """Largest step that rank 0 finished."""
    skipped_steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    hardware: HardwareSampled | None = None
    """Newest sample."""
    hardware_history: tuple[HardwareSampled, ...] = ()
    """The last few hundred samples, oldest first."""
    peak_device_bytes: dict[int, int] = field(default_factory=dict)
    """Device index to the largest NVML reading."""
    peak_pss_bytes: dict[int, int] = field(default_factory=dict)
    """Rank to its process tree's largest PSS."""
    peak_rss_bytes: dict[int, int] = field(default_factory=dict)
    checkpoints: tuple[CheckpointSaved, ...] = ()
    controls: tuple[ControlAnswered, ...] = ()
    hang_seconds: float | None = None
    """Set while the supervisor suspects a hang."""
    compiling: str | None = None
    """What is being compiled, while it is."""
    skipped_lines: int = 0
    """Lines of unknown kind or newer version."""


def fold(state: RunState, events: Iterable[AnyEvent]) -> RunState:
    """Apply events in order. Pure: the same events give the same state, however they are cut."""
    raise NotImplementedError
