"""What ZeRO++'s second shards take of real GPUs, predicted and measured; it needs two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmtop.presets.resolve import Layer, resolve
from llmtop.presets.spec import ValueSource
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.feed import read_state
from llmtop.trainer.control import wait_for_end
from llmtop.trainer.launch import start_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    # The first one builds DeepSpeed's ops, which takes minutes.
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
RUN: dict[str, Any] = {
    **{"model": "qwen3-1.7b", "gpus": 2, "zero": 3, "micro_batch": 1, "seq_len": 512, "steps": 4},
    "deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}},
}


def test_second_shards_are_measured_as_predicted(tmp_path: Path) -> None:
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values=RUN)
    spec = resolve([layer], name="second-shards", machine=detect_machine())
    prediction = predict(spec)
    run = start_run(spec, prediction, root=tmp_path)
    wait_for_end(run, 280)
    state = read_state(run)
    assert state.status == "completed", run.log_path(0).read_text(errors="replace")[-2000:]
    found = breakdown(state, spec, prediction)
    assert found.actual_peak_bytes is not None
    assert found.actual_peak_bytes == pytest.approx(prediction.peak_allocated_bytes, rel=0.03)
    assert found.actual_peak_bytes <= prediction.peak_allocated_upper_bytes
