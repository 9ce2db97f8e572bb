"""Which of a model's matrices get a LoRA adapter, by the names that its code gives them."""

from __future__ import annotations

from functools import lru_cache

from llmtop.presets.errors import UsageError, nearest
from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.shape import Role, TensorGroup, tensors

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
    names = _names(targets)
    return tuple(
        group
        for group in linear(model)
        if (group.role in roles if roles is not None else module_name(model, group) in names)
    )


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
    guess = nearest(unknown[0], [*known, *LORA_ROLES]) if unknown else None
    raise UsageError(
        f"lora_targets = {targets!r}: "
        + (f"{model.name} has no matrix '{unknown[0]}'" if unknown else f"{model.name} has no such matrix"),
        why=f"its blocks' matrices are: {', '.join(known)}",
        fix=f"did you mean '{guess}'?" if guess else f"name some of them, or one of {', '.join(LORA_ROLES)}",
    )


def _known(model: ModelShape) -> list[str]:
    return sorted({module_name(model, group) for group in linear(model)})


def _unknown(model: ModelShape, targets: str) -> list[str]:
    return [] if targets in LORA_ROLES else sorted(_names(targets) - set(_known(model)))


def _names(targets: str) -> set[str]:
    return {name.strip() for name in targets.split(",") if name.strip()}
