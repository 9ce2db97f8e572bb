"""The trainer on a real GPU, predicted and measured."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.resolve import Layer, resolve
from llmtop.presets.spec import ValueSource
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.feed import read_state
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.memory.predict import predict
from llmtop.trainer.control import wait_for_end
from llmtop.trainer.launch import start_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU"),
]
BASE: dict[str, Any] = {"model": "smollm2-135m", "gpus": 1, "micro_batch": 4, "seq_len": 512, "steps": 4}
CASES: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1, "grad_accum": 2},
    {"zero": 2, "gradient_checkpointing": True},
    {"zero": 3, "attention": "eager"},
    {"zero": 2, "precision": "fp32"},
    {"zero": 2, "lora_rank": 8},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_run_on_the_gpu_is_measured_as_predicted(options: dict[str, Any], tmp_path: Path) -> None:
    values = {**BASE, **options}
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values=values)
    spec = resolve([layer], name="gpu-test", machine=detect_machine())
    prediction = predict(spec)
    run = start_run(spec, prediction, root=tmp_path)
    wait_for_end(run, 280)
    state = read_state(run)
    assert state.status == "completed", run.log_path(0).read_text(errors="replace")[-2000:]
    found = breakdown(state, spec, prediction)
    assert found.actual_peak_bytes == pytest.approx(prediction.peak_allocated_bytes, rel=0.02)
    assert found.unexplained_percent is not None
    assert abs(found.unexplained_percent) < 5
    assert state.hardware is not None
    assert state.hardware.devices[0].memory_used_bytes
