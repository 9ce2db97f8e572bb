"""Measures what a device reaches: a short process of its own, asked for in JSON, answering in JSON.

    python -m llmtop.profiler.probes.calibrate < work.json

Each figure is the best of several passes, within a share of `SECONDS`: what disturbs only makes slower.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial

import msgspec
import torch
import torch.nn.functional as F

from llmtop.presets.spec import MachineFigures
from llmtop.profiler.cost.calibration import Measured, Work

SECONDS = 2.5
"""For each figure."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FEWEST, _MOST = 3, 50
_COPIED_BYTES = 256 << 20
_MOST_TOKENS = 8192
_OPERATIONS = 200


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_seconds(act: Callable[[], object], device: torch.device, seconds: float = SECONDS) -> float:
    """Of one call, after one that warms up."""
    act()
    _synchronize(device)
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < _FEWEST or (time.perf_counter() < until and len(taken) < _MOST):
        start = time.perf_counter()
        act()
        _synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def measure(work: Work, seconds: float = SECONDS) -> Measured:
    device = torch.device("cpu" if work.on_cpu else "cuda")
    if work.threads is not None:
        torch.set_num_threads(work.threads)
    figures = MachineFigures(
        date=date.today().isoformat(),
        matmul_flops_per_second=_matmul(work, device, seconds),
        attention_flops_per_second=_attention(work, device, seconds),
        memory_bytes_per_second=_memory(work, device, seconds),
        loss_seconds_per_logit=_loss(work, device, seconds),
        optimizer_seconds_per_weight=_optimizer(work, device, seconds),
        launch_seconds=_launch(device, seconds),
        pcie_bytes_per_second=None if work.on_cpu else _pcie(device, seconds),
    )
    name = "cpu" if work.on_cpu else torch.cuda.get_device_name(device)
    versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
    return Measured(figures=figures, versions=versions, device=name)


def _tokens(work: Work) -> int:
    return min(_MOST_TOKENS, work.micro_batch * work.seq_len)


def _matmul(work: Work, device: torch.device, seconds: float) -> float:
    """Each matrix once forward and twice backward, as training does; weighted by their sizes."""
    dtype, tokens = _DTYPES[work.precision], _tokens(work)
    spent = flops = 0.0
    for rows, columns in work.matrices:
        weight = torch.randn(rows, columns, device=device, dtype=dtype, requires_grad=True)
        given = torch.randn(tokens, columns, device=device, dtype=dtype, requires_grad=True)
        gradient = torch.randn(tokens, rows, device=device, dtype=dtype)
        act = partial(_product, given, weight, gradient)
        spent += best_seconds(act, device, seconds / len(work.matrices))
        flops += 6.0 * tokens * rows * columns
    return flops / spent


def _product(given: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
    torch.autograd.grad(F.linear(given, weight), (given, weight), gradient)


def _attention(work: Work, device: torch.device, seconds: float) -> float:
    batch, length = max(1, _tokens(work) // work.seq_len), work.seq_len
    dtype = _DTYPES[work.precision]

    def made(heads: int) -> torch.Tensor:
        shape = (batch, heads, length, work.head_dim)
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    query, key, value = made(work.num_heads), made(work.num_heads), made(work.num_heads)
    gradient = torch.randn_like(query)

    def act() -> None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    flops = 6.0 * batch * work.num_heads * length * length * work.head_dim
    return flops / best_seconds(act, device, seconds)


def _memory(work: Work, device: torch.device, seconds: float) -> float:
    dtype = _DTYPES[work.precision]
    given = torch.ones(_COPIED_BYTES // dtype.itemsize, device=device, dtype=dtype)
    out = torch.empty_like(given)
    taken = best_seconds(lambda: torch.mul(given, 2.0, out=out), device, seconds)
    return 2.0 * _COPIED_BYTES / taken


def _loss(work: Work, device: torch.device, seconds: float) -> float:
    tokens = min(_tokens(work), max(64, (1 << 28) // work.vocab_size))
    logits = torch.randn(tokens, work.vocab_size, device=device, requires_grad=True)
    labels = torch.randint(work.vocab_size, (tokens,), device=device)
    taken = best_seconds(
        lambda: torch.autograd.grad(F.cross_entropy(logits.float(), labels), logits), device, seconds
    )
    return taken / logits.numel()


def _optimizer(work: Work, device: torch.device, seconds: float) -> float:
    """AdamW over fp32 weights, with the copies from and to the model's precision around it."""
    dtype = _DTYPES[work.precision]
    master = torch.zeros(work.trained, device=device, requires_grad=True)
    weights = torch.zeros(work.trained, device=device, dtype=dtype)
    gradient = torch.full_like(weights, 1e-3)
    optimizer = torch.optim.AdamW([master], lr=1e-4, fused=True)

    def act() -> None:
        master.grad = gradient.float()
        optimizer.step()
        weights.copy_(master.detach())

    return best_seconds(act, device, seconds) / work.trained


def _launch(device: torch.device, seconds: float) -> float:
    """Operations too small to take the device any time: what is left is the host's."""
    small = torch.ones(8, device=device, requires_grad=True)

    def act() -> None:
        out = small
        for _ in range(_OPERATIONS):
            out = out * 1.0
        torch.autograd.grad(out.sum(), small)

    return best_seconds(act, device, seconds) / _OPERATIONS


def _pcie(device: torch.device, seconds: float) -> float:
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    return _COPIED_BYTES / best_seconds(lambda: here.copy_(there, non_blocking=True), device, seconds)


def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    sys.stdout.buffer.write(msgspec.json.encode(measure(work)))


if __name__ == "__main__":
    main()
