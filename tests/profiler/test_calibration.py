"""What a calibration changes of a prediction, whose file counts, and that a real one is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import MachineFigures, RunSpec, ValueSource
from llmtop.profiler.cost.calibration import (
    Calibration,
    calibrated,
    doubts,
    find,
    machine_name,
    path_for,
    save,
    work_of,
)
from llmtop.profiler.cost.steptime import predict_step_seconds, step_time
from llmtop.profiler.memory.assume import why_untimed
from llmtop.profiler.memory.predict import predict
from llmtop.tui.commandline.arguments import CommandParser
from llmtop.tui.commands import calibrate as command

FIGURES = MachineFigures(
    date="2026-11-30",
    matmul_flops_per_second=6e14,
    attention_flops_per_second=3e14,
    memory_bytes_per_second=3e12,
    loss_seconds_per_logit=1e-9,
    optimizer_seconds_per_weight=1e-10,
    launch_seconds=5e-6,
    pcie_bytes_per_second=5e10,
)


def spec(**options: object) -> RunSpec:
    values = {"model": "llama-3.1-8b", "gpu": "h200", "zero": 3, "micro_batch": 2, "seq_len": 4096, **options}
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values=values)
    return resolve([layer], name="test", machine=Machine(gpu="h200", gpus=1, host_memory_bytes=1 << 36))


def calibration(run: RunSpec, **changes: object) -> Calibration:
    made = Calibration(
        gpu=run.gpu.name,
        processor=machine_name(),
        date=FIGURES.date,
        versions={"torch": "2.13"},
        took_seconds=9.0,
        work=work_of(run, 2),
        figures=FIGURES,
    )
    return replace(made, **changes)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def on_machine(run: RunSpec, figures: MachineFigures = FIGURES) -> RunSpec:
    return calibrated(run, calibration(run, figures=figures))


def test_a_faster_machine_takes_less_time_and_memory_stays() -> None:
    run = on_machine(spec())
    faster = on_machine(spec(), replace(FIGURES, matmul_flops_per_second=1.2e15))
    slow, fast = predict(run), predict(faster)
    assert slow.step_seconds and fast.step_seconds and fast.step_seconds < slow.step_seconds
    assert slow.moments == predict(spec()).moments
    parts, halved = step_time(run), step_time(faster)
    assert parts and halved and parts.memory == halved.memory


@pytest.mark.parametrize("zero", [1, 3])
def test_a_step_that_waits_for_its_host_takes_as_long_as_this_host_does(zero: int) -> None:
    small = spec(model="smollm2-135m", zero=zero, micro_batch=1, seq_len=128)
    one, other = (
        step_time(on_machine(small, replace(FIGURES, launch_seconds=seconds))) for seconds in (2e-5, 3e-5)
    )
    assert one and other and one.total == one.host_floor
    assert other.total == pytest.approx(1.5 * one.total)


def test_figures_of_host_memory_count_where_states_are_moved() -> None:
    slow = replace(FIGURES, pcie_bytes_per_second=1e10)
    offloaded = spec(offload_optimizer="cpu", offload_param="cpu")
    one, other = step_time(on_machine(offloaded)), step_time(on_machine(offloaded, slow))
    assert one and other and one.offload < other.offload


def test_the_answer_says_that_it_is_calibrated_and_when() -> None:
    assert any("calibrated on 2026-11-30" in line for line in predict(on_machine(spec())).assumptions)
    assert not any("calibrated" in line for line in predict(spec()).assumptions)


def test_a_cpu_has_a_step_time_only_after_a_calibration() -> None:
    run = spec(model="tiny-llama-cpu", gpu="cpu", zero=2, precision="fp32", seq_len=128)
    assert predict_step_seconds(run) is None
    known = predict(on_machine(run))
    assert known.step_seconds and known.tokens_per_second == pytest.approx(2 * 128 / known.step_seconds)
    assert not any("not predicted" in line for line in known.assumptions)
    longer = replace(run, options=replace(run.options, micro_batch=8))
    more = predict_step_seconds(on_machine(longer))
    assert more and more > known.step_seconds


@pytest.mark.parametrize("measured", [True, False])
def test_several_processes_of_a_cpu_have_no_step_time_and_it_says_so_once(*, measured: bool) -> None:
    run = spec(model="tiny-llama-cpu", gpu="cpu", gpus=2, zero=2, precision="fp32", seq_len=128)
    found = predict(on_machine(run) if measured else run)
    told = [line for line in found.assumptions if "step" in line and "time" in line]
    assert found.step_seconds is None and len(told) == 1
    assert "not predicted for 2 processes" in told[0] and "--gpus 1" in told[0]


@pytest.mark.parametrize(
    ("options", "measured", "word"),
    [
        ({"gpu": "cpu", "zero": 2, "precision": "fp32"}, False, "llmtop calibrate"),
        ({"gpu": "cpu", "zero": 2, "precision": "fp32"}, True, ""),
        ({"gpu": "cpu", "gpus": 2, "zero": 2, "precision": "fp32"}, True, "--gpus 1"),
        ({"gpu": "rtx-4090", "nodes": 2}, False, "--inter-node-gbps"),
        ({"gpu": "h200", "nodes": 2}, False, ""),
    ],
)
def test_there_is_a_reason_where_there_is_no_step_time(
    options: dict[str, object], measured: bool, word: str
) -> None:
    run = spec(**{"model": "tiny-llama-cpu", "seq_len": 128, **options})
    run = on_machine(run) if measured else run
    why, found = why_untimed(run), predict(run)
    assert word in why and bool(why) is (found.step_seconds is None) is bool(word)
    assert [line for line in found.assumptions if "not predicted" in line] == ([why] if why else [])


def test_figures_of_a_cpu_are_told_with_the_threads_that_they_hold_for() -> None:
    run = spec(model="tiny-llama-cpu", gpu="cpu", zero=2, precision="fp32", seq_len=128)
    before = predict(run).assumptions
    assert any("not predicted before llmtop calibrate" in line for line in before)
    told = predict(on_machine(run, replace(FIGURES, threads=2))).assumptions
    assert any("calibrated on 2026-11-30 with 2 threads, for which they hold" in line for line in told)


@pytest.mark.parametrize(
    ("scatter", "load", "words"),
    [
        ({"attention": 1.1}, 1.9, ()),
        ({}, None, ()),
        ({"attention": 1.1}, 5.0, ("a load average of 5.0 on 2 cores",)),
        ({"loss": 1.2, "attention": 3.0}, 0.1, ("of attention the middle one took 3.0 x the best",)),
        ({"attention": 2.0}, 2.5, ("load average", "attention")),
    ],
)
def test_a_disturbed_calibration_is_doubted(
    scatter: dict[str, float], load: float | None, words: tuple[str, ...]
) -> None:
    found = list(doubts(calibration(spec(), scatter=scatter, load_average=load, cores=2)))
    assert len(found) == len(words) and all(word in one for word, one in zip(words, found, strict=True))


def test_the_command_warns_of_what_disturbed_and_of_what_has_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(run: RunSpec) -> Calibration:
        return calibration(run, load_average=9.0, cores=2)

    monkeypatch.setattr(command, "calibrate", busy)
    parser = CommandParser("calibrate", "", "calibrate", "calibrate")
    command.add_arguments(parser)
    command.run(parser.parse(["cpu-demo"]))
    told = " ".join(capsys.readouterr().err.split())
    assert "warning: the figures may be too low" in told and "load average of 9.0" in told
    assert "a step of 2 processes on a CPU is not predicted" in told
    command.run(parser.parse(["cpu-demo", "--gpus", "1"]))
    assert "processes on a CPU" not in capsys.readouterr().err


def test_a_file_counts_for_its_own_device_model_and_precision() -> None:
    run = spec()
    assert find(run) is None
    made = calibration(run)
    assert save(run, made) == path_for(run)
    assert find(run) == made
    assert find(spec(model="llama-3.2-1b")) is None
    assert find(spec(precision="fp16")) is None
    assert find(spec(gpu="h100-80gb")) is None


def test_a_broken_file_or_one_of_another_version_or_processor_counts_as_none() -> None:
    run = spec(model="tiny-llama-cpu", gpu="cpu", precision="fp32", seq_len=128)
    save(run, calibration(run, processor="another"))
    assert find(run) is None
    save(run, calibration(run, schema_version=99))
    assert find(run) is None
    path_for(run).write_text("{")
    assert find(run) is None


def test_what_is_measured_has_the_shapes_of_the_model() -> None:
    work = work_of(spec(), None)
    assert (14336, 4096) in work.matrices and (128256, 4096) in work.matrices
    assert work.trained == 50_000_000 and work.head_dim == 128
