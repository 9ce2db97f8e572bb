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
    find,
    machine_name,
    path_for,
    save,
    work_of,
)
from llmtop.profiler.cost.steptime import predict_step_seconds, step_time
from llmtop.profiler.memory.predict import predict

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
