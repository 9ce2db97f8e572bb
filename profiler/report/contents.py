"""What the report of one run holds; `report --json` prints it as it is. Unknown values are None."""

from __future__ import annotations

from msgspec import Struct

from llmtop.presets.inputs import Inputs
from llmtop.profiler.effects.switches import Switch
from llmtop.profiler.findings.finding import Finding
from llmtop.profiler.fleet.overview import HostRow
from llmtop.profiler.fold.runstate import Status
from llmtop.profiler.fold.series import MiddleHalf
from llmtop.profiler.oom.diagnosis import OutOfMemory
from llmtop.profiler.record.checkpointevents import CheckpointRefused, CheckpointSaved
from llmtop.profiler.record.events import KernelsSeen
from llmtop.profiler.report.changes import ChangeReport
from llmtop.profiler.report.quantized import QuantizedReport
from llmtop.profiler.report.snapshots import SnapshotReport

REPORT_SCHEMA_VERSION = 1


class ComponentReport(Struct, frozen=True, kw_only=True):
    component: str
    predicted_bytes: int | None
    actual_bytes: int | None
    error_percent: float | None
    """How far the prediction is above the actual bytes."""
    in_peak: bool
    """One of those that add up, with `unexplained_bytes`, to the actual peak."""


class PhaseReport(Struct, frozen=True, kw_only=True):
    phase: str
    seconds: float
    """Mean over rank 0's steps after warm-up that tell it."""
    percent: float


class StageReport(Struct, frozen=True, kw_only=True):
    stage: str
    seconds: float | None
    """Of the slowest rank; None for a stage that was not finished."""
    rank: int


class DeviceReport(Struct, frozen=True, kw_only=True):
    index: int
    name: str | None
    peak_bytes: int | None
    total_bytes: int | None
    energy_joules: float | None = None
    """Drawn since the run began."""


class HostReport(Struct, frozen=True, kw_only=True):
    predicted_bytes: int | None
    """For this run on one node."""
    ranks_pss_bytes: int | None
    """Sum over the ranks of the largest PSS of each."""
    compilers_peak_bytes: int | None = None
    """Not part of it: the most that compilers of ops held below the ranks (RSS); None: none was seen."""
    peak_bytes: int | None
    """Largest use of the machine's memory by everybody."""
    total_bytes: int | None
    cgroup_peak_bytes: int | None
    cgroup_limit_bytes: int | None
    swap_peak_bytes: int | None


class RankReport(Struct, frozen=True, kw_only=True):
    rank: int
    pid: int | None
    last_step: int
    """That it made, or that its process began after; 0 for none."""
    exit_code: int | None
    signal: str | None
    peak_bytes: int | None
    """Allocated (CUDA) or in use by the process (CPU), within steps."""
    peak_rss_bytes: int | None
    peak_pss_bytes: int | None
    failure: str | None


class Report(Struct, frozen=True, kw_only=True):
    schema_version: int = REPORT_SCHEMA_VERSION
    run_id: str
    name: str
    status: Status
    reason: str
    fix: str
    imported: str = ""
    """Which archive it came from and where it was recorded, in words; empty for a run of this machine."""
    host: str
    model: str
    params: int
    trainable_params: int
    gpu: str
    device_kind: str
    """`cuda`, or `cpu`, where a rank's device is its process."""
    world_size: int
    zero: int | None
    """This and what follows of options: None of a script of which it was not seen."""
    precision: str | None
    optimizer: str | None
    """The class that ran, else the one that was asked for."""
    engine_optimizer: str | None
    attention: str | None
    inputs: Inputs
    """Weights, data and tokenizer, in words."""
    command: str = ""
    """Of a script; empty for a run of llmtop's own trainer."""
    not_predicted: str = ""
    """Why nothing is predicted of a script; empty where something is."""
    tokens_per_step: int | None
    started: float | None
    ended: float | None
    """Wall clock of the last event."""
    seconds: float | None
    """Without `paused_seconds`."""
    paused_seconds: float
    """Between its ends and its going on after them."""
    steps_planned: int | None
    steps_finished: int
    steps_made: int
    """Also those that it made again, where it was gone on with from an earlier one."""
    skipped_steps: int
    """Of those made."""
    first_loss_scale: float | None
    """fp16: of the first step; None in another precision."""
    last_loss_scale: float | None
    first_loss: float | None
    last_loss: float | None
    step_seconds: float | None
    """Median after warm-up."""
    step_spread: MiddleHalf | None
    """Between which times the middle half of those steps lie."""
    predicted_step_seconds: float | None
    tokens_per_second: float | None
    """After warm-up."""
    predicted_tokens_per_second: float | None
    mfu_percent: float | None
    """Model FLOP/s of the dense peak in the run's precision, by PaLM's convention (`flops.py`); None where
    that peak is not known, and on the CPU kind."""
    needed_mfu_percent: float | None
    """The same of the products that the causal mask leaves."""
    peak_flops_per_second: float | None
    """That peak, of all GPUs together."""
    phases: tuple[PhaseReport, ...]
    phase_steps: int
    """Steps after warm-up that tell their phases, of which those are the means; on a GPU not all do."""
    untold_phase_steps: int
    """Those that do not."""
    startup: tuple[StageReport, ...]
    components: tuple[ComponentReport, ...]
    predicted_peak_bytes: int | None
    predicted_peak_upper_bytes: int
    predicted_held_upper_bytes: int
    """Upper bound of what the allocator, on the CPU kind the process, may hold."""
    actual_peak_bytes: int | None
    peak_error_percent: float | None
    unexplained_bytes: int | None
    unexplained_percent: float | None
    """Of the actual peak."""
    predicted_moment: str
    actual_moment: str | None
    peak_is_seen: bool
    """The peak is what was in use at that moment: after a change on the CPU kind nothing else tells it."""
    not_yet_measured: str
    """Why there are no actual figures yet, after a change; empty otherwise."""
    peak_rank: int | None
    peak_phase: str | None
    predicted_device_bytes: int | None
    actual_device_bytes: int | None
    devices: tuple[DeviceReport, ...]
    joules_per_token: float | None
    """Of all devices, over the steps and without start-up."""
    host_memory: HostReport
    hosts: tuple[HostRow, ...] = ()
    """Of a run over hosts, by their newest summaries."""
    ranks: tuple[RankReport, ...]
    checkpoints: tuple[CheckpointSaved, ...]
    checkpoints_refused: tuple[CheckpointRefused, ...]
    """Asked for, and not written."""
    not_saved: str = ""
    """What it trained and nobody asked to save, in words; empty where its last step is saved."""
    snapshots: tuple[SnapshotReport, ...]
    """Closer looks that somebody took while it ran."""
    quantized: tuple[QuantizedReport, ...]
    """Models in fewer bits that were made of its weights."""
    changes: tuple[ChangeReport, ...]
    """What was changed while the run went on, or was to be; memory and settings are of the last one."""
    out_of_memory: OutOfMemory | None
    """What ran out, what asked for it, and what would fit; None for a run in which no rank told of it."""
    findings: tuple[Finding, ...]
    switches: tuple[Switch, ...]
    """What was asked for, whether it runs, and what it changed against runs that differ in it alone."""
    kernels: KernelsSeen | None
    """What the profiler saw run in one micro-batch of rank 0."""
    versions: dict[str, str]
    files: dict[str, str]
    skipped_lines: int
    """Lines of the record that this version does not understand."""
    thinned_events: int
    """Steps and samples that are not in the record by themselves any more: others have them added up."""
    thinned_until: float | None
    """Wall clock up to which some are left out."""
