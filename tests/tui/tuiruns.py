"""Run folders for the tests of the app: written with the real writer, by a clock that the test holds."""

from __future__ import annotations

import math
from pathlib import Path

from llmtop.presets.spec import GpuSpec, ModelShape, RunOptions, RunSpec
from llmtop.profiler.eventlog import Clock, EventWriter
from llmtop.profiler.events import (
    BaselineMeasured,
    DeviceSample,
    HardwareSampled,
    HostSample,
    MemoryClassified,
    ModelBuilt,
    PhaseMemory,
    ProcessSample,
    RankStarted,
    RunEnd,
    RunEnded,
    RunStarted,
    StageBegan,
    StageFinished,
    StepFinished,
)
from llmtop.profiler.memory.result import Component, HostBytes, Moment, MomentBytes, Prediction
from llmtop.profiler.rundir import RunDir

MIB = 1024**2
GIB = 1024**3
START = 1_700_000_000.0
CPU = GpuSpec(name="cpu", kind="cpu", memory_bytes=24 * GIB)
H200 = GpuSpec(name="h200", memory_bytes=139 * GIB)
TINY = ModelShape(
    name="tiny-llama",
    family="llama",
    num_layers=4,
    hidden_size=256,
    intermediate_size=688,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=8192,
)


def make_spec(*, gpu: GpuSpec = CPU, ranks: int = 2, steps: int = 60, name: str = "cpu-demo") -> RunSpec:
    options = RunOptions(
        model=TINY.name, gpu=gpu.name, gpus=ranks, steps=steps, precision="fp32", seq_len=256
    )
    return RunSpec(name=name, options=options, model=TINY, gpu=gpu, model_source="built in")


def make_prediction(*, gpu: GpuSpec = CPU) -> Prediction:
    scale = MIB if gpu.kind == "cpu" else 80 * MIB
    components = {
        Component.PARAMETERS: 36 * scale,
        Component.GRADIENTS: 36 * scale,
        Component.OPTIMIZER_STATE: 72 * scale,
        Component.ACTIVATIONS: 180 * scale,
        Component.LOGITS: 64 * scale,
        Component.RUNTIME if gpu.kind == "cpu" else Component.CUDA_CONTEXT: 420 * scale,
    }
    total = sum(components.values())
    return Prediction(
        params=9_400_000,
        trainable_params=9_400_000,
        fits=True,
        peak_allocated_bytes=total,
        peak_allocated_upper_bytes=int(total * 1.1),
        peak_reserved_bytes=(total, int(total * 1.1)),
        peak_device_bytes=total,
        host_bytes=0,
        pinned_bytes=0,
        nvme_bytes=0,
        step_seconds=0.4,
        tokens_per_second=1280.0,
        moments=(MomentBytes(name=Moment.LOSS_BACKWARD, components=components, total_bytes=total),),
        peak_moment=Moment.LOSS_BACKWARD,
        host=HostBytes(total_bytes=0, pinned_bytes=0, nvme_bytes=0, components={}),
        device_memory_bytes=gpu.memory_bytes,
    )


class RecordedRun:
    """One run that a test writes as the supervisor, the sampler and the ranks would."""

    def __init__(self, root: Path, spec: RunSpec | None = None, *, start: float = START) -> None:
        self.spec = spec if spec is not None else make_spec()
        self.run = RunDir.create(root, self.spec, make_prediction(gpu=self.spec.gpu), {})
        # This process stands for the supervisor, so that the run does not count as lost.
        self.run.write_supervisor_pid()
        self.now = start
        clock = Clock(wall=lambda: self.now, monotonic=lambda: self.now - start)
        self.supervisor = EventWriter(self.run.events_path("supervisor"), "supervisor", clock=clock)
        self.hardware = EventWriter(self.run.events_path("hardware"), "sampler", clock=clock)
        self.ranks = [
            EventWriter(self.run.events_path(rank), f"rank{rank}", clock=clock)
            for rank in range(self.spec.world_size)
        ]

    def close(self) -> None:
        for writer in (self.supervisor, self.hardware, *self.ranks):
            writer.close()

    def begin(self) -> None:
        self.supervisor.write(
            RunStarted(
                run_id=self.run.run_id,
                name=self.spec.name,
                pid=4242,
                host="box",
                world_size=self.spec.world_size,
                llmtop_version="0",
            )
        )
        for rank in range(self.spec.world_size):
            self.supervisor.write(RankStarted(rank=rank, pid=5000 + rank))

    def stage(self, name: str, seconds: float | None = 1.0) -> None:
        """A stage of start-up in all ranks; None: it has begun and goes on."""
        for writer in self.ranks:
            writer.write(StageBegan(stage=name))  # type: ignore[arg-type]
        self.now += seconds or 0.5
        if seconds is not None:
            for writer in self.ranks:
                writer.write(StageFinished(stage=name, seconds=seconds))  # type: ignore[arg-type]

    def start_up(self) -> None:
        self.begin()
        self.stage("import", 3.5)
        self.stage("process_group", 0.1)
        for writer in self.ranks:
            writer.write(BaselineMeasured(rss_bytes=400 * MIB, pss_bytes=300 * MIB))
        self.stage("model", 0.6)
        for writer in self.ranks:
            writer.write(ModelBuilt(params=9_400_000, trainable_params=9_400_000, attention="sdpa"))
        self.stage("data", 0.8)
        self.stage("engine", 1.2)
        self.sample()

    def sample(self) -> None:
        host = HostSample(
            memory_total_bytes=24 * GIB,
            memory_available_bytes=15 * GIB,
            cgroup_limit_bytes=None,
            cpu_percent=93.0,
            swap_used_bytes=0,
            disk_read_bytes_per_second=1.2 * MIB,
            disk_write_bytes_per_second=3.4 * MIB,
            network_send_bytes_per_second=12.0,
            network_receive_bytes_per_second=34.0,
        )
        devices: tuple[DeviceSample, ...] = ()
        if self.spec.gpu.kind == "cuda":
            devices = tuple(
                DeviceSample(
                    index=rank,
                    name="NVIDIA H200",
                    memory_used_bytes=61 * GIB,
                    memory_total_bytes=139 * GIB,
                    own_memory_bytes=60 * GIB,
                    utilization_percent=97.0,
                    power_watts=612.0,
                    power_limit_watts=700.0,
                    temperature_celsius=64.0,
                    sm_clock_hz=1.98e9,
                    throttle_reasons=(),
                    nvlink_tx_bytes_per_second=120e9 + rank,
                    nvlink_rx_bytes_per_second=118e9,
                    pcie_tx_bytes_per_second=1.2e9,
                    pcie_rx_bytes_per_second=3.4e9,
                    process_count=1,
                )
                for rank in range(self.spec.world_size)
            )
        processes = tuple(
            ProcessSample(rank=rank, rss_bytes=(760 + rank * 8) * MIB, pss_bytes=640 * MIB, cpu_percent=98.0)
            for rank in range(self.spec.world_size)
        )
        self.hardware.write(HardwareSampled(devices=devices, host=host, processes=processes))

    def step(self, number: int, *, loss: float | None = None) -> None:
        self.now += 0.41
        for rank, writer in enumerate(self.ranks):
            if number <= 2:
                writer.write(
                    MemoryClassified(
                        step=number,
                        moment=Moment.LOSS_BACKWARD,
                        components={Component.PARAMETERS: 36 * MIB, Component.GRADIENTS: 36 * MIB},
                        total_bytes=760 * MIB,
                    )
                )
            writer.write(
                StepFinished(
                    step=number,
                    loss=loss if loss is not None else 3.0 + 6.1 * math.exp(-number / 18),
                    learning_rate=2e-3 * (1 - number / 80),
                    grad_norm=1.0 + 1.0 / number,
                    tokens=512,
                    step_seconds=0.38 + 0.05 * math.sin(number) + (0.6 if number == 1 else 0.0),
                    phase_seconds={"data": 0.004, "forward": 0.11, "backward": 0.21, "optimizer": 0.03},
                    phase_memory={"backward": PhaseMemory(peak_bytes=(770 + rank) * MIB)},
                )
            )

    def steps(self, count: int, *, first: int = 1) -> None:
        for number in range(first, first + count):
            self.step(number)
        self.sample()

    def log(self, rank: int, text: str) -> None:
        with self.run.log_path(rank).open("a", encoding="utf-8") as file:
            file.write(text)

    def end(self, state: RunEnd = "completed", reason: str = "all steps are done", fix: str = "") -> None:
        self.now += 1.0
        self.supervisor.write(RunEnded(state=state, reason=reason, fix=fix))
