"""Checkpointing of every k-th block: which blocks of real models run again in the backward pass."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from llmtop.presets.errors import UsageError
from llmtop.trainer.worker.adapters import add_lora
from llmtop.trainer.worker.kernels import enable_checkpointing
from tests.worker.launching import tiny_spec

LAYERS, VOCAB = 5, 64
BASE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "num_key_value_heads": 1},
    "qwen3_moe": {
        **BASE,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
    },
    "gemma2": {**BASE, "num_key_value_heads": 1, "head_dim": 8},
    "gpt_neox": BASE,
    "gpt2": {
        "n_embd": 16,
        "n_head": 2,
        "n_layer": LAYERS,
        "vocab_size": VOCAB,
        "n_positions": 32,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
}


def build(family: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, use_cache=False, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def run(model: Any) -> tuple[list[int], float, torch.Tensor]:
    """How often each block's first part ran, the loss, and a gradient."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    runs: Counter[int] = Counter()
    hooks = [
        next(block.children()).register_forward_hook(lambda *_, index=index: runs.update([index]))
        for index, block in enumerate(blocks)
    ]
    ids = torch.arange(24).view(2, 12) % VOCAB
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [runs[index] for index in range(len(blocks))], float(loss.detach()), torch.cat(gradients)


@cache
def plain_run(family: str) -> tuple[list[int], float, torch.Tensor]:
    return run(build(family))


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("every", [1, 2, LAYERS])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kth_block_runs_again(family: str, every: int, reentrant: bool) -> None:
    model = build(family)
    enable_checkpointing(model, reentrant=reentrant, every=every)
    runs, loss, gradient = run(model)
    assert runs == [2 if index % every == 0 else 1 for index in range(LAYERS)]
    once, plain_loss, plain_gradient = plain_run(family)
    assert once == [1] * LAYERS
    assert loss == pytest.approx(plain_loss)
    torch.testing.assert_close(gradient, plain_gradient)


# peft 0.21 asks a model for this by its older name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_with_adapters_too(family: str, reentrant: bool) -> None:
    model = build(family)
    enable_checkpointing(model, reentrant=reentrant, every=3)
    runs, loss, gradient = run(add_lora(model, tiny_spec(lora_rank=2)))
    assert runs == [2, 1, 1, 2, 1]
    assert loss == pytest.approx(plain_run(family)[1])
    assert gradient.abs().sum() > 0


def test_code_without_a_switch_for_each_block_is_refused() -> None:
    keys = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": VOCAB, "n_positions": 32, "dff": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("ctrl", **keys))
    with pytest.raises(UsageError, match="no gradient checkpointing"):
        enable_checkpointing(model, reentrant=False, every=2)
