"""The simulated step asks for and gives back what real modelling code does, tensor by tensor.

Small models run on the CPU under torch's memory profiler. A GPU's kernels for norms, attention and products
make temporaries of their own, which recorded runs have (`tests/benchmarks/test_tape_recorded.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from llmtop.presets.spec import RunOptions
from tests.profiler.cpu_allocations import asked_of_cpu, asked_of_tape, without_passing

BASE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CHOSEN = {"num_experts_per_tok": 4, "moe_intermediate_size": 320}
LATENT = {
    **BASE,
    **CHOSEN,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "n_routed_experts": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen3": {**BASE, "head_dim": 64},
    "gemma3_text": {**BASE, "head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {**BASE, "head_dim": 64},
    "olmo2": BASE,
    "granite": BASE,
    "phi3": BASE,
    "gpt_neox": {**BASE, "rotary_pct": 0.5, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt2": {
        "vocab_size": 1000,
        "n_embd": 256,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    },
    "bloom": {
        "vocab_size": 1000,
        "hidden_size": 256,
        "n_layer": 2,
        "n_head": 4,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    "opt": {
        "vocab_size": 1000,
        "hidden_size": 256,
        "ffn_dim": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 256,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "mixtral": {**BASE, "num_local_experts": 16, "num_experts_per_tok": 4},
    "qwen3_moe": {**BASE, **CHOSEN, "head_dim": 64, "num_experts": 16, "norm_topk_prob": True},
    "qwen2_moe": {**BASE, **CHOSEN, "num_experts": 16, "shared_expert_intermediate_size": 448},
    "deepseek_v2": {
        **LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {**LATENT, "q_lora_rank": 160, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
}


CASES = [
    *((family, 2, False) for family in CONFIGS if family != "gpt2"),
    *(
        (family, 2, True)
        for family in ("mixtral", "qwen2_moe", "deepseek_v2", "olmo2", "glm4", "opt", "bloom")
    ),
    # The gradient of learned positions is summed up over sequences, which is not simulated.
    *((family, 1, False) for family in ("llama", "deepseek_v3", "gpt2", "bloom")),
]


@pytest.mark.parametrize(("family", "batch", "checkpointing"), CASES)
def test_a_step_asks_for_what_the_real_one_does(family: str, batch: int, checkpointing: bool) -> None:
    config = {**CONFIGS[family], "model_type": family}
    options = RunOptions(
        model="test",
        gpu="h200",
        zero=0,
        attention="eager",
        micro_batch=batch,
        seq_len=512 // batch,
        gradient_checkpointing=checkpointing,
        checkpointing_reentrant=checkpointing,
    )
    real = without_passing(asked_of_cpu(config, options))
    assert len(real) > 200
    assert without_passing(asked_of_tape(config, options)) == real
