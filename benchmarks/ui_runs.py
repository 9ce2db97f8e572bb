"""Recorded runs for the benchmark of the app: long ones written in one go, and live ones written on a clock.

Lines are those that a real run writes: the same structs, encoded by the same library.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

from llmtop.presets.catalog import load_recipe
from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample, LinkSample, ProcessSample
from llmtop.profiler.record.eventbase import EVENT_VERSION
from llmtop.profiler.record.events import (
    AnyEvent,
    HardwareSampled,
    PhaseMemory,
    RankStarted,
    RunEnded,
    RunStarted,
    StageBegan,
    StageFinished,
    StepFinished,
)
from llmtop.profiler.record.rundir import HARDWARE, SUPERVISOR, RunDir

GIB = 1 << 30
BEGAN = 1_795_000_000.0


def long_spec(steps: int, ranks: int) -> RunSpec:
    """Llama-3.1-8B by ZeRO-3 on H200s."""
    values = {**load_recipe("full-zero2").values, "gpu": "h200", "gpus": ranks, "zero": 3, "steps": steps}
    layer = Layer(source=ValueSource.RECIPE, detail="full-zero2", values=values)
    return resolve([layer], name="bench", machine=Machine(gpu="h200", gpus=ranks, host_memory_bytes=None))


def step_event(step: int, rank: int, t: float, seconds: float) -> StepFinished:
    wave = 1 + 0.03 * math.sin(step * 0.7 + rank)
    shares = {"data": 0.01, "forward": 0.31, "backward": 0.58, "optimizer": 0.1}
    memory = {
        phase: PhaseMemory(
            allocated_bytes=52_428_800_123 + 7 * step + index,
            peak_bytes=61_203_283_968 + (step % 97) * 4096 + index,
            reserved_bytes=66_571_993_088,
        )
        for index, phase in enumerate(shares)
    }
    return StepFinished(
        v=EVENT_VERSION,
        t=t + 0.0003 * rank,
        m=t - BEGAN,
        src=f"rank{rank}",
        step=step,
        loss=1.9 + 5.7 * math.exp(-step / 900),
        learning_rate=2e-5,
        grad_norm=0.9 + 0.2 * wave,
        tokens=262_144,
        micro_batch=4,
        grad_accum=2,
        step_seconds=seconds * wave,
        phase_seconds={phase: seconds * share * wave for phase, share in shares.items()},
        phase_memory=memory,
    )


def sample_event(t: float, number: int, ranks: int) -> HardwareSampled:
    """As the sampler writes it on a baseboard of H200s: single links only now and then."""
    wave = math.sin(number * 0.37)
    links = tuple(LinkSample(link, 2_280_000_000, 2_270_000_000, 0, 0, 0) for link in range(18))
    devices = tuple(
        DeviceSample(
            index=index,
            name="NVIDIA H200",
            memory_used_bytes=70 * GIB + round(wave * 3e8) + index * 1_000_000,
            memory_total_bytes=150_754_820_096,
            own_memory_bytes=69 * GIB,
            utilization_percent=96.0 + round(3 * wave),
            power_watts=612.0 + 40 * wave + index,
            power_limit_watts=700.0,
            temperature_celsius=58.0 + round(3 * wave),
            sm_clock_hz=1.98e9,
            memory_clock_hz=3.2e9,
            throttle_reasons=(),
            nvlink_tx_bytes_per_second=41e9 * (1 + 0.1 * wave),
            nvlink_rx_bytes_per_second=41e9 * (1 - 0.1 * wave),
            pcie_tx_bytes_per_second=2.1e8,
            pcie_rx_bytes_per_second=1.4e8 * (1 + 0.2 * wave),
            process_count=1,
            sm_active_percent=91.0 + 4 * wave,
            sm_occupancy_percent=41.0,
            tensor_active_percent=57.0 + 3 * wave,
            dram_active_percent=44.0 + 2 * wave,
            fp32_active_percent=3.0,
            fp16_active_percent=0.0,
            energy_joules=5e6 + 612.0 * number,
            ecc_corrected=0,
            ecc_uncorrected=0,
            pcie_generation=5,
            pcie_width=16,
            nvlinks_active=18,
            links=links if number % 5 == 0 else (),
        )
        for index in range(ranks)
    )
    host = HostSample(
        memory_total_bytes=2048 * GIB,
        memory_available_bytes=1900 * GIB - round(1e8 * wave),
        cpu_percent=14.0 + wave,
        disk_read_bytes_per_second=0.0,
        disk_write_bytes_per_second=2e5 * (1 + wave),
        network_receive_bytes_per_second=900.0,
        network_send_bytes_per_second=700.0 + 100 * wave,
    )
    processes = tuple(
        ProcessSample(rank=rank, rss_bytes=9 * GIB + rank, pss_bytes=7 * GIB, cpu_percent=101.0 + wave)
        for rank in range(ranks)
    )
    return HardwareSampled(
        v=EVENT_VERSION, t=t, m=t - BEGAN, src=HARDWARE, devices=devices, host=host, processes=processes
    )


class LiveRun:
    """A run whose supervisor is this process; its logs grow as it is told."""

    def __init__(self, root: Path, *, steps: int, ranks: int, began: float = BEGAN) -> None:
        self.ranks = ranks
        spec = long_spec(steps, ranks)
        self.run = RunDir.create(root, spec, predict_with_suggestions(spec), {})
        self.run.write_supervisor_pid()
        self._encode = msgspec.json.Encoder().encode
        names: tuple[str | int, ...] = (SUPERVISOR, HARDWARE, *range(ranks))
        self._logs = {name: self.run.events_path(name).open("ab", buffering=1 << 20) for name in names}
        self._start(began)

    def _start(self, t: float) -> None:
        self._put(
            SUPERVISOR,
            RunStarted(
                v=EVENT_VERSION,
                t=t,
                src=SUPERVISOR,
                run_id=self.run.run_id,
                name="bench",
                pid=os.getpid(),
                host="benchhost",
                world_size=self.ranks,
                llmtop_version="0.1.0",
            ),
        )
        for rank in range(self.ranks):
            src = f"rank{rank}"
            self._put(SUPERVISOR, RankStarted(v=EVENT_VERSION, t=t, src=SUPERVISOR, rank=rank, pid=10 + rank))
            self._put(rank, StageBegan(v=EVENT_VERSION, t=t, src=src, stage="import"))
            self._put(rank, StageFinished(v=EVENT_VERSION, t=t, src=src, stage="import", seconds=1.0))
        self.flush()

    def _put(self, name: str | int, event: AnyEvent) -> None:
        self._logs[name].write(self._encode(event) + b"\n")

    def step(self, step: int, t: float, seconds: float) -> None:
        for rank in range(self.ranks):
            self._put(rank, step_event(step, rank, t, seconds))

    def sample(self, t: float, number: int) -> None:
        self._put(HARDWARE, sample_event(t, number, self.ranks))

    def log_line(self, text: str) -> None:
        with self.run.log_path(0).open("a") as log:
            log.write(text + "\n")

    def flush(self) -> None:
        for log in self._logs.values():
            log.flush()

    def end(self, t: float) -> None:
        end = RunEnded(v=EVENT_VERSION, t=t, src=SUPERVISOR, state="completed", reason="done")
        self._put(SUPERVISOR, end)
        self.close()

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


def make_long_run(root: Path, *, steps: int, ranks: int, sample_every: int) -> RunDir:
    """A run that has ended, a step a second, with a sample of the hardware each `sample_every` steps."""
    live = LiveRun(root, steps=steps, ranks=ranks)
    for step in range(1, steps + 1):
        live.step(step, BEGAN + step, 1.0)
        if step % sample_every == 0:
            live.sample(BEGAN + step, step // sample_every)
    live.end(BEGAN + steps + 1)
    return live.run
