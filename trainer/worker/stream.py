"""Weights straight from a folder's safetensors files into the model: no rank ever holds them twice.

First a skeleton without memory says which tensor of the files goes where, and everything that is wrong
is refused. Then the real model is made, under ZeRO-3 in shards, and each tensor is mapped from its file
and copied into what this rank holds of it. Names follow transformers' own rules for old names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from msgspec import Struct

from llmtop.presets.weightfiles import StoredTensor
from llmtop.trainer.worker.shards import shard_bytes, write_values

_REPORT_SECONDS = 1.0


class CannotStream(Exception):
    """Why transformers' own loader has to be used, in words."""


class Placed(Struct, frozen=True, kw_only=True):
    """A tensor of the files and the parameter or buffer that it fills."""

    name: str
    tensor: StoredTensor


class StreamPlan(Struct, frozen=True, kw_only=True):
    placed: tuple[Placed, ...]
    """In the order of reading."""
    tied: tuple[str, ...]
    """Names without values of their own: tying gives them another's."""
    untied: tuple[str, ...] = ()
    """Names that the configuration ties, and for which the files hold values of their own."""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    """Tensors of the files that the model does not have."""
    mismatched: tuple[str, ...] = ()
    """Name, shape in the file and shape of the model, in words."""
    packed: tuple[str, ...] = ()
    """Tensors that need scales or tables beside them."""


def plan_stream(
    make_model: Callable[[], Any], stored: dict[str, StoredTensor], dtype: torch.dtype
) -> StreamPlan:
    """What goes where. Raises CannotStream for a family whose tensors transformers changes as it loads."""
    skeleton = skeleton_of(make_model)
    expected: dict[str, torch.Tensor] = skeleton.state_dict()
    _refuse_mixed_precision(skeleton, dtype, expected)
    named = _names_in_model(skeleton, stored, expected)
    known = {name: tensor for name, tensor in named.items() if name in expected}
    same, untied = _ties(skeleton, known)
    for name in same:
        del known[name]
    missing = set(expected) - set(known)
    absent = set(missing)
    skeleton.tie_weights(missing_keys=absent, recompute_mapping=False)
    made = {name for name in absent if _matches(skeleton._keys_to_ignore_on_load_missing, name)}
    if made:
        raise CannotStream(f"transformers makes {', '.join(sorted(made))} itself")
    mismatched = [
        f"{name} {tensor.shape}, not {tuple(expected[name].shape)}"
        for name, tensor in known.items()
        if tensor.shape != tuple(expected[name].shape)
    ]
    return StreamPlan(
        placed=tuple(
            Placed(name=name, tensor=tensor)
            for name, tensor in sorted(known.items(), key=lambda item: (item[1].file, item[0]))
        ),
        tied=tuple(sorted(missing - absent)),
        untied=tuple(sorted(untied)),
        missing=tuple(sorted(absent)),
        unexpected=tuple(sorted(_unexpected(skeleton, set(named) - set(expected)))),
        mismatched=tuple(sorted(mismatched)),
        packed=tuple(
            sorted(
                name
                for name, tensor in known.items()
                if tensor.packed or (expected[name].is_floating_point() and not tensor.is_float)
            )
        ),
    )


def stream_weights(
    plan: StreamPlan,
    make_model: Callable[[], Any],
    *,
    in_shards: bool,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None],
) -> Any:
    """The model with the values of the files; `on_progress` hears bytes read and bytes to read in all."""
    model = _without_values(make_model, in_shards=in_shards, dtype=dtype, device=device)
    for name in plan.untied:
        model.all_tied_weights_keys.pop(name, None)
    places = model.state_dict(keep_vars=True)
    # With its own loader too, transformers leaves alone what bears this mark.
    for name in (*(placed.name for placed in plan.placed), *plan.tied):
        places[name]._is_hf_initialized = True
    _fill(plan.placed, places, on_progress)
    model.tie_weights(missing_keys=set(plan.tied), recompute_mapping=False)
    # What is left are tensors that no file holds, such as the tables of rotary positions.
    model.initialize_weights()
    return model


def skeleton_of(make_model: Callable[[], Any]) -> Any:
    """The model without memory; its code runs once, and nothing is cut in shards for it."""
    from transformers.initialization import no_init_weights, no_tie_weights
    from transformers.modeling_utils import set_zero3_state

    with torch.device("meta"), no_init_weights(), no_tie_weights(), set_zero3_state():
        return make_model()


def _without_values(
    make_model: Callable[[], Any], *, in_shards: bool, dtype: torch.dtype, device: torch.device
) -> Any:
    """The model in its memory, with whatever lies there: the values come from the files."""
    from transformers.initialization import no_init_weights, no_tie_weights

    with ExitStack() as stack:
        if in_shards:
            from transformers import PreTrainedModel

            # Transformers' contexts for this very purpose: zero.Init, and no random values.
            for context in PreTrainedModel.get_init_context(dtype, False, False, None):
                stack.enter_context(context)
        else:
            stack.enter_context(no_init_weights())
            stack.enter_context(no_tie_weights())
            stack.enter_context(device)
        return make_model()


def _fill(placed: Iterable[Placed], places: dict[str, Any], on_progress: Callable[[int, int], None]) -> None:
    from safetensors import safe_open

    ordered = tuple(placed)
    total = sum(shard_bytes(places[each.name], each.tensor.size_bytes) for each in ordered)
    done, reported = 0, time.monotonic()

    def on_bytes(count: int) -> None:
        nonlocal done, reported
        done += count
        if time.monotonic() - reported >= _REPORT_SECONDS:
            reported = time.monotonic()
            on_progress(done, max(done, total))

    for file, group in groupby(ordered, key=attrgetter("tensor.file")):
        # The mapping of a file ends with its block: its pages then count as nobody's.
        with safe_open(file, framework="pt") as opened:
            for each in group:
                write_values(places[each.name], opened.get_tensor(each.tensor.key), on_bytes)
    on_progress(done, done)


def _names_in_model(
    skeleton: Any, stored: dict[str, StoredTensor], expected: dict[str, torch.Tensor]
) -> dict[str, StoredTensor]:
    """The stored tensors by the names that transformers gives them, old ones included."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(skeleton)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    named: dict[str, StoredTensor] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, expected)
        if pattern is not None and name in expected:
            raise CannotStream(f"transformers merges or splits this family's tensors as it loads ({name})")
        if name in named:
            raise CannotStream(f"the files hold {name} twice")
        named[name] = stored[key]
    return named


def _ties(skeleton: Any, known: dict[str, StoredTensor]) -> tuple[list[str], list[str]]:
    """Of the names that are tied to another and yet in the files: those with its values, and the others."""
    same: list[str] = []
    other: list[str] = []
    for target, source in skeleton.all_tied_weights_keys.items():
        if target in known and source in known:
            (same if _equal(known[target], known[source]) else other).append(target)
    return same, other


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    from safetensors import safe_open

    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    with safe_open(first.file, framework="pt") as one, safe_open(second.file, framework="pt") as two:
        return torch.equal(one.get_tensor(first.key), two.get_tensor(second.key))


def _refuse_mixed_precision(skeleton: Any, dtype: torch.dtype, expected: Iterable[str]) -> None:
    """Transformers keeps some tensors of some families in fp32; its loader knows which."""
    for pattern in skeleton._get_dtype_plan(dtype):
        kept = [name for name in expected if re.search(pattern, name)]
        if kept:
            raise CannotStream(f"transformers keeps {kept[0]} in fp32")


def _unexpected(skeleton: Any, names: set[str]) -> set[str]:
    """Without those that transformers knows to be leftovers of older code."""
    leftovers = {*(skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"}
    return {name for name in names if not _matches(leftovers, name)}


def _matches(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
