"""Floating-point operations of the model in a training step, and what share of the GPUs' peak they are.

The one count that everything here uses. By PaLM's convention (arXiv 2204.02311, appendix B) a token costs
6 N + 12 L H Q T: a multiplication and an addition for each weight, once forward and twice backward, and two
products of the attention over the whole square. Recomputation is not counted: it is not the model's.

N is the weights that a token is multiplied with. PaLM shares one matrix between embedding and head, so its N
counts that once, and so does nanoGPT (`model.py:get_num_params`); here too, and an embedding that is the
input's alone is a lookup and counts nothing. Nor do position tables, norms and biases. With them Llama-3.1-8B
would come out 6 % higher at 4,096 tokens; figures from elsewhere may count that way.

A frozen weight costs 4: nobody asks for its gradient. Adapters cost 6 as any trained weight. Of the experts
those that a token is sent to count. Heads that share keys and values still multiply once for each query head.
A layer with a sliding window of W tokens attends to W of them where the sequence is longer.

`needed` is the second figure: the same without the half of the attention that causality throws away.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.cost.shape import Role, TensorGroup, tensors
from llmtop.profiler.memory.lora import lora_params

TRAINED, FROZEN = 6, 4
"""Operations for each weight and token, forward and backward."""
_LOOKUPS = frozenset({"embed_tokens", "embed_positions"})
_FULL_EVERY = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
}
"""Of so many layers the last attends to everything: defaults of transformers 5.x,
`models/<family>/configuration_<family>.py`. The other families have their window in each layer."""
_WINDOW_ABOVE = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Families with the window from layer `max_window_layers` (28) on."""


class ModelFlops(Struct, frozen=True, kw_only=True):
    """Of one token, forward and backward, without recomputation."""

    weights: float
    """Of the model's own weights."""
    adapters: float
    attention: float
    """Over the whole square of queries and keys."""
    needed_attention: float
    """Over the part that the causal mask and sliding windows leave."""

    @property
    def palm(self) -> float:
        return self.weights + self.adapters + self.attention

    @property
    def needed(self) -> float:
        return self.weights + self.adapters + self.needed_attention


class Utilisation(Struct, frozen=True, kw_only=True):
    """Shares of the GPUs' dense peak."""

    mfu: float
    """By PaLM's convention."""
    needed: float


@lru_cache(maxsize=1024)
def active_weights(model: ModelShape) -> int:
    """Weights that one token is multiplied with; a tied head counts, a lookup does not."""
    if model.traced is not None:
        return model.traced.multiplied_weights
    count = sum(group.total for group in tensors(model) if _is_multiplied(group))
    if model.tied_embeddings:
        count += head_weights(model)
    if model.moe is not None:
        experts = sum(group.total for group in tensors(model) if group.role is Role.EXPERT)
        count += experts * model.moe.experts_per_token // model.moe.num_experts
    return count


def head_weights(model: ModelShape) -> int:
    return model.vocab_size * (model.embedding_dim or model.hidden_size)


def _is_multiplied(group: TensorGroup) -> bool:
    return group.name not in _LOOKUPS and group.role not in (Role.NORM, Role.BIAS, Role.EXPERT)


def model_flops(spec: RunSpec) -> ModelFlops:
    """Of one token of the run."""
    model, options = spec.model, spec.options
    per_key = _attention_flops(model)
    attended = _attended(spec)
    adapters = 0
    if options.lora_rank:
        adapters = TRAINED * lora_params(model, options.lora_rank, options.lora_targets)
    return ModelFlops(
        weights=float((FROZEN if options.lora_rank else TRAINED) * active_weights(model)),
        adapters=float(adapters),
        attention=per_key * sum(layers * keys for layers, keys, _ in attended),
        needed_attention=per_key * sum(layers * needed for layers, _, needed in attended),
    )


def _attention_flops(model: ModelShape) -> float:
    """Of a query and a key in one block, forward and backward: two products, each with two more backward."""
    if model.traced is not None:
        return 3 * model.traced.attention_flops
    return 6 * model.num_heads * _head_widths(model)


def _head_widths(model: ModelShape) -> int:
    """Of a head's key and of its value together."""
    if model.mla is not None:
        return model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim
    return 2 * model.head_dim


def _attended(spec: RunSpec) -> tuple[tuple[int, float, float], ...]:
    """(layers, keys of a query, keys that a query needs on average) with and without a window."""
    length, window = spec.options.seq_len, spec.model.sliding_window
    windowed = windowed_layers(spec) if window is not None and window < length else 0
    whole = (spec.model.num_layers - windowed, float(length), length / 2)
    if not windowed or window is None:
        return (whole,)
    # The first `window` queries see a triangle, the others a band.
    return whole, (windowed, float(window), window - window**2 / (2 * length))


def windowed_layers(spec: RunSpec) -> int:
    """Layers whose attention has the model's sliding window."""
    model, config = spec.model, spec.hf_config
    if model.sliding_window is None:
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds[: model.num_layers])
    if model.family in _WINDOW_ABOVE:
        first = config.get("max_window_layers", 28)
        return max(0, model.num_layers - first) if isinstance(first, int) else model.num_layers
    every = config.get("sliding_window_pattern", _FULL_EVERY.get(model.family))
    if not isinstance(every, int) or every < 1:
        return model.num_layers
    return model.num_layers - model.num_layers // every


def peak_flops_per_second(spec: RunSpec) -> float | None:
    """Dense peak of all GPUs in the run's precision; None where it is not known, as on a CPU."""
    peak = None if spec.on_cpu else spec.gpu.dense_flops_per_second.get(spec.options.precision)
    return peak * spec.world_size if peak else None


def utilisation(spec: RunSpec, tokens_per_second: float | None) -> Utilisation | None:
    """Of the whole job's rate; None without a rate or a known peak."""
    peak = peak_flops_per_second(spec)
    if tokens_per_second is None or peak is None:
        return None
    flops = model_flops(spec)
    return Utilisation(
        mfu=flops.palm * tokens_per_second / peak, needed=flops.needed * tokens_per_second / peak
    )
