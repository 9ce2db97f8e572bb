"""Each finding appears for what it names, with the numbers that show it, and not otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtop.presets.spec import RunSpec, Script
from llmtop.profiler.findings.find import Finding, findings
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.checkpointevents import CheckpointRefused, CheckpointSaved
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample, ProcessSample
from llmtop.profiler.record.events import (
    AnyEvent,
    BaselineMeasured,
    Compiling,
    HangSuspected,
    HardwareSampled,
    MemoryClassified,
    PhaseMemory,
    RankFailed,
    RunEnded,
    StageBegan,
    StepFinished,
)
from llmtop.profiler.record.feed import read_state
from tests.recorded import make_recorded_run, started
from tests.recorded_spec import GIB, MIB, Kind, recorded_prediction, recorded_spec


def found(events: list[AnyEvent], spec: RunSpec | None = None, status: Any = None) -> dict[str, Finding]:
    spec = spec or recorded_spec()
    state = fold(RunState(run_id="a-run"), events)
    if status is not None:
        state = msgspec.structs.replace(state, status=status)
    return {finding.key: finding for finding in findings(state, spec, recorded_prediction(spec))}


def step(number: int, rank: int = 0, **fields: Any) -> StepFinished:
    return StepFinished(
        step=number, t=float(number), src=f"rank{rank}", **{"loss": 2.0, "step_seconds": 1.0, **fields}
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_healthy_run_has_nothing_bad_to_say(tmp_path: Path, kind: Kind) -> None:
    run = make_recorded_run(tmp_path, kind=kind)
    assert {f.severity for f in findings(read_state(run), run.spec(), run.prediction())} <= {"info"}


def test_every_finding_has_evidence_and_a_title_and_the_worst_comes_first(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda", end="out_of_memory")
    state = fold(read_state(run), [step(99, loss=None), Compiling(what="cpu_adam")])
    result = findings(state, run.spec(), run.prediction())
    assert [f.severity for f in result] == ["critical", "critical", "info"]
    assert all(f.title and f.evidence and f.change for f in result)
    # As much as one half of a terminal of 80 columns shows.
    assert all(len(f.title) <= 36 for f in result)


@pytest.mark.parametrize(("factor", "severity"), [(1.2, "warning"), (0.8, "info")])
def test_a_prediction_that_is_off_names_the_component(factor: float, severity: str) -> None:
    peak = recorded_prediction(recorded_spec()).peak_allocated_bytes
    actual = round(peak * factor)
    told = found(
        [
            MemoryClassified(
                step=1, moment="end_of_forward", components={"activations": 400 * MIB}, src="rank0"
            ),
            step(1, phase_memory={"forward": PhaseMemory(peak_bytes=actual)}),
        ]
    )["prediction_off"]
    assert told.severity == severity
    assert "activations" in told.evidence and "rank 0 in forward" in told.evidence
    close = round(peak * 1.05)
    assert "prediction_off" not in found([step(1, phase_memory={"forward": PhaseMemory(peak_bytes=close)})])


def cuda_sample(used: int, total: int = 140 * GIB, **fields: Any) -> HardwareSampled:
    device = DeviceSample(index=0, memory_used_bytes=used, memory_total_bytes=total, **fields)
    return HardwareSampled(devices=(device,))


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, "--micro-batch from 1 to 2"),
        ({"gradient_checkpointing": True}, "--no-gradient-checkpointing"),
        ({"zero": 3}, "--zero 2"),
        ({"offload_optimizer": "cpu", "gradient_checkpointing": True}, "--offload-optimizer none"),
    ],
)
def test_unused_memory_names_the_setting_that_would_use_it(options: dict[str, Any], change: str) -> None:
    spec = recorded_spec("cuda", **options)
    memory = {"forward": PhaseMemory(peak_bytes=60 * GIB, reserved_bytes=61 * GIB)}
    events: list[AnyEvent] = [step(n, phase_memory=memory) for n in (1, 2)]
    told = found([*events, cuda_sample(63 * GIB)], spec)["memory_unused"]
    assert "77.0 GiB" in told.title
    assert change in told.change
    assert "memory_unused" not in found([*events, cuda_sample(120 * GIB)], spec)


@pytest.mark.parametrize(
    ("used", "limit", "severity"), [(14.6, 16, "warning"), (15.8, 16, "critical"), (10, 16, None)]
)
def test_host_memory_near_the_cgroup_limit(used: float, limit: int, severity: str | None) -> None:
    spec = recorded_spec("cuda", offload_optimizer="cpu")
    host = HostSample(
        memory_total_bytes=256 * GIB,
        memory_available_bytes=200 * GIB,
        cgroup_used_bytes=round(used * GIB),
        cgroup_limit_bytes=limit * GIB,
    )
    told = found([HardwareSampled(host=host)], spec).get("host_memory_short")
    assert (told.severity if told else None) == severity
    if told:
        assert "cgroup" in told.title and "nvme" in told.change


def test_host_memory_near_the_machines_memory_without_a_limit() -> None:
    host = HostSample(memory_total_bytes=100, memory_available_bytes=5, swap_used_bytes=3 * GIB)
    told = found([HardwareSampled(host=host)])["host_memory_short"]
    assert "machine" in told.title and "swap" in told.evidence and "--gpus 1" in told.change


def machine_sample(used: int, own: int) -> HardwareSampled:
    host = HostSample(memory_total_bytes=24 * GIB, memory_available_bytes=24 * GIB - used)
    return HardwareSampled(host=host, processes=(ProcessSample(rank=0, pss_bytes=own, rss_bytes=own),))


def test_memory_that_others_hold_is_named_as_such() -> None:
    told = found([machine_sample(23 * GIB, 884 * MIB)])["host_memory_short"]
    assert told.title == "other processes fill memory"
    assert "884 MiB of it this run's" in told.evidence and "--gpus" not in told.change
    assert told.change == "end other programs on this machine"
    own = found([machine_sample(23 * GIB, 20 * GIB)])["host_memory_short"]
    assert "machine" in own.title and "--gpus 1" in own.change


def test_a_finding_about_the_present_goes_when_the_memory_is_free_again() -> None:
    full, free = machine_sample(23 * GIB + 512 * MIB, 884 * MIB), machine_sample(2 * GIB, 884 * MIB)
    assert found([full])["host_memory_short"].severity == "critical"
    assert "host_memory_short" not in found([full, free])
    ended = found([full, free, RunEnded(state="completed", reason="all done", fix="")])["host_memory_short"]
    assert (ended.severity, ended.title) == ("warning", "other processes filled memory")
    killed = found([full, free, RunEnded(state="failed", reason="SIGKILL", fix="")])["host_memory_short"]
    assert killed.severity == "critical"


def test_pages_that_the_kernel_took_make_no_number_of_the_prediction() -> None:
    def seen(peak: int, kind: Kind = "cpu") -> dict[str, Finding]:
        parts = {"parameters": 400 * MIB}
        moment = MemoryClassified(step=1, moment="end_of_forward", components=parts, src="rank0")
        return found(
            [moment, step(1, phase_memory={"forward": PhaseMemory(peak_bytes=peak)})], recorded_spec(kind)
        )

    told = seen(100 * MIB)
    assert "300 MiB larger than the 100 MiB" in told["pages_reclaimed"].evidence
    assert "prediction_off" not in told
    assert "pages_reclaimed" not in seen(390 * MIB)
    assert "pages_reclaimed" not in seen(100 * MIB, "cuda")


def test_fragmentation() -> None:
    spec = recorded_spec("cuda")
    memory = {"forward": PhaseMemory(peak_bytes=50 * GIB, reserved_bytes=60 * GIB)}
    told = found([step(1, phase_memory=memory)], spec)["fragmentation"]
    assert "expandable_segments" in told.change and "10.0 GiB" in told.title
    tidy = {"forward": PhaseMemory(peak_bytes=50 * GIB, reserved_bytes=55 * GIB)}
    assert "fragmentation" not in found([step(1, phase_memory=tidy)], spec)


def test_other_processes_on_the_device() -> None:
    busy = BaselineMeasured(device_used_before_bytes=9 * GIB, src="rank1")
    assert "rank 1" in found([busy], recorded_spec("cuda"))["other_processes"].title
    free = BaselineMeasured(device_used_before_bytes=640_000_000, src="rank1")
    assert "other_processes" not in found([free], recorded_spec("cuda"))


def test_out_of_memory_before_any_step_points_at_the_prediction_and_its_cheapest_fix() -> None:
    spec = recorded_spec("cuda")
    prediction = recorded_prediction(spec)
    failure = RankFailed(
        error_type="OutOfMemoryError", message="CUDA out of memory.", out_of_memory=True, src="rank1"
    )
    state = fold(RunState(), [failure])
    (told,) = findings(state, spec, prediction)
    assert told.severity == "critical"
    assert "rank 1: CUDA out of memory; no step was measured" in told.evidence
    assert "optimizer state" in told.evidence
    assert told.change.startswith("ZeRO-3 (more traffic between GPUs): predicted peak")
    assert told.command == ""  # it is not known yet that the run has ended
    unknown = msgspec.structs.replace(spec, gpu=msgspec.structs.replace(spec.gpu, memory_bytes=None))
    blind = msgspec.structs.replace(prediction, device_memory_bytes=None)
    (without,) = findings(state, unknown, blind)
    assert without.change == "smaller --micro-batch or --seq-len, or --gradient-checkpointing"


def test_input_bound() -> None:
    def steps(data: float) -> list[AnyEvent]:
        return [step(n, phase_seconds={"data": data, "forward": 0.4, "backward": 0.4}) for n in range(1, 8)]

    assert found(steps(0.5))["input_bound"].severity == "warning"
    assert found(steps(0.15))["input_bound"].severity == "info"
    assert "input_bound" not in found(steps(0.02))
    assert "input_bound" not in found(steps(0.5)[:3])


def a_script() -> RunSpec:
    script = Script(command=("python", "train.py"), folder="/", described=True)
    return msgspec.structs.replace(recorded_spec("cuda"), script=script)


def test_of_a_script_only_the_time_outside_its_phases_is_known() -> None:
    """It may have loaded, evaluated or saved then, and options of the trainer are none of its own."""
    phases = {"data": 0.9, "forward": 0.05, "backward": 0.05}
    told = found([step(n, phase_seconds=phases) for n in range(1, 8)], a_script())
    assert "input_bound" not in told
    finding = told["between_steps"]
    assert "outside forward, backward and optimizer: 900 ms of 1.00 s a step (90.0%)" in finding.evidence
    assert "evaluation" in finding.evidence and "disk" not in finding.change and "--" not in finding.change
    quick: list[AnyEvent] = [step(n, phase_seconds={**phases, "data": 0.001}) for n in range(1, 8)]
    assert "between_steps" not in found(quick, a_script())


def test_of_a_script_with_data_loaders_loading_is_told_apart() -> None:
    phases = {"data": 0.3, "between": 0.15, "forward": 0.3, "backward": 0.4, "optimizer": 0.05}
    told = found([step(n, phase_seconds=phases) for n in range(1, 8)], a_script())
    assert told["input_bound"].severity == "warning"
    assert "300 ms of 1.20 s a step (25.0%)" in told["input_bound"].evidence
    assert "num_workers" in told["input_bound"].change and "--data" not in told["input_bound"].change
    rest = told["between_steps"]
    assert rest.severity == "info" and "150 ms of 1.20 s a step (12.5%)" in rest.evidence
    assert "data loaders" in rest.evidence and "data loading" not in rest.evidence
    keeps_up = {**phases, "data": 0.01, "between": 0.01}
    assert (
        not {"input_bound", "between_steps"}
        & found([step(n, phase_seconds=keeps_up) for n in range(1, 8)], a_script()).keys()
    )


def test_a_record_whose_steps_have_no_loading_still_has_findings() -> None:
    """Of the phases of a step any may be missing: a newer writer, or a clock that could not be read."""
    phases = {"between": 0.15, "forward": 0.3, "backward": 0.4, "optimizer": 0.05}
    told = found([step(n, phase_seconds=phases) for n in range(1, 8)], a_script())
    assert "input_bound" not in told
    assert "150 ms of 900 ms a step (16.7%)" in told["between_steps"].evidence


def test_a_script_is_told_no_option_and_no_command_that_it_does_not_take() -> None:
    memory = {"forward": PhaseMemory(peak_bytes=60 * GIB, reserved_bytes=61 * GIB)}
    events: list[AnyEvent] = [step(n, phase_memory=memory) for n in (1, 2)]
    events.append(cuda_sample(63 * GIB))
    own, script = (found(events, spec)["memory_unused"] for spec in (recorded_spec("cuda"), a_script()))
    assert own.command.startswith("llmtop set ")
    assert script.command == "" and "--" not in script.change


def test_straggler_is_the_rank_that_is_slow_alone() -> None:
    def steps(slow: float, count: int = 12) -> list[AnyEvent]:
        return [
            step(n, rank, phase_seconds={"forward": slow if rank == 2 else 0.4, "backward": 1.0})
            for n in range(1, count + 1)
            for rank in range(4)
        ]

    assert "rank 2" in found(steps(0.6))["straggler"].title
    assert "straggler" not in found(steps(0.45))
    assert "straggler" not in found(steps(0.6, count=6))


def test_throttling_by_heat_is_worse_than_a_power_limit() -> None:
    def samples(*reasons: str) -> list[AnyEvent]:
        return [cuda_sample(GIB, throttle_reasons=reasons) for _ in range(5)]

    spec = recorded_spec("cuda")
    assert found(samples("hardware thermal slowdown"), spec)["throttled"].severity == "warning"
    assert found(samples("power cap"), spec)["throttled"].severity == "info"
    assert "throttled" not in found(samples(), spec)


def test_a_loss_that_is_not_a_number() -> None:
    events: list[AnyEvent] = [step(1), step(2, loss=None), step(3, loss=None)]
    told = found(events, recorded_spec("cpu", max_grad_norm=0.0))["loss_not_finite"]
    assert told.severity == "critical"
    assert "2 steps, first in step 2" in told.evidence
    assert "learning-rate from 0.002" in told.change and "max_grad_norm" in told.change
    assert found([*events, step(4)])["loss_not_finite"].severity == "warning"
    assert "loss_not_finite" not in found([step(1)])


def test_other_ranks_give_no_loss_and_that_is_no_finding() -> None:
    assert "loss_not_finite" not in found([step(1, rank=1, loss=None)])


def test_loss_scale() -> None:
    spec = recorded_spec("cuda", precision="fp16")

    def steps(skipped: int, scale: float) -> list[AnyEvent]:
        return [step(n, skipped=n <= skipped, loss_scale=65536.0 if n == 1 else scale) for n in range(1, 51)]

    assert "loss_scale" not in found(steps(2, 16384.0), spec)
    assert found(steps(10, 64.0), spec)["loss_scale"].severity == "warning"
    told = found(steps(16, 1.0), spec)["loss_scale"]
    assert told.severity == "critical" and "65536 to 1" in told.evidence


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_skipped_steps_without_fp16_are_not_called_its_overflow(precision: str) -> None:
    events: list[AnyEvent] = [step(n, loss=None, skipped=True, loss_scale=1.0) for n in range(1, 21)]
    told = found(events, recorded_spec("cuda", precision=precision))
    assert "loss_scale" not in told
    assert told["steps_skipped"].title == "gradients are not finite; steps are skipped"
    assert told["steps_skipped"].evidence.startswith("20 of 20 steps skipped")
    assert "loss scale" not in told["steps_skipped"].evidence
    for key in ("steps_skipped", "loss_not_finite"):
        assert "lower --learning-rate" in told[key].change and "bf16" not in told[key].change


def test_a_hang_names_the_rank_that_is_behind() -> None:
    events: list[AnyEvent] = [step(1), step(2), step(1, rank=1)]
    hang = HangSuspected(last_step=2, quiet_seconds=420.0, threshold_seconds=300.0, t=500.0)
    told = found([*events, hang])["hang"]
    assert "7m 00s" in told.evidence and "rank 1 is behind at step 1" in told.evidence
    assert "llmtop logs a-run" in told.change
    starting = found([StageBegan(stage="process_group", src="rank0"), hang])["hang"]
    assert "rank 0 in process group" in starting.evidence
    assert "since step 2;" in told.evidence


@pytest.mark.parametrize(("after", "since"), [(1, "since step 1;"), (None, "since it was gone on with;")])
def test_a_hang_before_the_first_step_is_since_the_one_that_it_went_on_after(
    after: int | None, since: str
) -> None:
    began = started(600.0, after, world_size=2)
    ended = RunEnded(state="stopped", reason="asked", t=500.0)
    hang = HangSuspected(last_step=1, quiet_seconds=420.0, threshold_seconds=300.0, t=1100.0)
    stage = StageBegan(stage="process_group", src="rank0", t=601.0)
    assert since in found([step(1), step(2), ended, began, stage, hang])["hang"].evidence


def test_failed_lost_and_compiling() -> None:
    end = RunEnded(state="failed", reason="rank 1 was killed by SIGKILL", fix="see the kernel log")
    told = found([end])["failed"]
    assert (told.evidence, told.change) == ("rank 1 was killed by SIGKILL", "see the kernel log")
    error = RankFailed(error_type="ValueError", message="bad\ntrace", src="rank0")
    bare = found([error, RunEnded(state="failed", reason="rank 0 exited with 1")])["failed"]
    assert bare.evidence == "rank 0 exited with 1; rank 0: ValueError: bad"
    assert "llmtop logs a-run" in bare.change
    assert found([step(3)], status="lost")["lost"].severity == "critical"
    assert "cpu_adam" in found([Compiling(what="cpu_adam")])["compiling"].title


def refused(number: int, **fields: Any) -> CheckpointRefused:
    why = "it takes 20.0 MiB, and /runs has 49.1 MiB free"
    return CheckpointRefused(step=number, why=why, t=float(number), src="rank0", **fields)


def test_a_refused_checkpoint_is_critical_until_one_is_saved() -> None:
    events: list[AnyEvent] = [step(4), refused(2), refused(4)]
    told = found(events)["checkpoints_refused"]
    assert (told.severity, told.title) == ("critical", "the training is not saved")
    assert "2 checkpoints refused; the checkpoint of step 4 could not be saved, there is none: it takes" in (
        told.evidence
    )
    assert "llmtop stop a-run --save" in told.change
    assert "LLMTOP_RUNS_DIR" in found(events, status="completed")["checkpoints_refused"].change
    saved = CheckpointSaved(step=6, path="x", size_bytes=1, seconds=1.0, t=6.0, src="rank0")
    later = found([*events, step(6), saved])["checkpoints_refused"]
    assert (later.severity, later.change) == ("warning", "")
    assert "2 checkpoints refused, the last at step 4" in later.evidence
    again = found([*events, saved, refused(8)])["checkpoints_refused"]
    assert again.severity == "critical" and "the newest is of step 6" in again.evidence


def test_a_state_refused_for_a_relaunch_is_no_lost_checkpoint() -> None:
    assert "checkpoints_refused" not in found([step(4), refused(4, passing=True)])
