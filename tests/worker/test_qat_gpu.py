"""On a real GPU: rounding in training takes what was predicted, and comes out in 4 bits."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from benchmarks.forkserver import ForkServer
from llmtop.profiler.report.build import build_report
from llmtop.trainer.weightsout import Choice, take_weights_out
from tests.worker.gpu_runs import carried_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    # The first one builds DeepSpeed's ops, which takes minutes.
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao"),
]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["int4-weight-only", "int8-int4"])
def test_rounding_takes_what_is_predicted(
    gpu_ranks: ForkServer, tmp_path: Path, kind: str, recompute: bool
) -> None:
    planned, run = carried_out(
        gpu_ranks,
        tmp_path,
        model="smollm2-360m",
        gpus=1,
        micro_batch=4,
        seq_len=1024,
        steps=4,
        qat=kind,
        gradient_checkpointing=recompute,
        save_at_end=True,
    )
    report = build_report(run)
    assert report.status == "completed", run.log_path(0).read_text(errors="replace")[-2000:]
    switch = next(one for one in report.switches if one.key == "quantization")
    assert switch.on is True
    assert report.actual_peak_bytes is not None
    assert report.actual_peak_bytes == pytest.approx(planned.prediction.peak_allocated_bytes, rel=0.03)
    assert report.actual_peak_bytes <= planned.prediction.peak_allocated_upper_bytes
    made = take_weights_out(run, tmp_path / "out", Choice(content="quantized"))
    assert made.tensors > 0 and (tmp_path / "out" / "config.json").is_file()
