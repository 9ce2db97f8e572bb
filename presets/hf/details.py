"""What single families do that no common key expresses: experts, latent attention, block variants.

Each function takes the shape made of the family's common keys and returns it completed. Defaults of
absent keys are those of transformers 5.x, `models/<family>/configuration_<family>.py`.
"""

from __future__ import annotations

from msgspec.structs import replace

from llmtop.presets.hf.reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from llmtop.presets.spec import MlaShape, ModelShape, MoeShape


def _experts(
    reader: ConfigReader,
    shape: ModelShape,
    *,
    count_key: str,
    width_key: str,
    per_token: int | None,
    shared_width: int = 0,
    shared_gate: bool = False,
    dense_layers: int = 0,
    biased: bool = False,
) -> ModelShape:
    count = reader.integer(count_key, maximum=MAX_EXPERTS)
    chosen = reader.integer("num_experts_per_tok", per_token, maximum=MAX_EXPERTS)
    if chosen > count:
        raise reader.contradiction(
            f"num_experts_per_tok = {chosen} is more than {count_key} = {count}",
            "a token cannot go to more experts than there are",
        )
    moe = MoeShape(
        num_experts=count,
        experts_per_token=chosen,
        expert_intermediate_size=reader.integer(width_key),
        shared_intermediate_size=shared_width,
        shared_gate=shared_gate,
        first_dense_layers=dense_layers,
        router_bias=biased,
        expert_bias=biased,
    )
    # A dense width that no layer uses is not the model's.
    return replace(shape, moe=moe, intermediate_size=shape.intermediate_size if dense_layers else 0)


def _sparse_step_dense_layers(reader: ConfigReader, layers: int) -> int:
    """Qwen's two keys for layers that keep a dense MLP."""
    step = reader.integer("decoder_sparse_step", 1, maximum=MAX_LAYERS)
    dense_only = reader.integers("mlp_only_layers", maximum=MAX_LAYERS) or []
    return sum(1 for layer in range(layers) if layer in dense_only or (layer + 1) % step != 0)


def local_experts(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    """Mixtral's keys, which PhiMoE and GraniteMoE have too."""
    return _experts(reader, shape, count_key="num_local_experts", width_key="intermediate_size", per_token=2)


def olmoe_experts(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    return _experts(reader, shape, count_key="num_experts", width_key="intermediate_size", per_token=8)


def gpt_oss_experts(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    return _experts(
        reader,
        shape,
        count_key="num_local_experts",
        width_key="intermediate_size",
        per_token=4,
        biased=True,
    )


def qwen2_experts(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    return _experts(
        reader,
        shape,
        count_key="num_experts",
        width_key="moe_intermediate_size",
        per_token=4,
        shared_width=reader.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=_sparse_step_dense_layers(reader, shape.num_layers),
    )


def qwen3_experts(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    return _experts(
        reader,
        shape,
        count_key="num_experts",
        width_key="moe_intermediate_size",
        per_token=8,
        dense_layers=_sparse_step_dense_layers(reader, shape.num_layers),
    )


def glm4_experts(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    return _grouped(reader, _leading_dense(reader, shape, leading=1, shared=1, per_token=8), groups=1, kept=1)


def _grouped(reader: ConfigReader, shape: ModelShape, *, groups: int, kept: int) -> ModelShape:
    """The same shape, where its router can work: it scores each group by its two best experts, and then
    chooses among those of the best groups."""
    moe = shape.moe
    if moe is None or moe.first_dense_layers >= shape.num_layers:
        return shape
    groups = reader.integer("n_group", groups, maximum=MAX_EXPERTS)
    kept = reader.integer("topk_group", kept, maximum=MAX_EXPERTS)
    each, left = divmod(moe.num_experts, groups)
    if left or each < 2:
        raise reader.contradiction(
            f"n_routed_experts = {moe.num_experts} in n_group = {groups} groups",
            "all groups have as many experts, and two at least, by which they are scored",
        )
    if kept > groups:
        raise reader.contradiction(
            f"topk_group = {kept} is more than n_group = {groups}",
            "a token cannot go to experts of more groups than there are",
        )
    return shape


def _leading_dense(
    reader: ConfigReader, shape: ModelShape, *, leading: int, shared: int, per_token: int | None
) -> ModelShape:
    """The DeepSeek layout: dense layers first, then routed and shared experts of one width."""
    first_dense = reader.integer("first_k_dense_replace", leading, minimum=0, maximum=MAX_LAYERS)
    shared_experts = reader.integer("n_shared_experts", shared, minimum=0, maximum=MAX_EXPERTS)
    return _experts(
        reader,
        shape,
        count_key="n_routed_experts",
        width_key="moe_intermediate_size",
        per_token=per_token,
        shared_width=shared_experts * reader.integer("moe_intermediate_size"),
        dense_layers=min(first_dense, shape.num_layers),
    )


def _latent_attention(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    mla = MlaShape(
        q_lora_rank=reader.optional_integer("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
    )
    return replace(shape, mla=mla, head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim)


def deepseek_v2(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    return _leading_dense(reader, _latent_attention(reader, shape), leading=0, shared=2, per_token=None)


def deepseek_v3(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    made = _leading_dense(reader, _latent_attention(reader, shape), leading=3, shared=1, per_token=8)
    return _grouped(reader, made, groups=8, kept=4)


def llama4_experts(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    sparse = reader.integers("moe_layers", maximum=MAX_LAYERS)
    step = reader.integer("interleave_moe_layer_step", 1, maximum=MAX_LAYERS)
    if sparse is None:
        sparse = list(range(step - 1, shape.num_layers, step))
    dense = shape.num_layers - len({layer for layer in sparse if layer < shape.num_layers})
    wide = replace(shape, intermediate_size=reader.integer("intermediate_size_mlp", 16384))
    return _experts(
        reader,
        wide,
        count_key="num_local_experts",
        width_key="intermediate_size",
        per_token=1,
        shared_width=shape.intermediate_size,
        dense_layers=dense,
    )


def bigcode_heads(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    return replace(shape, num_kv_heads=1) if reader.flag("multi_query", True) else shape


def stablelm_norms(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    return replace(shape, norms_per_layer=1) if shape.parallel_block else shape


def opt_projections(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    width = reader.integer("word_embed_proj_dim", shape.hidden_size)
    before = reader.flag("do_layer_norm_before", True)
    return replace(
        shape,
        embedding_dim=width if width != shape.hidden_size else None,
        final_norm=before and not reader.flag("_remove_final_layer_norm", False),
    )


def falcon_variant(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    """Falcon-7B, Falcon-40B/180B, Falcon-11B and Falcon-RW differ in key-value heads and norms only."""
    new_decoder = reader.flag("new_decoder_architecture", False)
    if new_decoder:
        kv_heads = reader.integer("num_kv_heads", shape.num_heads)
    elif reader.flag("multi_query", True):
        # num_kv_heads, which the files of Falcon-7B have, is not looked at.
        kv_heads = 1
    else:
        kv_heads = shape.num_heads
    parallel = reader.flag("parallel_attn", True)
    norms = reader.integer("num_ln_in_parallel_attn", 2 if new_decoder else 1, maximum=2)
    return replace(
        shape,
        num_kv_heads=kv_heads,
        parallel_block=parallel or new_decoder,
        norms_per_layer=norms if parallel else 2,
    )
