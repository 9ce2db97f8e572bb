"""Which of a model's matrices get a LoRA adapter, by the names that its code gives them."""

from __future__ import annotations

from functools import lru_cache

from msgspec.structs import replace

from llmtop.presets.errors import UsageError, nearest
from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.cost.shape import Role, TensorGroup, tensors

LORA_ROLES = {
    "all-linear": (Role.ATTENTION, Role.MLP),
    "attention": (Role.ATTENTION,),
    "mlp": (Role.MLP,),
}
_NEOX = {
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}
_GPT2 = {"qkv_proj": "c_attn", "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj"}
_GPTJ = {"o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out"}
MODULE_NAMES = {
    "bloom": _NEOX,
    "codegen": _GPTJ,
    "falcon": _NEOX,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {"o_proj": "out_proj", "up_proj": "c_fc", "down_proj": "c_proj"},
    "gpt_neox": _NEOX,
    "gptj": _GPTJ,
    "mpt": {"qkv_proj": "Wqkv", "o_proj": "out_proj"},
    "opt": {"o_proj": "out_proj", "up_proj": "fc1", "down_proj": "fc2"},
    "phi": {"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2"},
    "starcoder2": {"up_proj": "c_fc", "down_proj": "c_proj"},
}
"""Family to the names that its modules have in transformers, where they differ from the tensors' here."""

_GPT_BLOCKS = "transformer.h"
_BLOCKS = {
    **dict.fromkeys(("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj"), _GPT_BLOCKS),
    "gpt_neox": "gpt_neox.layers",
    "mpt": "transformer.blocks",
    "opt": "model.decoder.layers",
}
"""Family to where its code keeps the blocks; elsewhere `model.layers`."""
_ATTENTION = {
    **dict.fromkeys(("codegen", "gpt2", "gpt_bigcode", "gptj", "mpt"), "attn"),
    **dict.fromkeys(("bloom", "falcon"), "self_attention"),
    "gpt_neo": "attn.attention",
    "gpt_neox": "attention",
}
"""The attention of a block; elsewhere `self_attn`."""
_MLP = {"llama4_text": "feed_forward", "mpt": "ffn", "opt": ""}
"""Its MLP; elsewhere `mlp`."""
_ONE_SHARED_EXPERT = ("llama4_text", "qwen2_moe")
"""Families that write `shared_expert`; the others write `shared_experts`."""


def module_path(model: ModelShape, group: TensorGroup, layer: int) -> str:
    """The module's whole name in one layer of the model's code."""
    family = model.family
    if group.role is Role.ATTENTION:
        part = _ATTENTION.get(family, "self_attn")
    else:
        part = _MLP.get(family, "mlp")
        if group.name.startswith("shared_expert."):
            part += ".shared_expert" if family in _ONE_SHARED_EXPERT else ".shared_experts"
    path = (_BLOCKS.get(family, "model.layers"), str(layer), part, module_name(model, group))
    return ".".join(word for word in path if word)


def _layers(model: ModelShape, group: TensorGroup) -> range:
    """The layers that have the matrix: those with experts follow those without (Llama-4: any may)."""
    everywhere = range(model.num_layers)
    if model.moe is None or group.role is Role.ATTENTION or model.family == "llama4_text":
        return everywhere
    dense = model.moe.first_dense_layers
    return everywhere[dense:] if group.name.startswith("shared_expert.") else everywhere[:dense]


@lru_cache(maxsize=64)
def _paths(model: ModelShape) -> dict[str, TensorGroup]:
    """Every matrix of every layer by its whole name."""
    return {
        module_path(model, group, layer): group for group in linear(model) for layer in _layers(model, group)
    }


def module_name(model: ModelShape, group: TensorGroup) -> str:
    """The last part of the module's name in the model's code."""
    leaf = group.name.rpartition(".")[2]
    return MODULE_NAMES.get(model.family, {}).get(leaf, leaf)


def linear(model: ModelShape) -> tuple[TensorGroup, ...]:
    """The matrices that can get an adapter: two-dimensional, of attention and MLP, inside blocks."""
    return tuple(
        group
        for group in tensors(model)
        if group.per_layer and len(group.shape) == 2 and group.role in (Role.ATTENTION, Role.MLP)
    )


@lru_cache(maxsize=1024)
def adapted(model: ModelShape, targets: str) -> tuple[TensorGroup, ...]:
    """The matrices that get an adapter: those of the targeted roles or names."""
    roles = LORA_ROLES.get(targets)
    if roles is not None:
        return tuple(group for group in linear(model) if group.role in roles)
    names = _names(targets)
    # Whole names choose single layers.
    single = [_paths(model)[name] for name in names if "." in name and name in _paths(model)]
    found = []
    for group in linear(model):
        count = group.count if module_name(model, group) in names else single.count(group)
        if count:
            found.append(replace(group, count=count))
    return tuple(found)


@lru_cache(maxsize=1024)
def in_some_layers(model: ModelShape, targets: str) -> bool:
    """Whether a matrix gets its adapter in some of the layers that have it."""
    whole = {group.name: group.count for group in linear(model)}
    return any(group.count < whole[group.name] for group in adapted(model, targets))


@lru_cache(maxsize=1024)
def lora_params(model: ModelShape, rank: int, targets: str) -> int:
    """Adapter weights: rank x (rows + columns) for each adapted matrix (LoRA, arXiv 2106.09685)."""
    return sum(rank * sum(group.shape) * group.count for group in adapted(model, targets))


def targets_exist(spec: RunSpec) -> bool:
    """Whether the model has everything that `lora_targets` names, and that is at least one matrix."""
    return not spec.options.lora_rank or (
        not _unknown(spec.model, spec.options.lora_targets)
        and bool(adapted(spec.model, spec.options.lora_targets))
    )


def check_targets(spec: RunSpec) -> None:
    """Raise UsageError when `targets_exist` says no."""
    if targets_exist(spec):
        return
    model, targets = spec.model, spec.options.lora_targets
    known, unknown = _known(model), _unknown(model, targets)
    candidates = _paths(model) if unknown and "." in unknown[0] else [*known, *LORA_ROLES]
    guess = nearest(unknown[0], candidates) if unknown else None
    raise UsageError(
        f"lora_targets = {targets!r}: "
        + (f"{model.name} has no matrix '{unknown[0]}'" if unknown else f"{model.name} has no such matrix"),
        why=f"its blocks' matrices are: {', '.join(known)}",
        fix=f"did you mean '{guess}'?" if guess else f"name some of them, or one of {', '.join(LORA_ROLES)}",
    )


def _known(model: ModelShape) -> list[str]:
    return sorted({module_name(model, group) for group in linear(model)})


def _unknown(model: ModelShape, targets: str) -> list[str]:
    if targets in LORA_ROLES:
        return []
    names = _names(targets) - set(_known(model))
    return sorted(name for name in names if "." not in name or name not in _paths(model))


def _names(targets: str) -> set[str]:
    return {name.strip() for name in targets.split(",") if name.strip()}
