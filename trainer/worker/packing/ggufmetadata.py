"""What a GGUF file says of its model: sizes, norms, angles of positions, windows, softcaps."""

from __future__ import annotations

import gguf

from llmtop.presets.hf.reader import ConfigReader
from llmtop.presets.spec import MoeShape
from llmtop.trainer.quantize.plan import GgufPlan
from llmtop.trainer.quantize.rope import Rope
from llmtop.trainer.quantize.source import Source

_LAYER_EPSILON = 1e-5
_EPSILON = {"phi3": 1e-5, "mixtral": 1e-5}
"""Where the class's own differs from what the others take for an absent key."""
_USUAL_EPSILON = 1e-6
_FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
_WITH_WINDOW = frozenset({"gemma2", "gemma3_text", "phi3"})
"""Families for which llama.cpp reads a window."""


def add_metadata(writer: gguf.GGUFWriter, source: Source, plan: GgufPlan) -> None:
    """All of it but the vocabulary and the name."""
    shape = source.shape
    reader = ConfigReader(source.config, str(source.folder / "config.json"))
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(_FILE_TYPES[plan.kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_positions or 2048)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(reader.integer("intermediate_size", shape.intermediate_size))
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    if shape.norm == "layer":
        writer.add_layer_norm_eps(reader.number("layer_norm_eps", _LAYER_EPSILON) or _LAYER_EPSILON)
    else:
        epsilon = reader.number("rms_norm_eps", _EPSILON.get(shape.family, _USUAL_EPSILON))
        writer.add_layer_norm_rms_eps(epsilon or _USUAL_EPSILON)
    writer.add_vocab_size(shape.vocab_size)
    _add_rope(writer, plan.rope, shape.head_dim)
    if shape.moe is not None:
        _add_experts(writer, shape.moe, shape.family)
    if shape.family in _WITH_WINDOW:
        # Zero tells Phi-4 from Phi-3.
        writer.add_sliding_window(shape.sliding_window or 0)
    if shape.attention_softcap:
        writer.add_attn_logit_softcapping(shape.attention_softcap)
    if shape.logit_softcap:
        writer.add_final_logit_softcapping(shape.logit_softcap)


def _add_experts(writer: gguf.GGUFWriter, moe: MoeShape, family: str) -> None:
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.experts_per_token)
    if family != "mixtral":
        # Where its experts are as wide as the model's own key says, llama.cpp looks for no other.
        writer.add_expert_feed_forward_length(moe.expert_intermediate_size)
    if moe.shared_intermediate_size:
        writer.add_expert_shared_feed_forward_length(moe.shared_intermediate_size)


def _add_rope(writer: gguf.GGUFWriter, rope: Rope, head_dim: int) -> None:
    writer.add_rope_dimension_count(int(head_dim * rope.rotary_part))
    writer.add_rope_freq_base(rope.theta)
    if rope.local_theta is not None:
        writer.add_rope_freq_base_swa(rope.local_theta)
    if rope.original_positions is not None:
        writer.add_rope_scaling_orig_ctx_len(rope.original_positions)
    if rope.scaling != "none":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.scaling))
    if rope.factor is not None:
        writer.add_rope_scaling_factor(rope.factor)
    if rope.scaling == "longrope" and rope.attention_factor is not None:
        writer.add_rope_scaling_attn_factors(rope.attention_factor)
    if rope.scaling == "yarn":
        for value, add in (
            (rope.attention_factor, writer.add_rope_scaling_yarn_attn_factor),
            (rope.beta_fast, writer.add_rope_scaling_yarn_beta_fast),
            (rope.beta_slow, writer.add_rope_scaling_yarn_beta_slow),
        ):
            if value is not None:
                add(value)
