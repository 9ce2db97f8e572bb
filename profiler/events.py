"""The event vocabulary: one struct per kind, one JSON object per line in a log.

Every line carries `v` (schema version), `t` (wall clock, seconds since the epoch), `m` (monotonic
seconds of the host since boot) and `src` (who wrote it: `supervisor`, `rank0`, ...), and `kind`.
Kinds are past tense. A reader skips and counts kinds and versions that it does not know, so kinds
and optional fields may be added; none may change its meaning.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

EVENT_VERSION = 1

Phase = Literal["data", "forward", "backward", "optimizer"]
StartupStage = Literal["import", "process_group", "model", "weights", "data", "engine", "first_step"]


class Event(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """What every line carries. The writer fills the stamps."""

    v: int = 0
    """Zero until the writer stamps it: defaults are left out of a line, and the version never may be."""
    t: float = 0.0
    m: float = 0.0
    src: str = ""


# --- written by the supervisor -------------------------------------------------------------------


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """The supervisor is up; ranks follow."""

    run_id: str
    name: str
    pid: int
    host: str
    world_size: int
    llmtop_version: str


class RankStarted(Event, frozen=True, kw_only=True, tag="rank_started"):
    rank: int
    pid: int


class RankExited(Event, frozen=True, kw_only=True, tag="rank_exited"):
    rank: int
    pid: int
    exit_code: int | None = None
    """None when a signal ended it."""
    signal: str | None = None
    """Name, as SIGKILL."""


RunEnd = Literal["completed", "stopped", "failed", "out_of_memory"]


class RunEnded(Event, frozen=True, kw_only=True, tag="run_ended"):
    """The last line of a run: no rank is left."""

    state: RunEnd
    reason: str
    """In words, naming rank and signal or exit code."""
    fix: str = ""
    """What a person could do about it; empty for a run that ended well."""


class ControlAnswered(Event, frozen=True, kw_only=True, tag="control_answered"):
    request_id: str
    action: str
    answer: Literal["accepted", "done", "refused"]
    reason: str = ""


class HangSuspected(Event, frozen=True, kw_only=True, tag="hang_suspected"):
    """No rank has finished a step for much longer than a step takes."""

    last_step: int
    quiet_seconds: float
    threshold_seconds: float


class Compiling(Event, frozen=True, kw_only=True, tag="compiling"):
    """An op is being built in the ranks (seen by the compiler's processes): slow, not hung."""

    what: str


# --- samples, written by the sampler ---------------------------------------------------------------


class DeviceSample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU at one time. None: the driver does not tell."""

    index: int
    name: str | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    own_memory_bytes: int | None = None
    """Used by this run's processes; listed less often, as PSS is."""
    utilization_percent: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    nvlink_tx_bytes_per_second: float | None = None
    nvlink_rx_bytes_per_second: float | None = None
    pcie_tx_bytes_per_second: float | None = None
    pcie_rx_bytes_per_second: float | None = None
    process_count: int | None = None


class HostSample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    """The tightest memory limit of the run's cgroups; None where there is none."""
    cgroup_used_bytes: int | None = None
    """Of the group with that limit, without page cache that the kernel can take back."""
    swap_used_bytes: int | None = None
    cpu_percent: float | None = None
    """Of the whole machine, 0 to 100."""
    disk_read_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    network_receive_bytes_per_second: float | None = None
    network_send_bytes_per_second: float | None = None


class ProcessSample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's process tree."""

    rank: int
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    """Proportional set size: shared pages divided among those who share them. Read less often than RSS;
    the samples between two readings repeat the first."""
    cpu_percent: float | None = None
    """100 is one core."""


class HardwareSampled(Event, frozen=True, kw_only=True, tag="hardware_sampled"):
    devices: tuple[DeviceSample, ...] = ()
    host: HostSample = HostSample()
    processes: tuple[ProcessSample, ...] = ()


# --- written by a rank -----------------------------------------------------------------------------


class StageBegan(Event, frozen=True, kw_only=True, tag="stage_began"):
    """A stage of start-up began; a stage that never finishes is where it hangs."""

    stage: StartupStage


class StageFinished(Event, frozen=True, kw_only=True, tag="stage_finished"):
    stage: StartupStage
    seconds: float


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
    attention: str | None = None
    """The attention implementation that the modules really use."""
    optimizer: str | None = None
    """Class of the optimizer that really runs."""
    engine_optimizer: str | None = None
    """Class of DeepSpeed's wrapper around it."""
    liger: tuple[str, ...] = ()
    """Liger kernels found in the modules."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of torch, deepspeed, transformers and the kernels in use."""


class PhaseMemory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory at the end of a phase of a step."""

    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    """Largest allocated inside the phase (CUDA), or the largest resident set (CPU)."""
    reserved_bytes: int | None = None


class StepFinished(Event, frozen=True, kw_only=True, tag="step_finished"):
    """One optimizer step, counted from 1."""

    step: int
    loss: float | None = None
    """Mean over the step's tokens and ranks; None when it is not finite."""
    learning_rate: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    """fp16: the gradients overflowed and nothing was updated."""
    tokens: int = 0
    """Of the whole job in this step."""
    micro_batch: int = 1
    grad_accum: int = 1
    step_seconds: float = 0.0
    phase_seconds: dict[str, float | None] = field(default_factory=dict)
    """Keys are `Phase`; summed over the step's micro-batches."""
    phase_memory: dict[str, PhaseMemory] = field(default_factory=dict)


class MemoryClassified(Event, frozen=True, kw_only=True, tag="memory_classified"):
    """Exact bytes of the engine's tensors by storage, taken in one step."""

    step: int
    moment: str
    """A `Moment` value."""
    components: dict[str, int]
    """`Component` value to bytes on the device (on the CPU kind: in the process)."""
    host_components: dict[str, int] = field(default_factory=dict)
    """Under offload: bytes in host memory, by component."""
    total_bytes: int | None = None
    """What the allocator (CUDA) or the kernel (CPU: resident set) says at that time."""


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint_saved"):
    step: int
    path: str
    size_bytes: int
    seconds: float


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
    traceback: str = ""
    details: dict[str, Any] = field(default_factory=dict)


AnyEvent = (
    RunStarted
    | RankStarted
    | RankExited
    | RunEnded
    | ControlAnswered
    | HangSuspected
    | Compiling
    | HardwareSampled
    | StageBegan
    | StageFinished
    | BaselineMeasured
    | ModelBuilt
    | StepFinished
    | MemoryClassified
    | CheckpointSaved
    | RankFinished
    | RankFailed
)
