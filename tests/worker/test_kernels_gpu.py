"""On a real GPU: what was asked for is what the profiler saw run."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.forkserver import ForkServer
from llmtop.profiler.record.events import KernelsSeen
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.contents import Report
from tests.worker.gpu_runs import carried_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    # The first one builds DeepSpeed's ops, which takes minutes.
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU"),
]
BASE: dict[str, Any] = {"model": "smollm2-135m", "gpus": 1, "micro_batch": 2, "seq_len": 512, "steps": 6}
BASE |= {"kernel_profile_step": 3, "classify_every": 100}


def trained(server: ForkServer, root: Path, **options: Any) -> tuple[Report, KernelsSeen]:
    _, run = carried_out(server, root, **{**BASE, **options})
    report = build_report(run)
    log = run.log_path(0).read_text(errors="replace")[-2000:]
    assert report.status == "completed", log
    assert report.kernels is not None, log
    return report, report.kernels


def on(report: Report, key: str) -> bool | None:
    return next(switch.on for switch in report.switches if switch.key == key)


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


@pytest.mark.parametrize(
    ("attention", "package", "ran"),
    [
        ("sdpa", "torch", ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")),
        ("eager", "torch", ("unfused",)),
        ("flash_attention_2", "flash_attn", ("flash_attention_2",)),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_attention(
    gpu_ranks: ForkServer, tmp_path: Path, attention: str, package: str, ran: tuple[str, ...], recompute: bool
) -> None:
    need(package)
    report, kernels = trained(gpu_ranks, tmp_path, attention=attention, gradient_checkpointing=recompute)
    assert kernels.attention in ran, kernels.top
    assert (on(report, "attention"), on(report, "checkpointing")) == (True, True), kernels
    assert kernels.optimizer == "deepspeed_fused_adam"
    assert kernels.loss == "torch_cross_entropy"


def test_liger(gpu_ranks: ForkServer, tmp_path: Path) -> None:
    need("liger_kernel")
    report, kernels = trained(gpu_ranks, tmp_path, liger=True)
    assert set(kernels.liger) == {"rms_norm", "rope", "glu", "fused_linear_cross_entropy"}, kernels.top
    assert on(report, "liger") is True


@pytest.mark.parametrize(
    ("optimizer", "package", "ran"),
    [
        ("adamw_torch", "torch", "torch_"),
        ("adamw_8bit", "bitsandbytes", "bitsandbytes_8bit"),
        ("paged_adamw_8bit", "bitsandbytes", "bitsandbytes_8bit"),
        ("paged_adamw_32bit", "bitsandbytes", "bitsandbytes_32bit"),
    ],
)
def test_optimizer(gpu_ranks: ForkServer, tmp_path: Path, optimizer: str, package: str, ran: str) -> None:
    need(package)
    report, kernels = trained(gpu_ranks, tmp_path, optimizer=optimizer)
    assert kernels.optimizer is not None and kernels.optimizer.startswith(ran), kernels
    assert on(report, "optimizer") is True


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_packed_weights(gpu_ranks: ForkServer, tmp_path: Path, quantization: str) -> None:
    need("bitsandbytes")
    need("peft")
    report, kernels = trained(gpu_ranks, tmp_path, quantization=quantization, lora_rank=8)
    assert (on(report, "quantization"), on(report, "lora")) == (True, True), kernels
