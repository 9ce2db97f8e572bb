"""Activation formulas against what torch's autograd really keeps of the real modelling code.

Two and three blocks of a small model of each family run forward on the CPU under saved-tensor hooks; the
difference is one block. LayerNorm statistics are half as wide on the CPU in bf16, hence the tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtop.presets.hf.config import read_shape
from llmtop.presets.spec import GpuSpec, RunOptions, RunSpec
from llmtop.profiler.memory.blocks import block_bytes
from llmtop.profiler.memory.sizes import sizes_of

BATCH, LENGTH, VOCAB = 2, 64, 300
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
MULTI_HEAD = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen2": BASE,
    "qwen3": {**BASE, "head_dim": 16},
    "gemma": {**BASE, "head_dim": 16},
    "gemma2": {**BASE, "head_dim": 16},
    "phi": MULTI_HEAD,
    "phi3": {**BASE, "pad_token_id": 0},
    "gpt2": {
        "n_embd": 64,
        "n_head": 8,
        "vocab_size": VOCAB,
        "n_positions": 512,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "gpt_neox": MULTI_HEAD,
    "opt": {**MULTI_HEAD, "ffn_dim": 160, "word_embed_proj_dim": 64, "dropout": 0.0},
    "bloom": {"hidden_size": 64, "n_head": 8, "vocab_size": VOCAB},
    "falcon": {**MULTI_HEAD, "multi_query": True, "parallel_attn": True, "bias": False},
    "mixtral": {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**BASE, "head_dim": 16, **EXPERTS},
    "olmo2": BASE,
    "cohere": BASE,
    "glm4": {**BASE, "head_dim": 8, "pad_token_id": 0},
    "starcoder2": BASE,
}
EAGER_ONLY = {"gemma2", "bloom"}
"""transformers 5.x has no SDPA for them."""
CASES = [(family, "eager") for family in FAMILIES] + [
    (family, "sdpa") for family in FAMILIES if family not in EAGER_ONLY
]


def build(family: str, layers: int, attention: str, dtype: torch.dtype) -> tuple[Any, Any]:
    keys = dict(FAMILIES[family])
    keys["n_layer" if family in ("gpt2", "bloom") else "num_hidden_layers"] = layers
    config = AutoConfig.for_model(family, use_cache=False, **keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return config, model.train()


def kept_bytes(model: Any) -> int:
    """Bytes of the distinct storages that the model's body keeps for backward, weights not included."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.numel():
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.base_model(input_ids=ids)
    total = sum(size for size, _ in kept.values())
    del output
    return total


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_block_keeps_what_the_formula_says(family: str, attention: str, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config, two = build(family, 2, attention, dtype)
    _, three = build(family, 3, attention, dtype)
    measured = (kept_bytes(three) - kept_bytes(two)) / (BATCH * LENGTH)
    spec = RunSpec(
        name="test",
        model=read_shape(config.to_dict(), family, family),
        gpu=GpuSpec(name="cpu", kind="cpu"),
        model_source="",
        options=RunOptions(
            model=family,
            gpu="h200",
            precision="bf16" if precision == "bf16" else "fp32",
            attention="eager" if attention == "eager" else "sdpa",
            micro_batch=BATCH,
            seq_len=LENGTH,
        ),
    )
    assert block_bytes(spec, sizes_of(spec)).saved == pytest.approx(measured, rel=0.012)
