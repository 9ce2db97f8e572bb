"""Recorded runs for tests: real logs, written by `EventWriter`, of runs that never had to happen.

`make_recorded_run` writes the tiny-Llama CPU demo (2 ranks, ZeRO-2, 60 steps) or, with `kind="cuda"`,
an 8B run on H200s. Times, losses and bytes are made up but agree with each other. The defaults are a
run that completed; `end=None` leaves it going under the calling process as its supervisor.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost import shape
from llmtop.profiler.memory.result import Moment
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.deviceevents import (
    DeviceSample,
    HostSample,
    LinkSample,
    ProcessSample,
    Topology,
    TopologyDevice,
    TopologyPair,
)
from llmtop.profiler.record.eventlog import Clock, EventWriter
from llmtop.profiler.record.events import (
    BaselineMeasured,
    HardwareSampled,
    KernelsSeen,
    MemoryClassified,
    ModelBuilt,
    PhaseMemory,
    RankExited,
    RankFailed,
    RankFinished,
    RankStarted,
    RunEnd,
    RunEnded,
    RunStarted,
    StageBegan,
    StageFinished,
    StartupStage,
    StepFinished,
    TopologySeen,
)
from llmtop.profiler.record.rundir import RunDir
from tests.recorded_spec import (
    GIB,
    MIB,
    Kind,
    moment_bytes,
    recorded_prediction,
    recorded_spec,
)

BEGAN = 1_795_978_000.0
"""Wall clock of a recorded run's first event."""

_STAGES: tuple[tuple[StartupStage, float], ...] = (
    ("import", 6.1),
    ("process_group", 0.4),
    ("model", 0.3),
    ("data", 0.9),
    ("engine", 2.5),
    ("first_step", 0.6),
)
_EXIT: dict[str | None, tuple[int | None, str | None]] = {
    "completed": (0, None),
    "stopped": (0, None),
    "failed": (None, "SIGKILL"),
    "out_of_memory": (1, None),
}
_PHASE_SHARE = {"data": 0.02, "forward": 0.33, "backward": 0.55, "optimizer": 0.1}


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = BEGAN) -> None:
        self.now = now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now, monotonic=lambda: self.now - BEGAN + 1000.0)


def make_recorded_run(
    root: Path,
    *,
    kind: Kind = "cpu",
    ranks: int = 2,
    steps: int = 60,
    end: RunEnd | None = "completed",
    began: float = BEGAN,
    pace: float = 1.0,
    kernels: KernelsSeen | None = None,
    **options: Any,
) -> RunDir:
    """Write a whole run under `root`. `options` are further RunOptions of its spec.

    Its steps take `pace` times the usual time; `kernels` is what rank 0 records in its step.
    """
    spec = recorded_spec(kind, ranks=ranks, steps=steps, **options)
    run = RunDir.create(root, spec, recorded_prediction(spec), {"train_micro_batch_size_per_gpu": 4})
    recorder = Recorder(run, spec, began)
    recorder.steady_seconds *= pace
    recorder.kernels = kernels
    try:
        recorder.start()
        for step in range(1, steps + 1):
            recorder.step(step)
        recorder.end(end, steps)
    finally:
        recorder.close()
    if end is None:
        run.write_supervisor_pid()
    return run


class Recorder:
    """Plays a run's story into its logs on a manual clock."""

    def __init__(self, run: RunDir, spec: RunSpec, began: float) -> None:
        self.run, self.spec = run, spec
        self.time = ManualClock(began)
        clock = self.time.clock()
        self.supervisor = EventWriter(run.events_path("supervisor"), "supervisor", clock=clock)
        self.hardware = EventWriter(run.events_path("hardware"), "hardware", clock=clock)
        self.ranks = [
            EventWriter(run.events_path(rank), f"rank{rank}", clock=clock) for rank in range(spec.world_size)
        ]
        self.baseline = 440 * MIB if spec.on_cpu else 2 * GIB
        self.steady_seconds = 0.4 if spec.on_cpu else 1.25
        self.kernels: KernelsSeen | None = None
        self.tells_logs = True
        """Whether samples tell how long the logs are, as those of older versions do not."""

    def close(self) -> None:
        for writer in (self.supervisor, self.hardware, *self.ranks):
            writer.close()

    def pid(self, rank: int) -> int:
        return 4242 + rank

    def start(self, goes_on_after: int | None = None) -> None:
        self.supervisor.write(
            RunStarted(
                run_id=self.run.run_id,
                name=self.spec.name,
                pid=os.getpid(),
                host="testhost",
                world_size=self.spec.world_size,
                llmtop_version="0.1.0",
                goes_on_after=goes_on_after,
            )
        )
        for rank in range(self.spec.world_size):
            self.supervisor.write(RankStarted(rank=rank, pid=self.pid(rank)))
            self.run.log_path(rank).write_text(f"[rank {rank}] building {self.spec.model.name}\n")
        if not self.spec.on_cpu:
            self.supervisor.write(TopologySeen(topology=recorded_topology(len(self.ranks))))
        for stage, seconds in _STAGES:
            for writer in self.ranks:
                writer.write(StageBegan(stage=stage))
            if stage == "model":
                self._baseline()
            self.time.advance(seconds)
            self._sample()
            if stage != "first_step":
                for writer in self.ranks:
                    writer.write(StageFinished(stage=stage, seconds=seconds))

    def _baseline(self) -> None:
        params = shape.param_count(self.spec.model)
        for rank, writer in enumerate(self.ranks):
            if self.spec.on_cpu:
                writer.write(BaselineMeasured(rss_bytes=self.baseline + rank * MIB, pss_bytes=self.baseline))
            else:
                writer.write(
                    BaselineMeasured(
                        rss_bytes=3 * GIB,
                        device_used_bytes=self.baseline + 640 * MIB,
                        device_used_before_bytes=640 * MIB,
                    )
                )
            writer.write(
                ModelBuilt(
                    params=params,
                    trainable_params=params,
                    attention=self.spec.options.attention,
                    weights_type=self.spec.options.precision,
                    optimizer="AdamW" if self.spec.on_cpu else "FusedAdam",
                    engine_optimizer="DeepSpeedZeroOptimizer",
                    versions={"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.24.0"},
                )
            )

    def rank_bytes(self, moment: Moment) -> int:
        """What a rank's allocator (or, on the CPU kind, its resident set) says at a moment."""
        parts = sum(moment_bytes(self.spec, moment).values())
        other = 9 * MIB if self.spec.on_cpu else 64 * MIB
        return parts + other + (self.baseline if self.spec.on_cpu else 0)

    def _memory(self) -> dict[str, PhaseMemory]:
        at_end = {
            "data": Moment.STEADY,
            "forward": Moment.FORWARD_END,
            "backward": Moment.FIRST_BLOCK_BACKWARD,
            "optimizer": Moment.OPTIMIZER_STEP,
        }
        peak_at = {**at_end, "backward": Moment.LOSS_BACKWARD}
        return {
            phase: PhaseMemory(
                allocated_bytes=None if self.spec.on_cpu else self.rank_bytes(moment),
                peak_bytes=self.rank_bytes(peak_at[phase]),
                reserved_bytes=None if self.spec.on_cpu else round(self.rank_bytes(peak_at[phase]) * 1.05),
            )
            for phase, moment in at_end.items()
        }

    def step(self, step: int) -> None:
        slow = {1: 1.6, 2: 1.2}.get(step, 1.0 + 0.04 * math.sin(step))
        seconds = self.steady_seconds * slow
        profiled = self.kernels is not None and self.kernels.step == step
        if self.kernels is not None and profiled:
            seconds *= 5
            self.ranks[0].write(self.kernels)
        self.pass_step(seconds)
        loss = 1.9 + 5.7 * math.exp(-step / 18) + 0.05 * math.sin(step * 2.1)
        for rank, writer in enumerate(self.ranks):
            writer.write(
                StepFinished(
                    step=step,
                    loss=round(loss, 4),
                    learning_rate=self.spec.options.learning_rate * min(1.0, step / 5),
                    grad_norm=round(2.4 * math.exp(-step / 30) + 0.4, 4),
                    tokens=self.spec.tokens_per_step,
                    micro_batch=self.spec.options.micro_batch,
                    grad_accum=self.spec.options.grad_accum,
                    step_seconds=seconds * (1 + 0.002 * rank),
                    phase_seconds={phase: seconds * share for phase, share in _PHASE_SHARE.items()},
                    phase_memory=self._memory(),
                    profiled=profiled,
                )
            )
            if step == 1:
                writer.write(StageFinished(stage="first_step", seconds=seconds + 0.6))
            if step in (1, 2) or step % self.spec.options.classify_every == 0:
                self._classify(writer, step)
        with self.run.log_path(0).open("a") as log:
            log.write(f"step {step} loss {loss:.4f}\n")
        if step % 2 == 0:
            self._sample()
        every = self.spec.options.checkpoint_every
        if every and step % every == 0:
            path = str(self.run.checkpoints_dir / f"step-{step}")
            self.ranks[0].write(CheckpointSaved(step=step, path=path, size_bytes=40 * MIB, seconds=0.2))

    def pass_step(self, seconds: float) -> None:
        """The time of a step goes by."""
        self.time.advance(seconds)

    def _classify(self, writer: EventWriter, step: int) -> None:
        for moment in (Moment.FORWARD_END, Moment.FIRST_BLOCK_BACKWARD, Moment.OPTIMIZER_STEP, Moment.STEADY):
            parts = {str(component): size for component, size in moment_bytes(self.spec, moment).items()}
            writer.write(
                MemoryClassified(
                    step=step, moment=moment, components=parts, total_bytes=self.rank_bytes(moment)
                )
            )

    def _sample(self) -> None:
        used = self.rank_bytes(Moment.LOSS_BACKWARD)
        self.hardware.write(
            HardwareSampled(
                devices=tuple(self._device(i, used) for i in range(len(self.ranks) * (not self.spec.on_cpu))),
                host=HostSample(
                    memory_total_bytes=24 * GIB,
                    memory_available_bytes=20 * GIB,
                    cgroup_limit_bytes=16 * GIB,
                    cgroup_used_bytes=3 * GIB,
                    swap_used_bytes=0,
                    cpu_percent=91.0,
                    disk_read_bytes_per_second=0.0,
                    disk_write_bytes_per_second=120_000.0,
                    network_receive_bytes_per_second=900.0,
                    network_send_bytes_per_second=700.0,
                ),
                processes=tuple(
                    ProcessSample(
                        rank=rank,
                        rss_bytes=used if self.spec.on_cpu else 3 * GIB,
                        pss_bytes=used - 90 * MIB if self.spec.on_cpu else 2 * GIB,
                        cpu_percent=97.0,
                        log_bytes=self._log_bytes(rank),
                    )
                    for rank in range(len(self.ranks))
                ),
            )
        )

    def _log_bytes(self, rank: int) -> int | None:
        path = self.run.log_path(rank)
        return path.stat().st_size if self.tells_logs and path.exists() else None

    def _device(self, index: int, used: int) -> DeviceSample:
        return DeviceSample(
            index=index,
            name="NVIDIA H200",
            memory_used_bytes=round(used * 1.05) + self.baseline + 640 * MIB,
            memory_total_bytes=150_754_820_096,
            own_memory_bytes=round(used * 1.05) + self.baseline,
            utilization_percent=96.0,
            power_watts=612.0,
            power_limit_watts=700.0,
            temperature_celsius=58.0,
            sm_clock_hz=1.98e9,
            memory_clock_hz=3.2e9,
            throttle_reasons=(),
            nvlink_tx_bytes_per_second=41e9,
            nvlink_rx_bytes_per_second=41e9,
            pcie_tx_bytes_per_second=2.1e8,
            pcie_rx_bytes_per_second=1.4e8,
            process_count=1,
            sm_active_percent=93.0,
            sm_occupancy_percent=41.0,
            tensor_active_percent=58.0,
            dram_active_percent=44.0,
            fp32_active_percent=3.0,
            fp16_active_percent=0.0,
            energy_joules=5e6 + 612.0 * (self.time.now - BEGAN),
            ecc_corrected=2,
            ecc_uncorrected=0,
            remapped_rows=0,
            remap_pending=False,
            remap_failed=False,
            pcie_generation=5,
            pcie_width=16,
            pcie_replays=0,
            nvlinks_active=18,
            links=tuple(LinkSample(link, 2_280_000_000, 2_270_000_000, 0, 0, 0) for link in range(18)),
        )

    def end(self, end: RunEnd | None, last_step: int) -> None:
        if end is None:
            return
        exit_code, signal = _EXIT[end]
        on_cpu, peak = self.spec.on_cpu, self.rank_bytes(Moment.LOSS_BACKWARD)
        for rank, writer in enumerate(self.ranks):
            self.time.advance(0.05)
            if end in ("completed", "stopped"):
                writer.write(
                    RankFinished(
                        reason="completed" if end == "completed" else "stopped",
                        last_step=last_step,
                        peak_allocated_bytes=None if on_cpu else peak,
                        peak_rss_bytes=peak if on_cpu else 3 * GIB,
                    )
                )
            elif end == "out_of_memory" and rank == 0:
                writer.write(
                    RankFailed(
                        error_type="OutOfMemoryError",
                        message="CUDA out of memory. Tried to allocate 2.00 GiB.",
                        out_of_memory=True,
                        stage="backward",
                        step=last_step + 1,
                    )
                )
        self.time.advance(0.3)
        for rank in range(len(self.ranks)):
            failed = signal is not None and rank > 0
            self.supervisor.write(
                RankExited(
                    rank=rank,
                    pid=self.pid(rank),
                    exit_code=exit_code,
                    signal="SIGTERM" if failed else signal,
                )
            )
        self.supervisor.write(RunEnded(state=end, reason=_REASON[end], fix=_FIX.get(end, "")))


def recorded_topology(gpus: int) -> Topology:
    """An H200 baseboard: every device has 18 links to the switches."""
    return Topology(
        devices=tuple(
            TopologyDevice(
                index=index,
                name="NVIDIA H200",
                numa_node=index // 4,
                cpus="0-47" if index < 4 else "48-95",
                pcie_generation=5,
                pcie_generation_max=5,
                pcie_width=16,
                pcie_width_max=16,
                nvlinks=18,
                nvlink_peer="switch",
                nvlink_bytes_per_second=18 * 26.562e9,
                has_gpm=True,
                ecc_enabled=True,
                mig_enabled=False,
            )
            for index in range(gpus)
        ),
        pairs=tuple(
            TopologyPair(first=first, second=second, road="NV18", nvlinks=18, peer_access=True)
            for first in range(gpus)
            for second in range(first + 1, gpus)
        ),
        own_cpus="0-95",
    )


_REASON: dict[str, str] = {
    "completed": "all ranks finished all steps",
    "stopped": "stopped on request after the last step was saved",
    "failed": "rank 0 was killed by SIGKILL",
    "out_of_memory": "rank 0 ran out of device memory",
}
_FIX: dict[str, str] = {
    "failed": "look at the kernel log: the out-of-memory killer sends SIGKILL",
    "out_of_memory": "lower --micro-batch or turn on --gradient-checkpointing",
}


def started(t: float, goes_on_after: int | None = None, *, world_size: int = 1) -> RunStarted:
    """Of a supervisor."""
    return RunStarted(
        t=t,
        run_id="id",
        name="n",
        pid=1,
        host="h",
        world_size=world_size,
        llmtop_version="0",
        goes_on_after=goes_on_after,
    )
