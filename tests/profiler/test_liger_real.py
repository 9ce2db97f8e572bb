"""Formulas of Liger's kernels against stand-ins that keep for backward what Liger's own functions keep.

Liger runs on GPUs only. The stand-ins take its place in the real modelling code and save the same tensors
(liger-kernel 0.8.5: `ops/rms_norm.py` the input and a number a row; `ops/swiglu.py` and `ops/geglu.py` gate
and up, made contiguous; `ops/rope.py` the two tables, and writes queries and keys in the layout of the
projection). What they compute does not matter here.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from llmtop.profiler.memory.blocks import block_bytes
from llmtop.profiler.memory.loss import loss_bytes
from llmtop.profiler.memory.sizes import sizes_of
from tests.profiler.test_activations_real import BATCH, LENGTH, VOCAB, build, kept_bytes, run_spec


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.float().pow(2).mean(-1).rsqrt()
        ctx.save_for_backward(x, weight, rows)
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        turned = (x.transpose(1, 2).contiguous().mul(1.5).transpose(1, 2) for x in (q, k))
        return tuple(turned)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


def norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _Norm.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def glu_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(self, "gate_up_proj"):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    else:
        gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(_Product.apply(gate, up))  # type: ignore[no-any-return, no-untyped-call]


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _Rotation.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]


NAMES = {"llama": "Llama", "phi3": "Phi3", "qwen3": "Qwen3", "gemma": "Gemma"}


def patch(family: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if "rms_norm" in kernels:
        monkeypatch.setattr(getattr(code, f"{NAMES[family]}RMSNorm"), "forward", norm_forward)
    if "glu" in kernels:
        monkeypatch.setattr(getattr(code, f"{NAMES[family]}MLP"), "forward", glu_forward)
    if "rope" in kernels:
        monkeypatch.setattr(code, "apply_rotary_pos_emb", rotate)


@pytest.mark.parametrize("kernels", ["rms_norm", "glu", "rope", "rms_norm,glu", "rms_norm,rope,glu"])
@pytest.mark.parametrize("family", NAMES)
def test_a_block_with_some_of_ligers_kernels_keeps_what_the_formula_says(
    family: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(family, set(kernels.split(",")), monkeypatch)
    config, two = build(family, 2, "sdpa", torch.bfloat16)
    _, three = build(family, 3, "sdpa", torch.bfloat16)
    measured = (kept_bytes(three) - kept_bytes(two)) / (BATCH * LENGTH)
    spec = run_spec(config, family, "sdpa", "bf16", liger=True, liger_kernels=kernels)
    assert block_bytes(spec, sizes_of(spec)).saved == pytest.approx(measured, rel=0.012)


class _Loss(torch.autograd.Function):
    """`ops/cross_entropy.py`: the gradient is written over the logits, and kept."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        loss = logits.sum()
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_ligers_loss_keeps_the_logits_once_in_fp32(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config, model = build("llama", 2, "sdpa", dtype)
    spec = run_spec(config, "llama", "sdpa", precision, liger=True, liger_kernels="cross_entropy")
    monkeypatch.setattr(
        torch.nn.functional,
        "cross_entropy",
        lambda logits, *_, **__: _Loss.apply(logits),  # type: ignore[no-untyped-call]
    )
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == BATCH * LENGTH * VOCAB:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    assert list(kept.values()) == [loss_bytes(spec, sizes_of(spec)).kept]
    loss.backward()
