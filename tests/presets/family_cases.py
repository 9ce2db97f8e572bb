"""Small odd configurations of every family and variant, for comparison with the real modules.

Sizes differ from each other, so that a swapped dimension changes a tensor's shape.
"""

from __future__ import annotations

from typing import Any

# hidden 48, 6 heads of 8 unless a family says otherwise
_LLAMA: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT: dict[str, Any] = {
    "vocab_size": 101,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "ffn_dim": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 40,
}
_FALCON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
_DEEPSEEK: dict[str, Any] = _LLAMA | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
}
_MOE: dict[str, Any] = _LLAMA | {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
}
_LOCAL_MOE: dict[str, Any] = _LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2}
_BIASED = {"attention_bias": True}
_ALL_BIASED = {"attention_bias": True, "mlp_bias": True}


def _case(model_type: str, base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **base, **changes}


def _without(base: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in base.items() if key not in keys}


CASES: dict[str, dict[str, Any]] = {
    "llama": _case("llama", _LLAMA),
    "llama tied, biased, wide heads": _case(
        "llama", _LLAMA | _ALL_BIASED, tie_word_embeddings=True, head_dim=12
    ),
    "llama without key-value heads": _case("llama", _without(_LLAMA, "num_key_value_heads")),
    "mistral nemo": _case("mistral", _LLAMA, head_dim=10),
    "mistral absent key-value heads": _case(
        "mistral", _without(_LLAMA, "num_key_value_heads"), num_attention_heads=16
    ),
    "qwen2 null key-value heads": _case("qwen2", _LLAMA, num_key_value_heads=None),
    "ministral": _case("ministral", _LLAMA, head_dim=10),
    "mixtral": _case("mixtral", _LOCAL_MOE),
    "qwen2": _case("qwen2", _LLAMA),
    "qwen2 tied": _case("qwen2", _LLAMA, tie_word_embeddings=True),
    "qwen2_moe": _case("qwen2_moe", _MOE, shared_expert_intermediate_size=52),
    "qwen2_moe sparse": _case(
        "qwen2_moe",
        _MOE,
        num_hidden_layers=6,
        shared_expert_intermediate_size=52,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        qkv_bias=False,
    ),
    "qwen3": _case("qwen3", _LLAMA),
    "qwen3 narrow, biased": _case("qwen3", _LLAMA | _BIASED, head_dim=10, tie_word_embeddings=True),
    "qwen3_moe": _case("qwen3_moe", _MOE, head_dim=10),
    "qwen3_moe dense layers": _case("qwen3_moe", _MOE, mlp_only_layers=[0, 2]),
    "gemma": _case("gemma", _LLAMA),
    "gemma2": _case("gemma2", _LLAMA, head_dim=12),
    "gemma2 untied, biased": _case("gemma2", _LLAMA | _BIASED, tie_word_embeddings=False),
    "gemma3_text": _case("gemma3_text", _LLAMA, head_dim=12),
    "phi": _case("phi", _LLAMA),
    "phi with query norms": _case("phi", _LLAMA, qk_layernorm=True),
    "phi3": _case("phi3", _LLAMA),
    "phi3 tied": _case("phi3", _LLAMA, tie_word_embeddings=True),
    "phimoe": _case("phimoe", _LOCAL_MOE),
    "phimoe biased": _case("phimoe", _LOCAL_MOE | _BIASED, lm_head_bias=True),
    "gpt2": _case("gpt2", _GPT),
    "gpt2 inner": _case("gpt2", _GPT, n_inner=84, tie_word_embeddings=False),
    "gpt_bigcode": _case("gpt_bigcode", _GPT),
    "gpt_bigcode many keys": _case("gpt_bigcode", _GPT, multi_query=False, n_inner=84),
    "gptj": _case("gptj", _GPT, rotary_dim=4),
    "codegen": _case("codegen", _GPT | {"n_embd": 64, "n_head": 8}, rotary_dim=4),
    "gpt_neo": _case(
        "gpt_neo",
        {"vocab_size": 101, "hidden_size": 48, "num_layers": 4, "num_heads": 6},
        attention_types=[[["global", "local"], 2]],
        max_position_embeddings=40,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neox": _case("gpt_neox", _LLAMA),
    "gpt_neox serial, unbiased": _case(
        "gpt_neox", _LLAMA, use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True
    ),
    "gpt_oss": _case("gpt_oss", _LOCAL_MOE),
    "gpt_oss unbiased": _case("gpt_oss", _LOCAL_MOE, attention_bias=False, head_dim=10),
    "opt": _case("opt", _OPT),
    "opt 350m": _case("opt", _OPT, word_embed_proj_dim=32, do_layer_norm_before=False),
    "opt plain": _case(
        "opt", _OPT, enable_bias=False, layer_norm_elementwise_affine=False, tie_word_embeddings=False
    ),
    "opt no final norm": _case("opt", _OPT, _remove_final_layer_norm=True),
    "bloom": _case("bloom", {"vocab_size": 101, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    "bloom aliases": _case(
        "bloom", {"vocab_size": 101, "n_embed": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    ),
    "falcon 7b": _case("falcon", _FALCON, num_kv_heads=6),
    "falcon 40b": _case("falcon", _FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=False),
    "falcon 11b": _case(
        "falcon", _FALCON, new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1
    ),
    "falcon rw": _case("falcon", _FALCON, multi_query=False, parallel_attn=False, bias=True, alibi=True),
    "falcon wide mlp": _case("falcon", _FALCON, ffn_hidden_size=84, tie_word_embeddings=False),
    "falcon old names": _case(
        "falcon", {"vocab_size": 101, "hidden_size": 48, "n_layer": 2, "n_head": 6}, multi_query=True
    ),
    "mpt": _case("mpt", {"vocab_size": 101, "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 40}),
    "starcoder2": _case("starcoder2", _LLAMA),
    "starcoder2 unbiased": _case("starcoder2", _LLAMA, use_bias=False, tie_word_embeddings=False),
    "stablelm": _case("stablelm", _LLAMA, use_qkv_bias=True),
    "stablelm parallel, head norms": _case("stablelm", _LLAMA, use_parallel_residual=True, qk_layernorm=True),
    "olmo": _case("olmo", _LLAMA),
    "olmo biased": _case("olmo", _LLAMA | _BIASED),
    "olmo2": _case("olmo2", _LLAMA),
    "olmo3": _case("olmo3", _LLAMA | _BIASED),
    "olmoe": _case("olmoe", _MOE),
    "deepseek_v2 lite": _case("deepseek_v2", _DEEPSEEK, first_k_dense_replace=1),
    "deepseek_v2 full": _case(
        "deepseek_v2",
        _DEEPSEEK | _ALL_BIASED,
        q_lora_rank=28,
        n_shared_experts=1,
    ),
    "deepseek_v3": _case(
        "deepseek_v3", _DEEPSEEK, q_lora_rank=28, num_hidden_layers=5, n_group=2, topk_group=1
    ),
    "deepseek_v3 all dense": _case("deepseek_v3", _DEEPSEEK | _BIASED, q_lora_rank=28),
    "glm": _case("glm", _LLAMA),
    "glm4": _case("glm4", _LLAMA, head_dim=10),
    "glm4 unbiased": _case("glm4", _LLAMA, attention_bias=False, head_dim=10),
    "glm4_moe": _case(
        "glm4_moe", _without(_DEEPSEEK, "num_key_value_heads"), num_attention_heads=8, head_dim=10
    ),
    "glm4_moe with query norms": _case(
        "glm4_moe", _DEEPSEEK | _BIASED, use_qk_norm=True, num_key_value_heads=2, first_k_dense_replace=2
    ),
    "granite": _case("granite", _LLAMA | _ALL_BIASED),
    "granitemoe": _case("granitemoe", _LOCAL_MOE),
    "smollm3": _case("smollm3", _LLAMA | _BIASED),
    "cohere": _case("cohere", _LLAMA),
    "cohere with query norms": _case("cohere", _LLAMA | _BIASED, use_qk_norm=True),
    "cohere2": _case("cohere2", _LLAMA, tie_word_embeddings=False),
    "llama4_text": _case("llama4_text", _LOCAL_MOE, head_dim=10, intermediate_size_mlp=60),
    "llama4_text interleaved": _case(
        "llama4_text", _LOCAL_MOE, num_hidden_layers=4, interleave_moe_layer_step=2, intermediate_size_mlp=60
    ),
    "nemotron": _case("nemotron", _LLAMA | _ALL_BIASED, head_dim=10),
    "seed_oss": _case("seed_oss", _LLAMA, attention_out_bias=True, head_dim=10),
    "exaone4": _case("exaone4", _LLAMA),
    "ernie4_5": _case("ernie4_5", _LLAMA, use_bias=True),
    "arcee": _case("arcee", _LLAMA | _BIASED),
}
