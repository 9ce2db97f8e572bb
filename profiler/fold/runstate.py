"""What is known of a run: one immutable value, which live view, replay and report all show."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from llmtop.profiler.fold.changestate import Changes
from llmtop.profiler.fold.energy import EnergyUse
from llmtop.profiler.fold.memorytrail import MemoryTrail
from llmtop.profiler.fold.rankstate import RankState
from llmtop.profiler.fold.series import Series, before_point, from_point
from llmtop.profiler.record.checkpointevents import CheckpointRefused, CheckpointSaved
from llmtop.profiler.record.deviceevents import HostSample, Topology
from llmtop.profiler.record.endevents import MemoryReturned
from llmtop.profiler.record.events import (
    ControlAnswered,
    HardwareSampled,
    LogThinned,
    NvmeMeasured,
    RunEnded,
    StepFinished,
    WritingResumed,
    XidSeen,
)
from llmtop.profiler.record.failureevents import HostMemoryRunsOut
from llmtop.profiler.record.hostclock import HostClock
from llmtop.profiler.record.leftovers import Left
from llmtop.profiler.record.remote import command_for, name_for
from llmtop.profiler.record.scriptevents import RunDescribed
from llmtop.profiler.record.snapshotevents import SnapshotAsked, SnapshotTaken

Status = Literal[
    "starting",
    "running",
    "stopping",
    "completed",
    "stopped",
    "gone",
    "failed",
    "out_of_memory",
    "lost",
    "exported",
]
"""`gone`: as in `RunEnd`; `lost`: the supervisor is gone and wrote no end; `exported`: it came from an
archive that was made while the run went on. Only the reader of a run directory can tell the last two."""

ENDED: frozenset[Status] = frozenset(
    {"completed", "stopped", "gone", "failed", "out_of_memory", "lost", "exported"}
)
"""Statuses after which nothing more happens here."""
HISTORY_SAMPLES = 300
"""How many samples of the hardware are kept whole."""
RECENT_STEPS = 64


class RunState(Struct, frozen=True, kw_only=True):
    run_id: str = ""
    name: str = ""
    status: Status = "starting"
    supervisor_pid: int | None = None
    host: str = ""
    llmtop_version: str = ""
    world_size: int = 1
    """Ranks of the whole job."""
    first_rank: int = 0
    """The lowest of the ranks that this is about: its steps are the run's, as far as these tell of it."""
    host_ranks: int | None = None
    """How many ranks this is about, those of one host; None: all of the job's."""
    clocks: dict[str, HostClock] = field(default_factory=dict)
    """Hosts to what is taken off the stamps of their logs; only the reader of a run directory can tell."""
    started: float | None = None
    """Wall clock, as in all events that of the launching machine."""
    paused_seconds: float = 0.0
    """Between its ends and its going on after them: no part of the time that it took."""
    went_on: float | None = None
    """Wall clock at which it was gone on with after its newest end; None: it never was."""
    goes_on_after: int | None = None
    """The step that its supervisor found to go on after when it started, or its first rank has loaded then, 0
    for none; None: not known."""
    ended: RunEnded | None = None
    memory_returned: MemoryReturned | None = None
    """What its GPUs have in use since no process of it is left."""
    now: float | None = None
    """Wall clock of the newest event folded."""
    ranks: dict[int, RankState] = field(default_factory=dict)
    series: Series = Series()
    recent_steps: tuple[StepFinished, ...] = ()
    """The newest `RECENT_STEPS` of the first rank whole, the oldest first."""
    steps_finished: int = 0
    """Largest step that the first rank finished; of a run that was gone on with, since then: that which it
    went on after until it has made one, as far as its supervisor has told which."""
    steps_made: int = 0
    """By the first rank: also those that it made again, where it was gone on with from an earlier one."""
    skipped_steps: int = 0
    """Of those made."""
    first_loss: float | None = None
    last_loss: float | None = None
    """Of the newest step; None when that one is not finite, and where rank 0 is not, which alone tells it."""
    nonfinite_losses: int = 0
    """Steps of rank 0 whose loss was not a number."""
    first_nonfinite_step: int | None = None
    first_loss_scale: float | None = None
    hardware: HardwareSampled | None = None
    """Newest sample."""
    first_host: HostSample | None = None
    """Of the first sample: what counters of the machine said before the run."""
    hardware_history: tuple[HardwareSampled, ...] = ()
    """The last `HISTORY_SAMPLES`, oldest first."""
    memory_trail: MemoryTrail = MemoryTrail()
    """Memory since the run began."""
    hardware_samples: int = 0
    throttled_samples: dict[int, dict[str, int]] = field(default_factory=dict)
    """Device index to throttle reason to the number of samples that showed it."""
    peak_device_bytes: dict[int, int] = field(default_factory=dict)
    """Device index to the largest NVML reading."""
    peak_pss_bytes: dict[int, int] = field(default_factory=dict)
    """Rank to its process tree's largest PSS, without compilers; so the next one."""
    peak_rss_bytes: dict[int, int] = field(default_factory=dict)
    peak_compiler_bytes: dict[int, int] = field(default_factory=dict)
    """Rank to the most that compilers of ops held below it."""
    peak_host_bytes: int | None = None
    """Largest use of the machine's memory: total minus available."""
    peak_cgroup_bytes: int | None = None
    peak_swap_bytes: int | None = None
    checkpoints: tuple[CheckpointSaved, ...] = ()
    """Without those after the step that it was gone on with from: they were not there any more."""
    last_saved: CheckpointSaved | None = None
    """The newest of any kind, also of those that were made for a relaunch and are gone."""
    checkpoints_refused: tuple[CheckpointRefused, ...] = ()
    """Asked for and not written; without those for a relaunch, which is refused itself then."""
    controls: tuple[ControlAnswered, ...] = ()
    snapshots_asked: tuple[SnapshotAsked, ...] = ()
    snapshots: tuple[SnapshotTaken, ...] = ()
    """By all ranks; which of them, their source says."""
    changes: Changes = Changes()
    """What was changed while it ran, and which setting is in force."""
    description: RunDescribed | None = None
    """Of a script: what its spec and prediction follow from."""
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
    memory_runs_out: HostMemoryRunsOut | None = None
    """The newest forecast that the supervisor wrote down."""
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
    unwritable: str = ""
    """Why what happens cannot be recorded now, as on a full disk; only the reader of a run directory can
    tell."""
    imported: bool = False
    """It came from an archive and is only looked at; only the reader of a run directory can tell."""
    elsewhere: str = ""
    """The machine that has the run, as ssh is told; empty for this one. Only the reader can tell."""
    left: Left | None = None
    """Of a lost run of this machine: what is left of it, as far as the reader looked."""
    writing_resumed: tuple[WritingResumed, ...] = ()
    """The newest of each log that could not be written for a while."""
    thinned: dict[str, LogThinned] = field(default_factory=dict)
    """Of each log whose oldest part was thinned, by its source."""
    skipped_lines: int = 0
    """Lines of unknown kind or newer version."""

    @property
    def called(self) -> str:
        """What the run is called in commands here."""
        return name_for(self.run_id, self.elsewhere)

    def command(self, command: str, *words: str) -> str:
        """One of llmtop for this run, as it is called here."""
        return command_for(self.run_id, self.elsewhere, command, *words)

    @property
    def first(self) -> RankState | None:
        """The rank whose steps are the run's here; None until it has told something."""
        return self.ranks.get(self.first_rank)

    @property
    def setting_series(self) -> Series:
        """The steps on the setting in force, which may be none: what tells how fast that setting is."""
        return self.span_series(-1)

    def span_series(self, number: int) -> Series:
        """The steps on a setting, by its number among `changes.spans`; also those made anew since."""
        spans = self.changes.spans
        span, later = spans[number], spans[number:][1:]
        series = self.series
        if later:
            series = before_point(series, later[0].launch, later[0].launch_step)
        return from_point(series, span.launch, span.launch_step)

    @property
    def speed_series(self) -> Series:
        """The steps that tell how fast the run is: while it goes on those of the processes that are there
        now, on the setting in force, and none before these have made one; then `setting_series`."""
        if self.status in ENDED:
            return self.setting_series
        return from_point(self.setting_series, self.changes.launch, 0)

    def seconds_until(self, wall: float | None) -> float | None:
        """How long it has been under way by then, without what lay between an end and going on."""
        if self.started is None or wall is None:
            return None
        return max(0.0, wall - self.started - self.paused_seconds)

    @property
    def is_beginning(self) -> bool:
        """Whether it goes on, and has made no step since it was launched or gone on with."""
        return self.status not in ENDED and self.made_no_step

    @property
    def made_no_step(self) -> bool:
        """Whether it has made no step since it was launched or gone on with."""
        if self.went_on is None:
            return not self.steps_finished and not self.recent_steps
        return not self.recent_steps or self.recent_steps[-1].t < self.went_on

    @property
    def went_on_from(self) -> int | None:
        """The step of the state that its processes began with, 0 for none; None where nobody has told."""
        loaded = self.first.checkpoint_loaded if self.first is not None else None
        return loaded.step if loaded is not None else self.goes_on_after

    def is_of_before(self, t: float) -> bool:
        """Whether a line of that time is one of the processes before it was gone on with, which came late."""
        return self.went_on is not None and t < self.went_on

    @property
    def present_step(self) -> int | None:
        """The one that it stands at: where it was gone on with from an earlier one, that until a step was
        made since; None where it goes on and nobody has told which."""
        if self.went_on is None:
            return self.steps_finished
        if not self.made_no_step:
            return self.recent_steps[-1].step
        if self.status in ENDED and self.went_on_from is None:
            return self.steps_finished
        return self.went_on_from

    def step_of(self, rank: RankState) -> int:
        """The last step that a rank has made, before its first one that which its process began after."""
        if rank.last_step is not None:
            return rank.last_step.step
        if rank.checkpoint_loaded is not None:
            return rank.checkpoint_loaded.step
        return (self.goes_on_after or 0) if self.went_on is not None and self.made_no_step else 0

    @property
    def present_loss(self) -> float | None:
        """Of the step that it stands at; None where that is not finite, and where its processes have made
        none yet."""
        return None if self.made_no_step else self.last_loss

    @property
    def ranks_here(self) -> range:
        """Numbers of the ranks that this is about."""
        count = self.world_size if self.host_ranks is None else self.host_ranks
        return range(self.first_rank, self.first_rank + count)

    @property
    def unsaved(self) -> CheckpointRefused | None:
        """The newest checkpoint that was asked for, where it could not be written."""
        if not self.checkpoints_refused:
            return None
        refused = self.checkpoints_refused[-1]
        return None if self.checkpoints and self.checkpoints[-1].t >= refused.t else refused

    @property
    def rank_at_fault(self) -> int | None:
        """As the supervisor judged when it knew all ends; None for a run that ended well or goes on."""
        return self.ended.rank if self.ended is not None else None
