"""The trainer on a real GPU, predicted and measured."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.forkserver import ForkServer
from llmtop.presets.resolve import Layer, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.breakdown import Breakdown, breakdown
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Component, Prediction
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.control import wait_for_end
from llmtop.trainer.launch import start_run
from tests.worker.gpu_runs import carried_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    # The first one builds DeepSpeed's ops, which takes minutes.
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU"),
]
BASE: dict[str, Any] = {
    "model": "smollm2-135m",
    "gpus": 1,
    "micro_batch": 4,
    "steps": 4,
    "classify_every": 100,
}
CASES: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1, "grad_accum": 2},
    {"zero": 2, "gradient_checkpointing": True},
    {"zero": 3, "attention": "eager"},
    {"zero": 2, "precision": "fp32"},
    {"zero": 2, "lora_rank": 8},
    {"zero": 3, "gradient_checkpointing": True, "checkpointing_reentrant": True},
    {"zero": 1, "liger": True},
    {"zero": 2, "precision": "fp16"},
    {"zero": 2, "attention": "flash_attention_2", "seq_len": 1024},
    {"zero": 3, "offload_optimizer": "cpu"},
    {"zero": 2, "optimizer": "adamw_8bit"},
]
_PACKAGES = {"liger": "liger_kernel", "attention": "flash_attn", "optimizer": "bitsandbytes"}
_EXACT = (Component.PARAMETERS, Component.MASTER_PARAMETERS, Component.OPTIMIZER_STATE)
"""What a prediction knows to the byte, but for padding and step counters."""


def needs_package(options: dict[str, Any]) -> str | None:
    """A package that the options ask for and that is not there."""
    if options.get("attention") in ("eager", "sdpa") or options.get("optimizer") == "adamw":
        return None
    wanted = [package for option, package in _PACKAGES.items() if option in options]
    return next((package for package in wanted if importlib.util.find_spec(package) is None), None)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_run_on_the_gpu_is_measured_as_predicted(
    options: dict[str, Any], gpu_ranks: ForkServer, tmp_path: Path
) -> None:
    absent = needs_package(options)
    if absent is not None:
        pytest.skip(f"needs {absent}")
    planned, run = carried_out(gpu_ranks, tmp_path, **{"seq_len": 512, **BASE, **options})
    check_run(planned.spec, planned.prediction, run)


def test_a_supervised_run_on_the_gpu(tmp_path: Path) -> None:
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values={**BASE, "seq_len": 512})
    spec = resolve([layer], name="gpu-test", machine=detect_machine())
    prediction = predict(spec)
    run = start_run(spec, prediction, root=tmp_path)
    wait_for_end(run, 280)
    check_run(spec, prediction, run)


def check_run(spec: RunSpec, prediction: Prediction, run: RunDir) -> None:
    state = read_state(run)
    assert state.status == "completed", run.log_path(0).read_text(errors="replace")[-2000:]
    found = breakdown(state, spec, prediction)
    assert found.actual_peak_bytes == pytest.approx(prediction.peak_allocated_bytes, rel=0.02)
    check_peaks(state, found)
    check_named(found)
    check_outside(found)
    assert state.hardware is not None
    assert state.hardware.devices[0].memory_used_bytes


def check_peaks(state: RunState, found: Breakdown) -> None:
    """Every phase of the traced step is replayed exactly, and at most 1 % of its peak has no name."""
    peaks = state.ranks[0].peaks_classified
    assert set(peaks) == {"forward", "backward", "optimizer"}
    for peak in peaks.values():
        assert peak.replay_error_bytes == 0, peak
        assert 0 <= peak.unnamed_bytes <= 0.01 * peak.total_bytes, peak
    assert found.exact
    assert found.unexplained_percent is not None
    assert abs(found.unexplained_percent) <= 1, (found.unexplained_bytes, found.largest_unnamed)


def check_named(found: Breakdown) -> None:
    for row in found.rows:
        if row.component in _EXACT and row.predicted_bytes:
            assert row.actual_bytes == pytest.approx(row.predicted_bytes, rel=0.01, abs=1 << 20), row


def check_outside(found: Breakdown) -> None:
    rows = {row.component: row.actual_bytes for row in found.rows if not row.in_peak}
    parts = (Component.CUDA_CONTEXT, Component.NCCL, Component.LOADED_KERNELS, Component.FRAGMENTATION)
    for component in parts:
        size = rows[component]
        assert size is not None and size >= 0, rows
    assert found.actual_peak_bytes is not None
    assert found.actual_peak_bytes + sum(size or 0 for size in rows.values()) == found.actual_device_bytes
