"""What the pictures show: runs, predictions and searches that are made up, the same each time.

A prediction is one by hand, so that a formula that is mended changes no picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import Change, SweepRow
from llmtop.profiler.cost.where import Where, WhereRow
from llmtop.profiler.findings.finding import Finding, Seen
from llmtop.profiler.hardware.gpuuse import GpuProcess, GpusInUse, GpuUse
from llmtop.profiler.memory.predict import Brief
from llmtop.profiler.memory.result import Prediction, Suggestion
from llmtop.profiler.record.changeevents import (
    ChangeApplied,
    ChangeAsked,
    ChangeRefused,
    KeyChange,
    RestageBegan,
    Restaged,
)
from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.record.events import HangSuspected, KernelsSeen
from llmtop.profiler.record.rundir import RunDir
from tests.recorded import BEGAN, Recorder, make_recorded_run
from tests.recorded_spec import GIB, recorded_prediction, recorded_spec

LATER = BEGAN + 7200
"""When somebody looks."""
STACKS = """\
=== rank 0, process 4242, by py-spy
Thread 4242 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    step (llmtop/trainer/worker/loop.py:88)
=== rank 1, process 4243, by py-spy
Thread 4243 (idle): "MainThread"
    read (llmtop/trainer/worker/data.py:140)
"""
_TOTAL_BYTES = 150_754_820_096
HERE = Machine(gpu="h200", gpus=4, host_memory_bytes=1008 * GIB, gpu_memory_bytes=_TOTAL_BYTES)
_DIGITS = "0123456789abcdef"


def gpus() -> GpusInUse:
    """Four, on one of which somebody trains, and one process that nobody here can see."""
    ada = GpuProcess(pid=4242, user="ada", command="python train.py --big", memory_bytes=60 * GIB)
    used = {0: (ada,), 2: (ada, GpuProcess(pid=77))}
    return GpusInUse(
        gpus=tuple(
            GpuUse(
                index=index,
                uuid=f"GPU-{index:08x}",
                preset="h200",
                name="NVIDIA H200",
                memory_used_bytes=61 * GIB if index in used else GIB // 2,
                memory_total_bytes=_TOTAL_BYTES,
                utilization_percent=97.0 if index in used else 0.0,
                processes=used.get(index, ()),
            )
            for index in range(4)
        )
    )


def numbered_ids(monkeypatch: Any) -> None:
    """Runs are called by when they were made up, and by a number."""
    made = [0]

    def unused_path(root: Path, name: str) -> Path:
        made[0] += 1
        return root / f"20261129-18450{made[0]}-{name}-00{_DIGITS[made[0]]}0"

    monkeypatch.setattr("llmtop.profiler.record.rundir.unused_path", unused_path)


class FineRecorder(Recorder):
    """Samples `fine` times a step, with links that carry what the phases of ZeRO-3 would."""

    fine = 0
    _share = 1.0

    def pass_step(self, seconds: float) -> None:
        for number in range(self.fine):
            super().pass_step(seconds / self.fine)
            self._share = (number + 0.5) / self.fine
            self._sample()
        if not self.fine:
            super().pass_step(seconds)

    def _device(self, index: int, used: int) -> DeviceSample:
        device = super()._device(index, used)
        if not self.fine:
            return device
        # Gathers under forward; gathers and sums under backward; little beside the optimizer.
        rate = 9e10 if self._share < 0.35 else 1.7e11 if self._share < 0.9 else 2e9
        return replace(device, nvlink_tx_bytes_per_second=rate, nvlink_rx_bytes_per_second=rate)


def changed_run(root: Path) -> RunDir:
    """On two GPUs: two changes, one of them by a relaunch, and one that was refused; then it completed."""
    spec = recorded_spec("cuda", steps=40)
    run = RunDir.create(root, spec, recorded_prediction(spec), {"zero_optimization": {"stage": 2}})
    for _ in range(2):
        run.add_setting(spec, recorded_prediction(spec), {})
    recorder = FineRecorder(run, spec, BEGAN)
    recorder.kernels = KernelsSeen(
        step=3, attention="sdpa_flash", attention_calls=32, optimizer="deepspeed_fused_adam"
    )
    write = recorder.supervisor.write
    recorder.start()
    _steps(recorder, 1, 12)
    write(_asked(1, "micro_batch", 1, 2))
    recorder.time.advance(0.2)
    for rank in recorder.ranks:
        rank.write(ChangeApplied(setting=1, step=13))
    _steps(recorder, 13, 20)
    write(_asked(2, "zero", 2, 3, restage=True))
    write(RestageBegan(setting=2, from_setting=1, last_step=20, world_size=2))
    recorder.time.advance(21.0)
    _steps(recorder, 21, 21)
    stages = {"save": 4.5, "import": 11.0, "engine": 4.0, "first_step": 2.7}
    write(Restaged(setting=2, step=21, down_seconds=22.2, stage_seconds=stages))
    _steps(recorder, 22, 30)
    recorder.time.advance(90)
    write(HangSuspected(last_step=30, quiet_seconds=90.0, threshold_seconds=60.0))
    write(ChangeRefused(asked=("zero=9",), reason="zero = 9 is not valid"))
    recorder.fine = 24
    _steps(recorder, 31, 40)
    recorder.end("completed", 40)
    recorder.close()
    with run.log_path(0).open("a", encoding="utf-8") as log:
        log.write("WARNING: the learning rate is high\nERROR: naïve café — 漢字\n")
        log.write("a long line " * 12 + "\n")
    return run


def other_runs(root: Path) -> None:
    make_recorded_run(root, steps=12)
    make_recorded_run(root, kind="cuda", steps=12, end="out_of_memory", pace=1.4, attention="eager")
    make_recorded_run(root, kind="cuda", steps=40, end="stopped", pace=2.0, attention="eager")


def _steps(recorder: Recorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        recorder.step(step)


def _asked(setting: int, key: str, old: object, new: object, *, restage: bool = False) -> ChangeAsked:
    return ChangeAsked(
        setting=setting,
        restage=restage,
        changes=(KeyChange(key=key, old=old, new=new, restage=restage),),
        fits=True,
        old_peak_bytes=88 * GIB,
        new_peak_bytes=64 * GIB if restage else 91 * GIB,
        expected_down_seconds=19.0 if restage else 0.0,
    )


def suggested(spec: RunSpec) -> Prediction:
    """A prediction by hand, with changes that can be applied."""
    prediction = recorded_prediction(spec)
    changes = (
        Suggestion(
            change={"liger": True},
            text="turn on Liger's kernels: the logits are never whole",
            peak_allocated_bytes=79 * GIB,
            needed_bytes=81 * GIB,
            fits=True,
            tokens_per_second=5600.0,
        ),
        Suggestion(
            change={"zero": 3},
            text="ZeRO-3: parameters are split too, and gathered for each layer",
            peak_allocated_bytes=72 * GIB,
            needed_bytes=74 * GIB,
            fits=True,
            tokens_per_second=4100.0,
        ),
    )
    return replace(prediction, suggestions=changes)


def found(_: Seen) -> Iterator[Finding]:
    """Two findings, whatever the run did."""
    yield Finding(
        key="straggler",
        severity="warning",
        title="rank 1 is the slowest: every other rank waits for it",
        evidence="rank 1 takes 689 ms for what rank 0 does in 414 ms, over the last 20 steps; its GPU has the"
        " same clock and no reason to throttle",
        change="look at what else runs on its processor cores",
        command="llmtop stacks latest --rank 1",
    )
    yield Finding(
        key="memory_unused",
        severity="info",
        title="55.7 GiB of a GPU are never used",
        evidence="the peak so far is 84.7 GiB of 140 GiB",
        change="a micro-batch of 2 is predicted to fit, with 5.6K tok/s",
        command="llmtop set latest micro_batch=2",
    )


def _brief(need_gib: float, memory_gib: float, rate: float) -> Brief:
    return Brief(
        fits=need_gib <= memory_gib,
        peak_allocated_bytes=round(need_gib * 0.9 * GIB),
        needed_bytes=round(need_gib * GIB),
        device_memory_bytes=round(memory_gib * GIB),
        host_bytes=12 * GIB,
        step_seconds=8192 / rate,
        tokens_per_second=rate,
    )


def judged(spec: RunSpec, change: Change) -> SweepRow | tuple[str, str]:
    """More fits with a higher stage and a smaller batch; half of what is slow."""
    micro, zero = int(change["micro_batch"]), int(change["zero"])
    if micro == 64 and zero == 0:
        return "micro_batch", "a batch of 64 is more than the data has"
    rate = 9000.0 * micro / (micro + 3) / (1 + 0.12 * zero)
    return SweepRow(settings=change, brief=_brief(150 - 28 * zero + 3.1 * micro, 140.4, rate))


def found_where(base_of: Callable[[Change], RunSpec], **_: Any) -> Where:
    """Of three kinds of GPU, one of which is too small."""
    rows = (
        _where_row("h200", 141, 2, {"micro_batch": 8, "zero": 1}, 9400.0),
        _where_row("a100-40gb", 40, 8, {"micro_batch": 2, "zero": 3}, 4200.0),
        WhereRow(
            gpu="t4",
            gpu_memory_bytes=15 * GIB,
            gpus=None,
            settings={},
            brief=_brief(19.0, 15, 100.0),
            kwh_per_million_tokens=None,
            why="needs 19.0 GiB of 15.0 GiB",
            short_bytes=4 * GIB,
            tried_gpus=8,
        ),
    )
    return Where(space={"micro_batch": (1, 2, 4, 8), "zero": (0, 1, 2, 3)}, rows=rows)


def _where_row(gpu: str, memory_gib: int, gpus: int, settings: Change, rate: float) -> WhereRow:
    return WhereRow(
        gpu=gpu,
        gpu_memory_bytes=memory_gib * GIB,
        gpus=gpus,
        settings=settings,
        brief=_brief(memory_gib * 0.8, memory_gib, rate),
        kwh_per_million_tokens=0.04,
        why="",
    )
