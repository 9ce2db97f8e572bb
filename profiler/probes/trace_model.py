"""Traces the real modelling code of an architecture that has no formulas here.

    python -m llmtop.profiler.probes.trace_model < config.json

A short process of its own: the configuration goes in as JSON, an `Answer` comes out. The model is built and
run at its full width on the meta device, where tensors have sizes and no contents: it takes seconds and
hardly any memory, and nothing is downloaded. Of blocks that are all alike two are run, else all. Four lengths
tell what a block keeps for each token, for each pair of tokens and once. Operations whose kernel on a GPU
keeps something else than the meta device's (attention, dropout, fused norms, experts) are made to keep what
the GPU's does.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from llmtop.presets.hf.tracing import Answer
from llmtop.presets.spec import ModelShape, Traced, TracedCost
from llmtop.profiler.probes.trace_sizes import (
    NotAFit,
    blocks_of,
    role_in_block,
    shape_of,
    weights_of,
    window_of,
)

BATCH = 2
LENGTHS = (128, 256, 384, 512)
"""Three for the coefficients of a block's bytes, and a fourth that must agree with them."""
AGREEMENT = 0.002
_KNOWN_LAYERS = frozenset(
    {"full_attention", "attention", "sliding_attention", "chunked_attention", "global_attention"}
)
_DTYPES: tuple[tuple[Literal[2, 4], torch.dtype], ...] = ((2, torch.bfloat16), (4, torch.float32))


def trace(config: dict[str, Any]) -> ModelShape:
    """Sizes and costs of the model that the configuration describes; raises NotAFit."""
    built = _configured(config)
    _refuse_other_kinds(built)
    costs: list[TracedCost] = []
    with _as_on_a_gpu():
        model = _model(built, "eager")
        blocks = list(blocks_of(model))
        tensors = weights_of(model, blocks)
        shape = shape_of(model, blocks, tensors)
        for attention in _attentions(model):
            model = _model(built, attention)
            run = _shortened(model)
            for adapters in (False, True):
                _freeze(model, run, adapters=adapters)
                for width, dtype in _DTYPES:
                    costs += [
                        replace(cost, attention=attention, width=width, adapters=adapters)
                        for cost in _costs(model.to(dtype), run, shape.sliding_window)
                    ]
        weights, attention_flops = _flops(model.to(torch.bfloat16), run, len(blocks))
    flash = ("flash",) if model._supports_flash_attn else ()
    traced = Traced(
        tensors=tensors,
        costs=tuple(costs),
        multiplied_weights=weights,
        attention_flops=attention_flops,
        attentions=(*_attentions(model), *flash),
        versions=_versions(),
    )
    return replace(shape, traced=traced)


def _freeze(model: Any, blocks: torch.nn.ModuleList, *, adapters: bool) -> None:
    """Train everything; or what would have adapters, which keep a matrix's input as its own training does."""
    model.requires_grad_(not adapters)
    for block in blocks if adapters else ():
        for name, weight in block.named_parameters():
            weight.requires_grad_(weight.dim() == 2 and role_in_block(name, weight) in ("attention", "mlp"))


def _shortened(model: Any) -> torch.nn.ModuleList:
    """The model's own list of blocks, of which all but two are taken out where all are alike."""
    blocks = blocks_of(model)
    if len(set(_kinds(model, blocks))) == 1:
        del blocks[2:]
    return blocks


def _versions() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))


def _configured(config: dict[str, Any]) -> Any:
    keys = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
    name = keys.pop("model_type", None)
    if name not in CONFIG_MAPPING:
        own = " (its code would have to come with its weights, and such code is not run)"
        raise NotAFit(f"transformers does not know it either{own if 'auto_map' in config else ''}")
    return AutoConfig.for_model(name, **keys)


def _refuse_other_kinds(config: Any) -> None:
    """What keeps a state from token to token, or is no causal decoder, has no cost by token and key."""
    built = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if built is None or config.is_encoder_decoder or encoder:
        raise NotAFit("it is no causal language model")
    if getattr(built, "_is_stateful", False):
        raise NotAFit("it keeps a state from token to token, whose kernels a trace cannot stand for")
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        raise NotAFit(f"it has layers of a kind that a trace cannot stand for: {', '.join(sorted(kinds))}")


def _model(config: Any, attention: str) -> Any:
    config.use_cache = False
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16, trust_remote_code=False
        )
    # With frozen weights too the first block is to be like the others: that it keeps less is told elsewhere.
    built.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_(True))
    return built.train()


def _attentions(model: Any) -> tuple[Literal["eager", "sdpa"], ...]:
    return ("eager", "sdpa") if model._supports_sdpa else ("eager",)


class _Run:
    """What one forward pass keeps: by block, and outside of all, in bytes."""

    def __init__(self, model: Any, blocks: torch.nn.ModuleList, length: int) -> None:
        self.by_block = [0] * len(blocks)
        self.outside = 0
        self.keeps_input = False
        """Whether the last block does."""
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._inside: int | None = None
        weights = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._seen = {storage._cdata: storage for storage in weights}
        """Address to storage, held so that no other one gets the same."""
        hooks = [hook for index, block in enumerate(blocks) for hook in self._hooks(index, block)]
        ids = torch.zeros(BATCH, length, dtype=torch.long, device="meta")
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            model(input_ids=ids)
        for hook in hooks:
            hook.remove()

    def _hooks(self, index: int, block: Any) -> tuple[Any, Any]:
        def enter(_: Any, given: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
            self._inside = index
            self.keeps_input = False
            self._input = (given[0] if given else named["hidden_states"]).untyped_storage()

        def leave(*_: Any) -> None:
            self._inside = None

        return block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen or not tensor.numel():
            return tensor
        self._seen[storage._cdata] = storage
        if self._inside is not None:
            self.keeps_input |= storage._cdata == self._input._cdata
            self.by_block[self._inside] += storage.nbytes()
        elif tensor.shape[-1] != self._vocabulary:  # copies of the logits are counted with the loss
            self.outside += storage.nbytes()
        return tensor


def _costs(model: Any, blocks: torch.nn.ModuleList, window: int | None) -> Iterator[TracedCost]:
    """One for lengths within every window, and one for those beyond where there is a window.

    Of which attention, precision and training they are is for the caller to fill in.
    """
    within = LENGTHS
    if window is not None and window <= LENGTHS[-1]:
        within = (window // 5, window * 2 // 5, window * 3 // 5, window * 4 // 5)
    yield _cost(model, blocks, within, from_length=0)
    if window is not None:
        first, second, third, fourth = (window + length for length in LENGTHS)
        yield _cost(model, blocks, (first, second, third, fourth), from_length=window)


def _cost(
    model: Any, blocks: torch.nn.ModuleList, lengths: tuple[int, int, int, int], *, from_length: int
) -> TracedCost:
    runs = [_Run(model, blocks, length) for length in lengths]
    kinds = _kinds(model, blocks)
    means = [_mean_block(run, kinds) for run in runs]
    fixed, per_token, per_key = _coefficients(lengths, means)
    # The first block keeps what all of them share.
    shared = max(0.0, sum(runs[0].by_block) - means[0] * len(blocks))
    return TracedCost(
        attention="eager",
        width=2,
        adapters=False,
        from_length=from_length,
        fixed_bytes=round(fixed),
        saved_bytes=round(per_token / BATCH),
        saved_bytes_per_key=max(0.0, round(per_key / BATCH, 6)),
        outside_bytes=max(0, round((runs[0].outside + shared) / BATCH / lengths[0])),
        keeps_input=runs[0].keeps_input,
    )


def _mean_block(run: _Run, kinds: list[tuple[Any, ...]]) -> float:
    """Of the blocks of one kind the last speaks for all: the first also keeps what all of them share."""
    last = dict(zip(kinds, run.by_block, strict=True))
    return sum(last[kind] for kind in kinds) / len(kinds)


def _kinds(model: Any, blocks: torch.nn.ModuleList) -> list[tuple[Any, ...]]:
    """Blocks with the same weights that look at the same keys keep the same."""
    named = getattr(model.config, "layer_types", None) or [None] * len(blocks)
    return [
        (type(block), kind, window_of(block), *(tuple(weight.shape) for weight in block.parameters()))
        for block, kind in zip(blocks, named, strict=False)
    ]


def _coefficients(lengths: tuple[int, int, int, int], totals: list[float]) -> tuple[float, float, float]:
    """c, a, b of total = c + a x length + b x length^2; raises NotAFit where the last total is another."""
    (n0, n1, n2, n3), (t0, t1, t2, t3) = lengths, totals
    first, second = (t1 - t0) / (n1 - n0), (t2 - t1) / (n2 - n1)
    square = (second - first) / (n2 - n0)
    linear = first - square * (n0 + n1)
    fixed = t0 - linear * n0 - square * n0**2
    if not math.isclose(fixed + linear * n3 + square * n3**2, t3, rel_tol=AGREEMENT):
        raise NotAFit("what its blocks keep does not follow the length in a way that a trace can stand for")
    return fixed, linear, square


def _flops(model: Any, blocks: torch.nn.ModuleList, count: int) -> tuple[int, float]:
    """(weights that a token is multiplied with, operations of a query and a key in a block on average).

    `count` is how many blocks the whole model has. Of a shortened one the second block speaks for the others.
    """
    per_token, per_key = _forward_flops(model)
    if len(blocks) < count:
        both = per_token, per_key
        del blocks[1:]
        per_token, per_key = _forward_flops(model)
        per_token += (both[0] - per_token) * (count - 1)
        per_key += (both[1] - per_key) * (count - 1)
    return round(per_token / 2), per_key / count


def _forward_flops(model: Any) -> tuple[float, float]:
    """Operations of a forward pass for each token, and for each query and key."""
    totals = [_flops_of(model, length) / BATCH for length in LENGTHS]
    _, per_token, per_key = _coefficients(LENGTHS, totals)
    return per_token, per_key


def _flops_of(model: Any, length: int) -> int:
    counter = FlopCounterMode(display=False)
    ids = torch.zeros(BATCH, length, dtype=torch.long, device="meta")
    with counter:
        model(input_ids=ids)
    return int(counter.get_total_flops())


class _GroupedProduct(torch.autograd.Function):
    """Every row of `given` times one of the matrices: keeps each for the other's gradient, and counts as such
    a product."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given if ctx.needs_input_grad[1] else None, weight)
        return given @ weight[0]


def _grouped_product(given: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return _GroupedProduct.apply(given, weight)  # type: ignore[no-any-return,no-untyped-call]


def _all(_: torch.Tensor) -> bool:
    """No token is masked out."""
    return True


def _not_packed(position_ids: torch.Tensor) -> None:
    """Each row is one sequence, which transformers would look for in the numbers of the positions."""


_STAND_INS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (F, "scaled_dot_product_attention", lambda *given, **options: _attention(*given, **options)),
    (F, "dropout", lambda *given, **options: _dropout(*given, **options)),
    (F, "grouped_mm", _grouped_product),
    (F, "rms_norm", lambda *given, **options: _rms_norm(*given, **options)),
    (masking_utils, "find_packed_sequence_indices", _not_packed),
    (masking_utils, "fast_all", _all),
)
"""Module, name there, and what takes its place."""


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Keep for backward what the kernels of a CUDA device keep, and look at no numbers."""
    plain = [(module, name, getattr(module, name)) for module, name, _ in _STAND_INS]
    for module, name, stand_in in _STAND_INS:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name, own in plain:
            setattr(module, name, own)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch chooses on CUDA: flash in 16 bits without a mask, else memory-efficient, else plain.

    `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:_fused_sdp_choice`.
    """
    alike = query.shape[-1] == value.shape[-1] <= 256
    heads_alike = query.shape[1] == key.shape[1] == value.shape[1]
    if attn_mask is None and alike and query.dtype is not torch.float32 and (heads_alike or enable_gqa):
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )
        return out[0]  # type: ignore[no-any-return]
    if not heads_alike:
        return torch.ops.aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    bias = None if attn_mask is None else _bias(attn_mask, query)
    out = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )
    return out[0]  # type: ignore[no-any-return]


def _bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A mask of truth values becomes one of numbers, for each call anew."""
    numbers = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype is torch.bool else mask
    return numbers.expand(query.shape[0], query.shape[1], -1, -1)


def _dropout(
    given: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return given
    return torch.ops.aten.native_dropout(given, p, True)[0]  # type: ignore[no-any-return]


class _FusedNorm(torch.autograd.Function):
    """Keeps its input and one number a row, as CUDA's kernel does."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        statistics = torch.empty(given.shape[:-1], dtype=torch.float32, device=given.device)
        ctx.save_for_backward(given, weight, statistics)
        return torch.empty_like(given)


def _rms_norm(
    given: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return _FusedNorm.apply(given, weight)  # type: ignore[no-any-return,no-untyped-call]


def answer(config: dict[str, Any]) -> Answer:
    """The trace, or why there is none."""
    try:
        return Answer(shape=trace(config))
    except NotAFit as reason:
        return Answer(refused=str(reason))
    except Exception as error:  # noqa: BLE001
        # Modelling code of others: whatever it cannot do without real numbers, it says in its own way.
        words = " ".join(str(error).split())
        return Answer(
            refused=f"its code does not run on the meta device: {type(error).__name__}: {words[:200]}"
        )


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.read())
    out, sys.stdout = sys.stdout, sys.stderr  # what modelling code prints is not the answer
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    out.buffer.write(msgspec.json.encode(answer(config)))


if __name__ == "__main__":
    main()
