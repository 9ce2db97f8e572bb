"""Families of the Llama lineage: rotary positions, gated MLPs, mostly RMSNorm; dense and with experts.

Layouts and the defaults of absent keys are those of transformers 5.x (`models/<family>/`); the tests
compare every row with the real modules on the meta device.
"""

from __future__ import annotations

from msgspec.structs import replace

from llmtop.presets.hf import details
from llmtop.presets.hf.family import ATTENTION_BIAS, MLP_BIAS, Family, Keys

_LLAMA_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN_SIZES = _LLAMA_SIZES | {"vocab_size": 151936, "intermediate_size": 22016}

_ATTENTION_BIAS_ONLY = Family(qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS)
_LLAMA = replace(_ATTENTION_BIAS_ONLY, class_defaults=_LLAMA_SIZES, divisible=True, mlp_bias=MLP_BIAS)
_MISTRAL = Family(
    class_defaults=_LLAMA_SIZES | {"intermediate_size": 14336}, kv_heads_default=8, sliding_window=4096
)
_QWEN2 = Family(
    class_defaults=_QWEN_SIZES,
    kv_heads_default=32,
    qkv_bias=True,
    sliding_window_key="use_sliding_window",
    sliding_window=4096,
)
_QWEN3 = replace(
    _QWEN2, head_dim_default=128, qk_norm="head", qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS
)
_GEMMA = replace(
    _ATTENTION_BIAS_ONLY,
    keys=Keys(activation=("hidden_activation", "hidden_act")),
    kv_heads_default=16,
    head_dim_default=256,
    tied=True,
    activation="gelu_pytorch_tanh",
)
_GEMMA2 = replace(
    _GEMMA,
    kv_heads_default=4,
    divisible=True,
    norms_per_layer=4,
    sliding_window=4096,
    softcaps=(30.0, 50.0),
)
_GLM = Family(kv_heads_default=2, head_dim_default=128, fused_gate_up=True, qkv_bias=("attention_bias", True))
_COHERE = replace(
    _ATTENTION_BIAS_ONLY, norm="layer", norm_bias=False, norms_per_layer=1, parallel=True, tied=True
)
_DEEPSEEK = replace(_ATTENTION_BIAS_ONLY, keys=Keys(kv_heads=None, head_dim=None))

LLAMA_FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "mixtral": replace(
        _MISTRAL,
        class_defaults={},
        aliases={"num_experts": "num_local_experts"},
        sliding_window=None,
        finish=details.local_experts,
    ),
    "qwen2": _QWEN2,
    "qwen2_moe": replace(
        _QWEN2, kv_heads_default=16, qkv_bias=("qkv_bias", True), finish=details.qwen2_experts
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3,
        kv_heads_default=4,
        head_dim_default=None,
        aliases={"num_local_experts": "num_experts"},
        finish=details.qwen3_experts,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        class_defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        qk_norm="head",
        softcaps=(None, None),
    ),
    "phi3": Family(keys=Keys(dropout="resid_pdrop"), fused_qkv=True, fused_gate_up=True),
    "phimoe": replace(
        _ATTENTION_BIAS_ONLY,
        kv_heads_default=8,
        norm="layer",
        head_bias=("lm_head_bias", False),
        finish=details.local_experts,
    ),
    "gpt_oss": Family(
        kv_heads_default=8,
        head_dim_default=64,
        aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        qkv_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
        attention_sinks=True,
        sliding_window=128,
        finish=details.gpt_oss_experts,
    ),
    "stablelm": Family(
        keys=Keys(head_dim=None, dropout="hidden_dropout"),
        kv_heads_default=32,
        norm="layer",
        parallel=("use_parallel_residual", False),
        qk_norm="per_head",
        qk_norm_key="qk_layernorm",
        qkv_bias=("use_qkv_bias", False),
        finish=details.stablelm_norms,
    ),
    # OLMo's LayerNorm has neither weight nor bias.
    "olmo": replace(_ATTENTION_BIAS_ONLY, norm="layer", norm_weight=False),
    "olmo2": replace(_ATTENTION_BIAS_ONLY, qk_norm="full"),
    "olmo3": replace(_ATTENTION_BIAS_ONLY, qk_norm="full", sliding_window=4096),
    "olmoe": replace(
        _ATTENTION_BIAS_ONLY,
        qk_norm="full",
        aliases={"num_local_experts": "num_experts"},
        finish=details.olmoe_experts,
    ),
    "deepseek_v2": replace(
        _DEEPSEEK,
        divisible=True,
        mlp_bias=MLP_BIAS,
        aliases={"num_experts": "n_routed_experts"},
        finish=details.deepseek_v2,
    ),
    "deepseek_v3": replace(
        _DEEPSEEK, aliases={"num_local_experts": "n_routed_experts"}, finish=details.deepseek_v3
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, norms_per_layer=4),
    "glm4_moe": Family(
        kv_heads_default=8,
        aliases={"num_local_experts": "n_routed_experts"},
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        qkv_bias=ATTENTION_BIAS,
        finish=details.glm4_experts,
    ),
    "granite": replace(_ATTENTION_BIAS_ONLY, mlp_bias=MLP_BIAS),
    "granitemoe": replace(_ATTENTION_BIAS_ONLY, finish=details.local_experts),
    "smollm3": replace(
        _ATTENTION_BIAS_ONLY,
        kv_heads_default=4,
        tied=True,
        mlp_bias=MLP_BIAS,
        sliding_window_key="use_sliding_window",
    ),
    "cohere": replace(_COHERE, qk_norm="per_head", qk_norm_key="use_qk_norm"),
    "cohere2": replace(_COHERE, keys=Keys(head_dim=None), sliding_window=4096),
    "llama4_text": replace(
        _ATTENTION_BIAS_ONLY,
        class_defaults={
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_local_experts": 16,
        },
        kv_heads_default=8,
        head_dim_default=128,
        finish=details.llama4_experts,
    ),
    "nemotron": replace(
        _ATTENTION_BIAS_ONLY, gated=False, activation="relu2", norm="layer", mlp_bias=MLP_BIAS
    ),
    "seed_oss": Family(
        keys=Keys(dropout="residual_dropout"),
        kv_heads_default=8,
        head_dim_default=128,
        dropout=0.1,
        score_dropout=0.1,
        qkv_bias=("attention_bias", True),
        output_bias=("attention_out_bias", False),
        mlp_bias=MLP_BIAS,
    ),
    "exaone4": Family(kv_heads_default=32, qk_norm="head", sliding_window=4096),
    "ernie4_5": Family(
        kv_heads_default=2,
        head_dim_default=128,
        tied=True,
        qkv_bias=("use_bias", False),
        output_bias=("use_bias", False),
        mlp_bias=("use_bias", False),
    ),
    "arcee": replace(_LLAMA, class_defaults={}, gated=False, activation="relu2"),
}
