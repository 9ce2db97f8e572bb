"""What a step waits for is named from the record; beside each finding stands a run that nearly shows it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from llmtop.presets.spec import RunSpec
from llmtop.profiler.findings.find import Finding, findings
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Prediction, Suggestion
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample, ProcessSample
from llmtop.profiler.record.events import (
    AnyEvent,
    HangSuspected,
    HardwareSampled,
    KernelsSeen,
    KernelTime,
    PhaseMemory,
    RunEnded,
    StageBegan,
    StepFinished,
)
from tests.recorded_spec import GIB, MIB, recorded_prediction, recorded_spec

HEALTHY = {"data": 0.01, "forward": 0.33, "backward": 0.56, "optimizer": 0.1}
BUSY = DeviceSample(
    index=0,
    memory_used_bytes=130 * GIB,
    memory_total_bytes=140 * GIB,
    utilization_percent=97.0,
    sm_active_percent=85.0,
    sm_clock_hz=1.98e9,
    nvlink_tx_bytes_per_second=40e9,
    pcie_tx_bytes_per_second=2e8,
    pcie_rx_bytes_per_second=1e8,
    pcie_generation=5,
    pcie_width=16,
)


def step(number: int, rank: int = 0, **fields: Any) -> StepFinished:
    values = {"t": float(number), "loss": 2.0, "step_seconds": 1.0, "phase_seconds": HEALTHY, **fields}
    return StepFinished(step=number, src=f"rank{rank}", **values)


def steps(count: int = 30, ranks: int = 1, **fields: Any) -> list[AnyEvent]:
    return [step(n, rank, **fields) for n in range(1, count + 1) for rank in range(ranks)]


def samples(count: int = 30, host: HostSample | None = None, **fields: Any) -> list[AnyEvent]:
    device = msgspec.structs.replace(BUSY, **fields)
    process = ProcessSample(rank=0, rss_bytes=GIB, cpu_percent=100.0)
    return [
        HardwareSampled(t=n + 0.5, devices=(device,), host=host or HostSample(), processes=(process,))
        for n in range(count)
    ]


def found(
    events: list[AnyEvent], spec: RunSpec | None = None, prediction: Prediction | None = None
) -> dict[str, Finding]:
    spec = spec or recorded_spec("cuda")
    state = fold(RunState(run_id="a-run"), sorted(events, key=lambda event: event.t))
    return {f.key: f for f in findings(state, spec, prediction or recorded_prediction(spec))}


def kernels(nccl: float = 0.0, total: float = 0.95) -> KernelsSeen:
    top = (
        KernelTime(name="nvjet_tst_128x256", seconds=total - nccl, calls=400),
        KernelTime(name="ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", seconds=nccl, calls=40),
    )
    return KernelsSeen(
        step=5, src="rank0", t=5.5, top=top, total_seconds=total, communication=("reduce_scatter",)
    )


# --- the host -------------------------------------------------------------------------------------


def test_a_healthy_run_waits_for_nothing() -> None:
    told = found([*steps(ranks=2), *samples(), kernels()])
    assert not {key for key, finding in told.items() if finding.severity != "info"}


@pytest.mark.parametrize(
    "reading", [{"sm_active_percent": 22.0}, {"sm_active_percent": None, "utilization_percent": 41.0}]
)
def test_idle_devices_with_nothing_else_to_wait_for_wait_for_the_host(reading: dict[str, Any]) -> None:
    told = found([*steps(), *samples(**reading)])["host_bound"]
    assert "22%" in told.evidence or "41% of the time" in told.evidence
    assert "100% of a core" in told.evidence
    assert told.command == "llmtop set a-run liger=true" and "--liger" in told.change


@pytest.mark.parametrize(
    "reading", [{"sm_active_percent": 51.0}, {"sm_active_percent": None, "utilization_percent": 78.0}]
)
def test_devices_that_rest_a_little_are_not_host_bound(reading: dict[str, Any]) -> None:
    assert "host_bound" not in found([*steps(), *samples(**reading)])


def test_kernels_that_fill_half_a_step_are_host_bound() -> None:
    told = found([*steps(), *samples(), kernels(total=0.45)])["host_bound"]
    assert "450 ms of its 1.00 s" in told.evidence
    assert "host_bound" not in found([*steps(), *samples(), kernels(total=0.7)])
    assert "host_bound" not in found([*steps(grad_accum=2), *samples(), kernels(total=0.45)])


def test_what_another_finding_explains_is_not_put_on_the_host() -> None:
    idle = samples(sm_active_percent=20.0)
    waits_for_data = {**HEALTHY, "data": 0.5}
    told = found([*steps(phase_seconds=waits_for_data), *idle])
    assert "input_bound" in told and "host_bound" not in told
    assert "host_bound" not in found([*steps(), *idle], recorded_spec("cuda", offload_optimizer="cpu"))


def test_warm_up_says_nothing_about_speed() -> None:
    noisy = [*steps(3, ranks=2), *samples(3, sm_active_percent=1.0), kernels(nccl=0.9)]
    speed = {"host_bound", "communication_bound", "straggler", "input_bound", "offload_bound_cpu_adam"}
    assert not speed & found(noisy).keys()


# --- links ----------------------------------------------------------------------------------------


def test_collectives_that_take_the_time_are_named_with_what_the_links_carry() -> None:
    spec = recorded_spec("cuda", ranks=8, zero=3)
    told = found([*steps(ranks=8), *samples(), kernels(nccl=0.5)], spec)["communication_bound"]
    assert told.severity == "warning"
    assert "500 ms of 950 ms" in told.evidence and "reduce_scatter" in told.evidence
    assert "37.3 GiB/s" in told.evidence
    assert "--zero 2" in told.change and told.command == "llmtop set a-run zero=2"
    assert (
        found([*steps(ranks=8), *samples(), kernels(nccl=0.3)], spec)["communication_bound"].severity
        == "info"
    )


def test_overlapped_collectives_one_rank_and_a_straggler_are_no_communication_bound() -> None:
    assert "communication_bound" not in found([*steps(ranks=2), *samples(), kernels(nccl=0.2)])
    assert "communication_bound" not in found([*steps(), kernels(nccl=0.5)], recorded_spec("cuda", ranks=1))
    slow = {**HEALTHY, "forward": 0.6}
    late: list[AnyEvent] = [
        step(n, rank, phase_seconds=slow if rank else HEALTHY) for n in range(1, 31) for rank in (0, 1)
    ]
    told = found([*late, *samples(), kernels(nccl=0.5)])
    assert "straggler" in told and "communication_bound" not in told


# --- offload --------------------------------------------------------------------------------------


def test_adam_on_the_cpu_is_set_against_what_is_possible() -> None:
    spec = recorded_spec("cuda", offload_optimizer="cpu")
    gpu = msgspec.structs.replace(spec.gpu, memory_bandwidth_bytes_per_second=4.8e12)
    spec = msgspec.structs.replace(spec, gpu=gpu)
    slow = {**HEALTHY, "optimizer": 30.0}
    told = found([*steps(phase_seconds=slow, step_seconds=31.0), *samples()], spec)["offload_bound_cpu_adam"]
    assert "30.0 s of 31.0 s" in told.evidence and "it could be" in told.evidence
    assert "threads_per_rank" in told.evidence
    assert told.command == "llmtop set a-run grad_accum=2"
    fast = {**HEALTHY, "optimizer": 0.3}
    assert "offload_bound_cpu_adam" not in found([*steps(phase_seconds=fast), *samples()], spec)
    assert "offload_bound_cpu_adam" not in found([*steps(phase_seconds=slow, step_seconds=31.0), *samples()])


def test_offload_that_is_not_needed_is_to_be_brought_back() -> None:
    spec = recorded_spec("cuda", offload_optimizer="cpu")
    back = Suggestion(
        change={"offload_optimizer": "none"}, text="no offload", peak_allocated_bytes=90 * GIB, fits=True
    )
    prediction = msgspec.structs.replace(recorded_prediction(spec), suggestions=(back,))
    slow = {**HEALTHY, "optimizer": 3.0}
    told = found([*steps(phase_seconds=slow, step_seconds=4.0), *samples()], spec, prediction)
    assert told["offload_bound_cpu_adam"].command == "llmtop set a-run offload_optimizer=none"


def test_pcie_is_judged_by_the_link_as_it_is_trained() -> None:
    spec = recorded_spec("cuda", offload_param="cpu", zero=3)
    rates: dict[str, Any] = {"pcie_rx_bytes_per_second": 20e9, "pcie_generation": 4}
    told = found([*steps(), *samples(**rates)], spec)["offload_bound_pcie"]
    assert "63%" in told.evidence and "18.6 GiB/s" in told.evidence
    assert "offload_bound_pcie" not in found([*steps(), *samples(**{**rates, "pcie_generation": 5})], spec)
    assert "offload_bound_pcie" not in found([*steps(), *samples(**rates)])
    assert "offload_bound_pcie" not in found([*steps(), *samples(**{**rates, "pcie_generation": None})], spec)


# --- memory ---------------------------------------------------------------------------------------


def test_room_is_used_by_what_the_prediction_says_fits() -> None:
    spec = recorded_spec("cuda")
    larger = Suggestion(
        change={"micro_batch": 8}, text="micro-batch 8 fits", peak_allocated_bytes=1, fits=True
    )
    new_run = Suggestion(change={"precision": "bf16"}, text="bf16", peak_allocated_bytes=1, fits=True)
    memory = {"forward": PhaseMemory(peak_bytes=50 * GIB, reserved_bytes=52 * GIB)}
    events = [*steps(5, phase_memory=memory), *samples(3, memory_used_bytes=55 * GIB)]
    base = recorded_prediction(spec)
    told = found(events, spec, msgspec.structs.replace(base, suggestions=(larger,)))["memory_unused"]
    assert told.command == "llmtop set a-run micro_batch=8" and "micro-batch 8 fits" in told.change
    assert "memory_unused" not in found([*steps(5, phase_memory=memory), *samples(3)], spec)
    fresh = found(events, spec, msgspec.structs.replace(base, suggestions=(new_run,)))["memory_unused"]
    assert fresh.command == "" and "bf16" in fresh.change


def host_samples(a_second: float, count: int = 90) -> list[AnyEvent]:
    return [
        HardwareSampled(
            t=n + 0.5,
            devices=(BUSY,),
            host=HostSample(
                memory_total_bytes=64 * GIB, memory_available_bytes=round(40 * GIB - a_second * n)
            ),
        )
        for n in range(count)
    ]


def test_host_memory_that_is_full_before_the_run_ends() -> None:
    spec = recorded_spec("cuda", steps=5000)
    told = found([*steps(90), *host_samples(32 * MIB)], spec)["host_memory_grows"]
    assert told.title.startswith("host memory full in 1") and "machine" in told.evidence
    assert told.command == "llmtop stop a-run --save"
    assert "1.88 GiB a minute" in told.evidence
    soon_over = recorded_spec("cuda", steps=200)
    assert "host_memory_grows" not in found([*steps(90), *host_samples(32 * MIB)], soon_over)
    assert "host_memory_grows" not in found([*steps(90), *host_samples(0.0)], spec)
    over = RunEnded(state="completed", reason="done", t=100.0)
    assert "host_memory_grows" not in found([*steps(90), *host_samples(32 * MIB), over], spec)


# --- one rank -------------------------------------------------------------------------------------


def paced(slow_from: int, count: int = 200, odd: int = 0, every: int = 1) -> list[AnyEvent]:
    """Four ranks; rank 2 is slow from a step on, or in the one step `odd`. After 20 steps one of `every` has
    phases."""
    events: list[AnyEvent] = []
    for n in range(1, count + 1):
        for rank in range(4):
            slow = rank == 2 and (n >= slow_from or n == odd)
            phases = {**HEALTHY, "forward": 0.5 if slow else 0.33}
            events.append(step(n, rank, phase_seconds=phases if n <= 20 or n % every == 0 else {}))
    return events


def test_a_straggler_is_named_with_how_much_and_since_when() -> None:
    told = found(paced(120))["straggler"]
    assert told.title == "all ranks wait for rank 2" and "170 ms a step" in told.evidence
    since = int(told.evidence.split("since about step ")[1].split(";")[0])
    assert 95 <= since <= 125
    assert "since the first steps" in found(paced(1))["straggler"].evidence


@pytest.mark.parametrize("every", [1, 5], ids=["all told", "one of five told"])
@pytest.mark.parametrize(("slow_from", "count"), [(25, 200), (40, 300), (60, 200), (120, 200), (500, 1000)])
def test_since_when_a_straggler_is_slow_is_right_to_a_bucket(slow_from: int, count: int, every: int) -> None:
    """The first steps are told all, and on a GPU one of five of the later ones, where marks take time."""
    events = paced(slow_from, count=count, every=every)
    told = found(events)["straggler"]
    assert told.title == "all ranks wait for rank 2" and "170 ms a step" in told.evidence
    since = int(told.evidence.split("since about step ")[1].split(";")[0])
    assert abs(since - slow_from) <= fold(RunState(), events).ranks[2].alone.stride


def test_ranks_that_tell_unequally_many_steps_are_compared_over_the_same_ones() -> None:
    """All of them become slow at the same step: nobody waits."""
    events: list[AnyEvent] = []
    for n in range(1, 1001):
        phases = {**HEALTHY, "forward": 0.33 if n < 500 else 0.66}
        for rank in range(2):
            events.append(step(n, rank, phase_seconds=phases if rank == 0 or n <= 20 or n % 5 == 0 else {}))
    paces = [rank.alone for rank in fold(RunState(), events).ranks.values()]
    assert paces[0].steps > 4 * paces[1].steps
    for end in (505, 520, 600, 1000):
        assert "straggler" not in found([e for e in events if getattr(e, "step", 0) <= end]), end


def test_one_odd_step_is_no_straggler() -> None:
    assert "straggler" not in found(paced(10_000, count=30, odd=28))
    assert "straggler" not in found(paced(10_000))


def test_a_straggler_that_has_recovered_is_none() -> None:
    events = [*paced(1, count=60)]
    events += [step(n, rank) for n in range(61, 200) for rank in range(4)]
    assert "straggler" not in found(events)


def test_what_the_slow_ranks_device_shows_is_told() -> None:
    spec = recorded_spec("cuda", ranks=4)
    hot: dict[str, Any] = {"sm_clock_hz": 1.2e9, "throttle_reasons": ("hardware thermal slowdown",)}
    devices = tuple(
        msgspec.structs.replace(BUSY, index=index, **(hot if index == 2 else {})) for index in range(4)
    )
    told = found([*paced(1, count=40), HardwareSampled(t=99.0, devices=devices)], spec)["straggler"]
    assert "1200 MHz, the others at 1980" in told.evidence and "thermal" in told.evidence


# --- loss scale and hangs -------------------------------------------------------------------------


def scaled(scale_at: dict[int, float], count: int) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    scale = 65536.0
    for n in range(1, count + 1):
        skipped = scale_at.get(n, scale) < scale
        scale = scale_at.get(n, scale)
        events.append(step(n, loss_scale=scale, skipped=skipped))
    return events


def test_a_loss_scale_that_falls_again_and_again_is_collapsing() -> None:
    spec = recorded_spec("cuda", precision="fp16")
    falls = {400 + 15 * n: 65536.0 / 2 ** (n + 1) for n in range(5)}
    told = found(scaled(falls, 470), spec)["loss_scale"]
    assert "halved 5 times" in told.evidence and told.severity == "warning"
    assert "loss_scale" not in found(scaled({400: 32768.0, 440: 16384.0}, 470), spec)


def test_the_search_for_a_loss_scale_is_no_collapse() -> None:
    spec = recorded_spec("cuda", precision="fp16")
    search = {n: 65536.0 / 2**n for n in range(1, 5)}
    assert "loss_scale" not in found(scaled(search, 120), spec)


def test_a_hang_offers_the_stacks_of_the_ranks() -> None:
    hang = HangSuspected(last_step=5, quiet_seconds=300.0, threshold_seconds=200.0, t=400.0)
    told = found([*steps(5, ranks=2), hang])["hang"]
    assert told.command == "llmtop stacks a-run" and "all 2 ranks are at the same step" in told.evidence
    stuck = StageBegan(stage="partition", src="rank1", t=1.0)
    assert "rank 1 in partition" in found([stuck, hang])["hang"].evidence
    assert "hang" not in found([*steps(5), hang, step(6, t=401.0)])


def test_no_number_is_made_of_a_loss_that_is_finite() -> None:
    told = found([*steps(4), step(5, loss=None, grad_norm=math.inf)])
    assert told["loss_not_finite"].severity == "critical"
    assert "loss_not_finite" not in found(steps(5, grad_norm=1e6))
