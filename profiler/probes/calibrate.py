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
from statistics import median

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


class Clock:
    """Times calls on a device, and keeps how far those of a figure lay apart."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.seconds = seconds
        self.scatter: dict[str, float] = {}
        """Figure to the middle pass over the best: 1 where all took the same."""

    def best(self, figure: str, act: Callable[[], object], share: float = 1.0) -> float:
        """Seconds of one call, after one that warms up, within a share of the time for a figure."""
        act()
        _synchronize(self.device)
        taken: list[float] = []
        until = time.perf_counter() + share * self.seconds
        while len(taken) < _FEWEST or (time.perf_counter() < until and len(taken) < _MOST):
            start = time.perf_counter()
            act()
            _synchronize(self.device)
            taken.append(time.perf_counter() - start)
        best = min(taken)
        self.scatter[figure] = max(self.scatter.get(figure, 1.0), median(taken) / best)
        return best


def measure(work: Work, seconds: float = SECONDS) -> Measured:
    device = torch.device("cpu" if work.on_cpu else "cuda")
    if work.threads is not None:
        torch.set_num_threads(work.threads)
    clock = Clock(device, seconds)
    figures = MachineFigures(
        date=date.today().isoformat(),
        matmul_flops_per_second=_matmul(work, clock),
        attention_flops_per_second=_attention(work, clock),
        memory_bytes_per_second=_memory(work, clock),
        loss_seconds_per_logit=_loss(work, clock),
        optimizer_seconds_per_weight=_optimizer(work, clock),
        launch_seconds=launch_seconds(clock),
        pcie_bytes_per_second=None if work.on_cpu else _pcie(clock),
        threads=work.threads,
    )
    name = "cpu" if work.on_cpu else torch.cuda.get_device_name(device)
    versions = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
    return Measured(figures=figures, versions=versions, device=name, scatter=clock.scatter)


def _tokens(work: Work) -> int:
    return min(_MOST_TOKENS, work.micro_batch * work.seq_len)


def _matmul(work: Work, clock: Clock) -> float:
    """Each matrix once forward and twice backward, as training does; weighted by their sizes."""
    dtype, tokens = _DTYPES[work.precision], _tokens(work)
    spent = flops = 0.0
    for rows, columns in work.matrices:
        weight = torch.randn(rows, columns, device=clock.device, dtype=dtype, requires_grad=True)
        given = torch.randn(tokens, columns, device=clock.device, dtype=dtype, requires_grad=True)
        gradient = torch.randn(tokens, rows, device=clock.device, dtype=dtype)
        act = partial(_product, given, weight, gradient)
        spent += clock.best("matrix products", act, 1 / len(work.matrices))
        flops += 6.0 * tokens * rows * columns
    return flops / spent


def _product(given: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
    torch.autograd.grad(F.linear(given, weight), (given, weight), gradient)


def _attention(work: Work, clock: Clock) -> float:
    batch, length = max(1, _tokens(work) // work.seq_len), work.seq_len
    dtype = _DTYPES[work.precision]

    def made(heads: int) -> torch.Tensor:
        shape = (batch, heads, length, work.head_dim)
        return torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True)

    query, key, value = made(work.num_heads), made(work.num_heads), made(work.num_heads)
    gradient = torch.randn_like(query)

    def act() -> None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    flops = 6.0 * batch * work.num_heads * length * length * work.head_dim
    return flops / clock.best("attention", act)


def _memory(work: Work, clock: Clock) -> float:
    dtype = _DTYPES[work.precision]
    given = torch.ones(_COPIED_BYTES // dtype.itemsize, device=clock.device, dtype=dtype)
    out = torch.empty_like(given)
    taken = clock.best("memory", lambda: torch.mul(given, 2.0, out=out))
    return 2.0 * _COPIED_BYTES / taken


def _loss(work: Work, clock: Clock) -> float:
    tokens = min(_tokens(work), max(64, (1 << 28) // work.vocab_size))
    logits = torch.randn(tokens, work.vocab_size, device=clock.device, requires_grad=True)
    labels = torch.randint(work.vocab_size, (tokens,), device=clock.device)
    taken = clock.best("loss", lambda: torch.autograd.grad(F.cross_entropy(logits.float(), labels), logits))
    return taken / logits.numel()


def _optimizer(work: Work, clock: Clock) -> float:
    """AdamW over fp32 weights, with the copies from and to the model's precision around it."""
    dtype = _DTYPES[work.precision]
    master = torch.zeros(work.trained, device=clock.device, requires_grad=True)
    weights = torch.zeros(work.trained, device=clock.device, dtype=dtype)
    gradient = torch.full_like(weights, 1e-3)
    optimizer = torch.optim.AdamW([master], lr=1e-4, fused=True)

    def act() -> None:
        master.grad = gradient.float()
        optimizer.step()
        weights.copy_(master.detach())

    return clock.best("optimizer step", act) / work.trained


def launch_seconds(clock: Clock) -> float:
    """Operations too small to take the device any time: what is left is the host's."""
    small = torch.ones(8, device=clock.device, requires_grad=True)

    def act() -> None:
        out = small
        for _ in range(_OPERATIONS):
            out = out * 1.0
        torch.autograd.grad(out.sum(), small)

    return clock.best("host", act) / _OPERATIONS


def _pcie(clock: Clock) -> float:
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=clock.device)
    return _COPIED_BYTES / clock.best("from host memory", lambda: here.copy_(there, non_blocking=True))


def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    sys.stdout.buffer.write(msgspec.json.encode(measure(work)))


if __name__ == "__main__":
    main()
