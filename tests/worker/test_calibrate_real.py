"""The measurement itself: a short real one here, and one of the whole command on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict

from llmtop.presets.resolve import Layer, Machine, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.cost.calibration import calibrated, find, save, work_of
from llmtop.profiler.cost.steptime import predict_step_seconds
from llmtop.profiler.probes.calibrate import measure
from llmtop.trainer.calibrate import LIMIT_SECONDS, calibrate


def spec(**values: object) -> RunSpec:
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="test", values=values)
    return resolve([layer], name="test", machine=Machine(gpu="cpu", gpus=1, host_memory_bytes=1 << 34))


def test_every_figure_is_measured_on_a_cpu() -> None:
    run = spec(model="tiny-llama-cpu", gpu="cpu", precision="fp32", micro_batch=2, seq_len=64)
    measured = measure(work_of(run, torch.get_num_threads()), seconds=0.05)
    figures = measured.figures
    for name, figure in asdict(figures).items():
        if name not in ("date", "pcie_bytes_per_second"):
            assert figure > 0, name
    assert figures.pcie_bytes_per_second is None
    assert figures.threads == torch.get_num_threads()
    named = {"matrix products", "attention", "memory", "loss", "optimizer step", "host"}
    assert set(measured.scatter) == named and min(measured.scatter.values()) >= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_calibrated_within_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = spec(model="qwen2.5-0.5b", gpu="h200", precision="bf16", micro_batch=4, seq_len=2048)
    made = calibrate(run)
    assert made.took_seconds < LIMIT_SECONDS
    assert made.figures.matmul_flops_per_second > 1e13
    assert (made.figures.pcie_bytes_per_second or 0) > 1e9
    save(run, made)
    assert predict_step_seconds(calibrated(run, find(run)))
