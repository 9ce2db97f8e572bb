"""The event vocabulary: one struct per kind, one JSON object per line in a log.

Every line carries `v` (schema version), `t` (wall clock, seconds since the epoch), `m` (monotonic
seconds of the host since boot) and `src` (who wrote it: `supervisor`, `rank0`, ...), and `kind`.
Kinds are past tense. A reader skips and counts kinds and versions that it does not know, so kinds
and optional fields may be added; none may change its meaning.
"""

from typing import Annotated, Any, Literal

from msgspec import Struct, field

from llmtop.presets.ranks import WorldSize
from llmtop.profiler.record.changeevents import (
    ChangeApplied,
    ChangeAsked,
    ChangeRefused,
    RestageBegan,
    Restaged,
    RestageFailed,
)
from llmtop.profiler.record.checkpointevents import CheckpointLoaded, CheckpointRefused, CheckpointSaved
from llmtop.profiler.record.deviceevents import (
    AFew,
    DeviceSample,
    HostSample,
    LeftOutSamples,
    ProcessSample,
    Topology,
)
from llmtop.profiler.record.endevents import MemoryReturned
from llmtop.profiler.record.eventbase import EVENT_VERSION as EVENT_VERSION
from llmtop.profiler.record.eventbase import Event as Event
from llmtop.profiler.record.failureevents import HostMemoryRunsOut, MemoryShortage, StepHealed
from llmtop.profiler.record.hostevents import (
    ClockMeasured,
    HostFound,
    HostJoined,
    HostLeft,
    HostLost,
    OrderCarriedOut,
    StandbyEnded,
)
from llmtop.profiler.record.scriptevents import (
    BatchSeen,
    DevicesFound,
    RankAttached,
    RankDetached,
    RunDescribed,
)
from llmtop.profiler.record.snapshotevents import SnapshotAsked, SnapshotTaken
from llmtop.profiler.record.stepevents import UNREAD_STEPS as UNREAD_STEPS
from llmtop.profiler.record.stepevents import PhaseMemory as PhaseMemory
from llmtop.profiler.record.stepevents import StepFinished as StepFinished

Phase = Literal["data", "forward", "backward", "optimizer"]
OutsideMoment = Literal["untouched", "context", "process_group", "engine", "first_step", "second_step", "end"]
"""Before the device was touched; with a context; after the first collective; and so on."""
StartupStage = Literal[
    "import", "process_group", "model", "weights", "data", "op_build", "engine", "partition", "first_step"
]
"""`engine` is what records of older versions call `partition` and the op builds together."""


# --- written by the supervisor -------------------------------------------------------------------


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """The supervisor is up; ranks follow."""

    run_id: str
    name: str
    pid: int
    host: str
    world_size: WorldSize
    """Ranks of the whole job."""
    llmtop_version: str
    goes_on_after: int | None = None
    """Step of the newest state in its folder, 0 where there is none; None: not looked for."""


class RankStarted(Event, frozen=True, kw_only=True, tag="rank_started"):
    rank: int
    pid: int
    setting: int = 0
    """Number of the setting that it trains on; 0 is the one that the run was launched with."""


class RankExited(Event, frozen=True, kw_only=True, tag="rank_exited"):
    rank: int
    pid: int
    exit_code: int | None = None
    """None when a signal ended it."""
    signal: str | None = None
    """Name, as SIGKILL."""


RunEnd = Literal["completed", "stopped", "gone", "failed", "out_of_memory"]
"""`gone`: a process that somebody else had started is there no more, and how it ended nobody was told."""


class RunEnded(Event, frozen=True, kw_only=True, tag="run_ended"):
    """The last line of a run: no rank is left."""

    state: RunEnd
    reason: str
    """In words, naming rank and signal or exit code."""
    fix: str = ""
    """What a person could do about it; empty for a run that ended well."""
    rank: int | None = None
    """At fault, where it was one: the others' failures follow from its. None in records of older versions."""


Answer = Literal["accepted", "done", "refused"]
"""To a request: it is under way, it is carried out, it is not."""


class ControlAnswered(Event, frozen=True, kw_only=True, tag="control_answered"):
    request_id: str
    action: str
    answer: Answer
    reason: str = ""


class HangSuspected(Event, frozen=True, kw_only=True, tag="hang_suspected"):
    """No rank has finished a step for much longer than a step takes."""

    last_step: int
    quiet_seconds: float
    threshold_seconds: float


class Compiling(Event, frozen=True, kw_only=True, tag="compiling"):
    """An op is being built in the ranks (seen by the compiler's processes): slow, not hung."""

    what: str


class XidSeen(Event, frozen=True, kw_only=True, tag="xid_seen"):
    """The driver reported an error of a GPU, by its Xid number."""

    device: int
    """NVML index."""
    xid: int
    meaning: str = ""
    fix: str = ""
    is_hardware: bool = False
    """Whether the number speaks of the device or its links, not of the program that ran on it."""


class TopologySeen(Event, frozen=True, kw_only=True, tag="topology_seen"):
    """How the run's GPUs are connected; read once, after the ranks have been started."""

    topology: Topology


class NvmeMeasured(Event, frozen=True, kw_only=True, tag="nvme_measured"):
    """The folder of an NVMe offload before it is used. None: could not be measured."""

    path: str
    file_system: str | None = None
    free_bytes: int | None = None
    needed_bytes: int = 0
    direct: bool = False
    """Past the page cache (O_DIRECT), as DeepSpeed reads and writes."""
    read_bytes_per_second: float | None = None
    write_bytes_per_second: float | None = None
    step_read_bytes: int = 0
    """By all ranks of this host in an optimizer step, by estimate."""
    step_write_bytes: int = 0
    step_seconds: float | None = None
    """What these bytes take at the measured speed: a step is not shorter."""


# --- samples, written by the sampler ---------------------------------------------------------------


class HardwareSampled(Event, frozen=True, kw_only=True, tag="hardware_sampled"):
    devices: Annotated[tuple[DeviceSample, ...], AFew] = ()
    driver_silent: bool = False
    """Whether the GPUs' driver did not answer in time: what it tells of them is None."""
    host: HostSample = HostSample()
    processes: tuple[ProcessSample, ...] = ()
    left_out: LeftOutSamples | None = None
    """In a log that was thinned: the samples between the one before and this one."""


# --- written by whoever has a log -------------------------------------------------------------------


class WritingResumed(Event, frozen=True, kw_only=True, tag="writing_resumed"):
    """A log could not be written for a while, as on a full disk; what waited meanwhile stands before this."""

    seconds: float
    lost: int = 0
    """Events that were too many to wait."""


# --- written by whoever thins a log that has grown long ---------------------------------------------


class LogThinned(Event, frozen=True, kw_only=True, tag="log_thinned"):
    """The last line of a file that stands for the oldest ones of its log (`segments.py`)."""

    until: int
    """The first segment that it does not stand for."""
    keeps_one_in: int
    """Of its steps or samples; those that were left out are added up in the ones that stay."""
    left_out: int = 0
    """Steps and samples, so far."""


# --- written by a rank -----------------------------------------------------------------------------


class StageBegan(Event, frozen=True, kw_only=True, tag="stage_began"):
    """A stage of start-up began; a stage that never finishes is where it hangs."""

    stage: StartupStage


class StageFinished(Event, frozen=True, kw_only=True, tag="stage_finished"):
    stage: StartupStage
    seconds: float


class OpBuilt(Event, frozen=True, kw_only=True, tag="op_built"):
    """One of DeepSpeed's compiled ops is loaded."""

    name: str
    """As DeepSpeed's builder names it: fused_adam, cpu_adam, async_io, ..."""
    seconds: float
    compiled: bool = False
    """It was not there and was compiled; else it was only loaded."""


class WeightsRead(Event, frozen=True, kw_only=True, tag="weights_read"):
    """How far a rank is with reading its part of the weights; at most one a second."""

    read_bytes: int
    total_bytes: int


class WeightsLoaded(Event, frozen=True, kw_only=True, tag="weights_loaded"):
    way: Literal["streamed", "transformers"]
    """`streamed`: each tensor from its file into its place; `transformers`: its own loader, for `reason`."""
    reason: str = ""
    read_bytes: int | None = None
    seconds: float = 0.0


class BaselineMeasured(Event, frozen=True, kw_only=True, tag="baseline_measured"):
    """Process and device memory before the model exists."""

    rss_bytes: int | None = None
    pss_bytes: int | None = None
    device_used_bytes: int | None = None
    """NVML reading of the whole device after the context and the process group exist."""
    device_used_before_bytes: int | None = None
    """The same before this process touched the device: other processes and the driver's reserve."""


class ModelBuilt(Event, frozen=True, kw_only=True, tag="model_built"):
    params: int
    trainable_params: int
    module_class: str | None = None
    """Of the model inside of all wrappers."""
    attention: str | None = None
    """The attention implementation that the modules really use."""
    optimizer: str | None = None
    """Class of the optimizer that really runs."""
    engine_optimizer: str | None = None
    """Class of DeepSpeed's wrapper around it."""
    liger: tuple[str, ...] = ()
    """Liger kernels found in the modules."""
    qat: str | None = None
    """What the modules' fake quantization is for, in the words of the option; None without any."""
    rounding_layers: int = 0
    """Layers that have it."""
    weights_type: str | None = None
    """Of most of the weights that are not packed, in the words of the option `precision`; None for others."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of torch, deepspeed, transformers and the kernels in use."""


class MemoryClassified(Event, frozen=True, kw_only=True, tag="memory_classified"):
    """Exact bytes of the engine's tensors by storage, taken in one step."""

    step: int
    moment: str
    """A `Moment` value."""
    components: dict[str, int]
    """`Component` value to bytes on the device (on the CPU kind: in the process)."""
    host_components: dict[str, int] = field(default_factory=dict)
    """Under offload: bytes in host memory, by component."""
    drive_components: dict[str, int] | None = None
    """Under offload to NVMe: bytes of this rank's files, by component, without those that are written and not
    read. None in records of older versions."""
    total_bytes: int | None = None
    """What the allocator (CUDA) or the kernel (CPU: resident set) says at that time."""


class PeakClassified(Event, frozen=True, kw_only=True, tag="peak_classified"):
    """What a phase's peak itself held, from a replay of the allocator's trace of one step (CUDA)."""

    step: int
    phase: str
    moment: str
    """A `Moment` value; within the backward pass told from what was alive."""
    components: dict[str, int]
    total_bytes: int
    """The allocator's own peak of the phase; the components and what is unnamed add up to it."""
    unnamed_bytes: int = 0
    """Of allocations that nobody recognised and that live across a border of the phase, and what the replay
    missed."""
    largest_unnamed: tuple[int, ...] = ()
    replay_error_bytes: int = 0
    """The allocator's own peak of what was asked for minus the replayed one, both with the blocks that were
    freed while another stream used them: zero unless events were lost."""


class OutsideMeasured(Event, frozen=True, kw_only=True, tag="outside_measured"):
    """The device at a known moment of a rank's life: differences tell what lies outside the allocator."""

    moment: str
    """An `OutsideMoment` value."""
    device_used_bytes: int | None = None
    """NVML, the whole device."""
    process_used_bytes: int | None = None
    """NVML, this process; None where the driver does not tell or numbers processes otherwise."""
    reserved_bytes: int = 0
    """By this process's allocator."""


class KernelTime(Struct, frozen=True, kw_only=True, gc=False):
    """One kernel (on the CPU: one operator, without those that it called) over a micro-batch."""

    name: str
    seconds: float
    calls: int


class KernelsSeen(Event, frozen=True, kw_only=True, tag="kernels_seen"):
    """What really ran in one micro-batch of rank 0, by the names of its kernels (`profiler.kernelnames`)."""

    step: int
    attention: str | None = None
    """An `AttentionKernel` value; None: no kernel of attention was recognised."""
    attention_calls: int = 0
    """Forward passes of it: as many as layers, and once more for each layer that was recomputed."""
    liger: tuple[str, ...] = ()
    """Liger kernels by what they compute, as `rms_norm`."""
    optimizer: str | None = None
    loss: str | None = None
    quantization: tuple[str, ...] = ()
    communication: tuple[str, ...] = ()
    """Collectives, as `all_gather`."""
    top: tuple[KernelTime, ...] = ()
    """Those that took longest, the longest first."""
    total_seconds: float = 0.0
    """Of all of them; they may have run side by side."""
    names: int = 0
    """Different kernels."""


class RankFinished(Event, frozen=True, kw_only=True, tag="rank_finished"):
    """The loop ended and the process is about to leave with exit code 0."""

    reason: Literal["completed", "stopped"]
    last_step: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_rss_bytes: int | None = None


class RankFailed(Event, frozen=True, kw_only=True, tag="rank_failed"):
    error_type: str
    message: str
    out_of_memory: bool = False
    stage: str | None = None
    """Start-up stage or phase of the step in which it happened."""
    step: int | None = None
    micro_batch: int | None = None
    """Which of the step, counted from 1."""
    where: str = ""
    """File and function that raised it."""
    traceback: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    shortage: MemoryShortage | None = None
    """The allocation that failed, where the error tells of one."""


AnyEvent = (
    RunStarted
    | RankStarted
    | RankExited
    | RunEnded
    | MemoryReturned
    | ControlAnswered
    | ChangeAsked
    | ChangeRefused
    | ChangeApplied
    | RestageBegan
    | Restaged
    | RestageFailed
    | HangSuspected
    | HostMemoryRunsOut
    | Compiling
    | XidSeen
    | TopologySeen
    | HardwareSampled
    | LogThinned
    | WritingResumed
    | StageBegan
    | StageFinished
    | OpBuilt
    | WeightsRead
    | WeightsLoaded
    | NvmeMeasured
    | BaselineMeasured
    | ModelBuilt
    | StepFinished
    | StepHealed
    | MemoryClassified
    | PeakClassified
    | OutsideMeasured
    | KernelsSeen
    | CheckpointSaved
    | CheckpointRefused
    | CheckpointLoaded
    | RankFinished
    | RankFailed
    | RankAttached
    | RankDetached
    | BatchSeen
    | DevicesFound
    | RunDescribed
    | SnapshotAsked
    | SnapshotTaken
    | HostJoined
    | HostLost
    | HostFound
    | HostLeft
    | ClockMeasured
    | OrderCarriedOut
    | StandbyEnded
)
