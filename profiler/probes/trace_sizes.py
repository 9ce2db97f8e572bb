"""What a model built on the meta device consists of: its blocks, its weights by role, its sizes by name."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from llmtop.presets.spec import ModelShape, TensorRole, TracedTensor

_NORM_WORDS = ("norm", "ln_", "layernorm")


class NotAFit(Exception):
    """The architecture is none that a trace can stand for; the text says why."""


def blocks_of(model: Any) -> torch.nn.ModuleList:
    """The blocks: the one list of modules that is as long as the configuration has layers."""
    count = model.config.num_hidden_layers
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    whole = [module for name, module in lists if not any(name.startswith(f"{outer}.") for outer, _ in lists)]
    if len(whole) != 1:
        raise NotAFit("its blocks are not one plain list")
    return whole[0]


def weights_of(model: Any, blocks: list[Any]) -> tuple[TracedTensor, ...]:
    """Every weight, equal ones of all blocks together, in the model's order; tied ones once."""
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    groups: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    roles: dict[tuple[str, tuple[int, ...]], tuple[TensorRole, bool]] = {}
    names = [(name, weight) for name, weight in model.named_parameters() if id(weight) not in inside]
    names += [(name, weight) for block in blocks for name, weight in block.named_parameters()]
    tables = _tables(model)
    head = model.get_output_embeddings()
    for name, weight in names:
        per_layer = id(weight) in inside
        key = (name.removesuffix(".weight"), tuple(weight.shape))
        groups[key] += 1
        if per_layer:
            roles[key] = role_in_block(name, weight), True
        else:
            is_head = head is not None and weight is head.weight
            roles[key] = _role_outside(name, weight, tables, is_head), False
    found = [
        TracedTensor(
            name=name, shape=shape, count=count, role=roles[name, shape][0], per_layer=roles[name, shape][1]
        )
        for (name, shape), count in groups.items()
    ]
    # As the model has them: tables first, then blocks, then the last norm and the head.
    first = [tensor for tensor in found if tensor.role in ("embedding", "position")]
    in_blocks = [tensor for tensor in found if tensor.per_layer]
    return (*first, *in_blocks, *(tensor for tensor in found if tensor not in first and not tensor.per_layer))


def _tables(model: Any) -> dict[int, TensorRole]:
    """Look-up tables: the one of tokens, and the others, which are of positions."""
    tokens = model.get_input_embeddings().weight
    tables: dict[int, TensorRole] = {
        id(module.weight): "position" for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    return {**tables, id(tokens): "embedding"}


def _role_outside(name: str, weight: Any, tables: dict[int, TensorRole], is_head: bool) -> TensorRole:
    if id(weight) in tables:
        return tables[id(weight)]
    if is_head or weight.dim() > 1:
        return "head"
    return "norm" if _is_norm(name) else "bias"


def role_in_block(name: str, weight: Any) -> TensorRole:
    """What a weight of a block is, by its name there and its shape."""
    parts = name.lower().split(".")
    if weight.dim() == 1:
        return "norm" if _is_norm(name) or not name.endswith("bias") else "bias"
    if weight.dim() > 2 or "experts" in parts:
        return "expert"
    named_gate = parts[-2:-1] == ["gate"] and weight.shape[0] < weight.shape[1]
    if named_gate or any("router" in part for part in parts):
        return "router"
    return "attention" if any("att" in part for part in parts) else "mlp"


def _is_norm(name: str) -> bool:
    return any(word in name.lower() for word in _NORM_WORDS)


def shape_of(model: Any, blocks: list[Any], tensors: tuple[TracedTensor, ...]) -> ModelShape:
    """The fields of a shape that the configuration names; `traced` is for the caller to fill in."""
    config = model.config
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    tokens = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    return ModelShape(
        name="",
        family=config.model_type,
        num_layers=len(blocks),
        hidden_size=hidden,
        intermediate_size=_widest(config, tensors, hidden),
        num_heads=heads,
        num_kv_heads=_key_value_heads(config, heads),
        head_dim=head_dim,
        vocab_size=int(tokens.shape[0]),
        max_positions=getattr(config, "max_position_embeddings", None),
        tied_embeddings=head is None or head.weight is tokens,
        embedding_dim=int(tokens.shape[1]) if tokens.shape[1] != hidden else None,
        gated_mlp=_is_gated(tensors),
        norm="layer" if any(isinstance(m, torch.nn.LayerNorm) for m in blocks[0].modules()) else "rms",
        learned_positions=sum(t.shape[0] for t in tensors if t.role == "position"),
        sliding_window=_window(config, blocks),
        logit_softcap=getattr(config, "final_logit_softcapping", None) or None,
    )


def _key_value_heads(config: Any, heads: int) -> int:
    given = getattr(config, "num_key_value_heads", None)
    return int(given) if isinstance(given, int) and given > 0 and heads % given == 0 else heads


def _widest(config: Any, tensors: tuple[TracedTensor, ...], hidden: int) -> int:
    """The MLP's width that a token passes through: its own matrix's, or that of the experts it is sent to."""
    experts = [min(t.shape[-2:]) for t in tensors if t.role == "expert" and len(t.shape) > 2]
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_k", None)
    routed = max(experts, default=0) * int(chosen or 1)
    dense = max((max(t.shape) for t in tensors if t.role == "mlp" and len(t.shape) == 2), default=hidden)
    given = getattr(config, "intermediate_size", None)
    return max(routed, int(given) if isinstance(given, int) else dense)


def _is_gated(tensors: tuple[TracedTensor, ...]) -> bool:
    """Whether an MLP has a matrix more than up and down, or one twice as wide."""
    mlp = [t for t in tensors if t.role in ("mlp", "expert") and len(t.shape) > 1]
    return len(mlp) != 2 or sorted(mlp[0].shape) != sorted(mlp[1].shape)


def _window(config: Any, blocks: list[Any]) -> int | None:
    """The window that some block has, or that the configuration names for all."""
    windows = {window for block in blocks if (window := window_of(block))}
    named = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) and isinstance(named, int) and named > 0:
        windows.add(named)
    return min(windows) if windows else None


def window_of(block: Any) -> int | None:
    """The sliding window of a block's attention; None where it looks at every token before it."""
    found = (getattr(module, "sliding_window", None) for module in block.modules())
    return next((window for window in found if isinstance(window, int) and window > 0), None)
