"""A prediction as formulas with the numbers in them: the prediction's own code, followed term by term.

Nothing is computed a second way. The spec's counts are replaced by numbers that remember (`Counted`), the
same functions run on them, and the terms of each component are read off the result, whose sum is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.memory import explain_sources as sources
from llmtop.profiler.memory.explain_numbers import (
    Counted,
    Factor,
    Term,
    labelled,
    named,
    term_words,
    terms_of,
)
from llmtop.profiler.memory.predict import predict, predict_counted, simulated
from llmtop.profiler.memory.result import Component, Moment, Prediction
from llmtop.profiler.memory.sizes import Sizes, quantized_weights, sizes_of, stored_bytes
from llmtop.profiler.memory.states import StateBytes, state_bytes

BOUND, OUTSIDE = "the upper bound", "outside the allocator: context, NCCL, kernels"
_OUTSIDE_SOURCE = "device minus reserved on H200 (profiler/memory/allocator.py:context_bytes)"
_SIMULATED_SOURCE = "every tensor of two steps, by torch c10/cuda/CUDACachingAllocator.cpp"
_STREAMS = {0: "the main stream", 1: "gathered weights", 2: "reduced gradients"}
_ALONE: dict[str, str] = {Component.RUNTIME: "cpu._moments", Component.WORKSPACE: "states.cublas_workspace"}
"""The rules of components that can be one plain number."""


class ExplainedTerm(Struct, frozen=True, kw_only=True):
    """One product of a sum."""

    value: int
    formula: str
    label: str
    """What it is; empty where the sum's own name says it."""
    source: str
    """Where its rule comes from."""
    function: str
    """The function that has the rule, below profiler/memory/."""


class ExplainedSum(Struct, frozen=True, kw_only=True):
    """A number of bytes as the sum of its terms, the largest first."""

    name: str
    value: int
    terms: tuple[ExplainedTerm, ...]


class ExplainedMoment(Struct, frozen=True, kw_only=True):
    name: Moment
    total_bytes: int
    components: tuple[ExplainedSum, ...]


class Explanation(Struct, frozen=True, kw_only=True):
    """Every byte of a prediction."""

    peak_moment: Moment
    moments: tuple[ExplainedMoment, ...]
    verdict: tuple[ExplainedSum, ...]
    """The upper bound, what is compared with the memory there is, and what the simulated allocator holds."""
    host: tuple[ExplainedSum, ...]


def explain(spec: RunSpec) -> Explanation:
    """Every number of `predict(spec)`, as formulas; takes some milliseconds."""
    # What depends on the model alone is cached by value: after this call the cache answers with plain
    # numbers, and none of those that remember gets into it.
    plain = predict(spec)
    followed = _followed(spec)
    _check_same(plain, followed)
    return Explanation(
        peak_moment=plain.peak_moment,
        moments=tuple(
            ExplainedMoment(
                name=moment.name,
                total_bytes=int(moment.total_bytes),
                components=_cited(spec, (_explained(name, size) for name, size in moment.components.items())),
            )
            for moment in followed.moments
        ),
        verdict=_cited(spec, (*_verdict(followed, on_cpu=spec.on_cpu), *_held(spec, plain))),
        # On the CPU kind it is the processes, of which the moments tell.
        host=()
        if spec.on_cpu
        else _cited(spec, (_explained(name, size) for name, size in followed.host.components.items())),
    )


def _followed(spec: RunSpec) -> Prediction:
    marked = replace(
        spec,
        options=_with_names(spec.options, sources.OPTIONS, only_named=True),
        model=_marked_model(spec.model),
    )
    sizes = _marked_sizes(spec, sizes_of(marked))
    states = _marked_states(state_bytes(marked, sizes))
    return predict_counted(marked, sizes, states, in_words=False)


def _with_names(struct: Any, words: dict[str, str], *, only_named: bool = False) -> Any:
    """The struct with its whole numbers named."""
    fresh = {
        key: named(value, words.get(key, key.replace("_", " ")))
        for key, value in asdict(struct).items()
        if type(value) is int and (key in words or not only_named)
    }
    return replace(struct, **fresh)


def _marked_model(model: ModelShape) -> ModelShape:
    marked: ModelShape = _with_names(model, sources.MODEL)
    layers = named(model.num_layers, "block" if model.num_layers == 1 else "blocks", is_count=True)
    parts = {
        key: _with_names(part, sources.MODEL)
        for key, part in (("moe", model.moe), ("mla", model.mla))
        if part is not None
    }
    return replace(marked, num_layers=layers, **parts)


def _marked_sizes(spec: RunSpec, sizes: Sizes) -> Sizes:
    trained = f"{int(sizes.trainable):,}"
    fresh: dict[str, Any] = {"zero": _with_names(sizes.zero, {})}
    for key, words in sources.SIZES.items():
        value = getattr(sizes, key)
        if any(term.factors for term in terms_of(value)):
            fresh[key] = _with_word(value, trained, f"{trained} {sources.SIZES['trainable']}")
        else:
            fresh[key] = named(value, words, is_bytes=words.startswith("B"))
    if sizes.frozen:
        kind = spec.options.quantization
        packed = named(quantized_weights(spec.model) if kind != "none" else 0, "packed weights")
        stored = stored_bytes(fresh["frozen"], packed, fresh["dtype_bytes"], kind, fresh["scale_bytes"])
        fresh["packed_bytes"], fresh["frozen_bytes"] = stored
    return replace(sizes, **fresh)


def _of_no_rule(value: int) -> Counted:
    """What a count is made of belongs to whatever it is used in."""
    return Counted(int(value), tuple(replace(term, rule="") for term in terms_of(value)))


def _with_word(value: int, text: str, replacement: str) -> Counted:
    """The number, with a text in its divisions replaced: a count that came there without its name."""
    terms = tuple(
        replace(
            term,
            factors=tuple(
                replace(f, words=f.words.replace(text, replacement)) if f.is_formula else f
                for f in term.factors
            ),
        )
        for term in terms_of(value)
    )
    return _of_no_rule(Counted(int(value), terms))


def _marked_states(states: StateBytes) -> StateBytes:
    rules = {"workspace": "states.cublas_workspace", "scales": "qat.qat_scales"}
    return replace(
        states,
        **{
            key: labelled(getattr(states, key), words, rules.get(key, "states._stage3"))
            for key, words in sources.STATES.items()
        },
    )


def _check_same(plain: Prediction, followed: Prediction) -> None:
    """The followed numbers are the prediction's, whatever was kept of how they came about."""
    pairs = list(zip(plain.moments, followed.moments, strict=True))
    same = plain.needed_bytes == followed.needed_bytes and plain.host == followed.host
    if not same or any(one.components != other.components for one, other in pairs):
        raise AssertionError("following the formulas changed their result")


def _explained(name: Component | str, value: int) -> ExplainedSum:
    terms = _netted(terms_of(value, _ALONE.get(str(name), "predict.moment_table")))
    if sum(term.value for term in terms) != value:
        raise AssertionError(f"the terms of {name} do not add up to {value}")
    found = sorted(map(_term, terms), key=lambda term: -abs(term.value))
    return ExplainedSum(name=str(name), value=int(value), terms=tuple(found))


def _cited(spec: RunSpec, sums: Iterable[ExplainedSum]) -> tuple[ExplainedSum, ...]:
    """With those sources alone that this run makes use of."""
    return tuple(
        replace(one, terms=tuple(replace(term, source=_source(spec, term)) for term in one.terms))
        for one in sums
    )


def _source(spec: RunSpec, term: ExplainedTerm) -> str:
    module = term.function.partition(".")[0]
    return term.source and sources.in_use(term.source, spec.options, sources.rule_of(module).source)


def _netted(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Terms of equal factors, of which some are taken away again, as what is left of them."""
    alike: dict[tuple[Factor, ...], list[Term]] = {}
    for term in terms:
        alike.setdefault(term.factors, []).append(term)
    found: list[Term] = []
    for group in alike.values():
        total = sum(term.coefficient for term in group)
        if min(term.coefficient for term in group) < 0 < max(term.coefficient for term in group):
            largest = max(group, key=lambda term: term.coefficient * total)
            group = [replace(largest, coefficient=total)] if total else []
        found += group
    return tuple(found)


def _term(term: Term) -> ExplainedTerm:
    rule = sources.rule_of(term.rule)
    return ExplainedTerm(
        value=term.value,
        formula=term_words(term, " B"),
        label=term.label or rule.label,
        source=rule.source,
        function=term.rule,
    )


def _verdict(prediction: Prediction, *, on_cpu: bool) -> tuple[ExplainedSum, ...]:
    upper, needed = prediction.peak_allocated_upper_bytes, prediction.needed_bytes
    bound = _explained("upper bound of what is allocated", upper)
    if needed is None:
        return (bound,)
    if on_cpu:
        return bound, _explained("needed", needed)
    return bound, _beyond(upper, needed)


def _held(spec: RunSpec, prediction: Prediction) -> tuple[ExplainedSum, ...]:
    """What the simulated allocator holds at most: what is allocated then, and what lies free between."""
    found = simulated(spec, prediction)
    if found is None:
        return ()
    free = found.peak_reserved_bytes - found.allocated_then_bytes
    streams = ", ".join(
        f"{_STREAMS.get(stream, 'others')} {size:,} B" for stream, size in found.reserved_of_streams.items()
    )
    parts = (
        (found.allocated_then_bytes, f"allocated then; segments of {streams}"),
        (free, "free blocks and the ends of blocks, which the next request does not fit"),
    )
    terms = tuple(
        ExplainedTerm(
            value=size,
            formula=f"{size:,} B",
            label=label,
            source=_SIMULATED_SOURCE,
            function="tape.run.taped",
        )
        for size, label in parts
    )
    return (ExplainedSum(name="reserved, simulated", value=found.peak_reserved_bytes, terms=terms),)


def _beyond(upper: int, needed: int) -> ExplainedSum:
    """What is needed, as the upper bound and what comes on top of it."""
    known = list(terms_of(upper))
    first = ExplainedTerm(
        value=int(upper), formula=f"{int(upper):,} B", label=BOUND, source="", function="bound.upper_bytes"
    )
    more = []
    for term in terms_of(needed):
        if term in known:
            known.remove(term)
        else:
            own = _term(term)
            source = own.source if term.rule == "nccl.network_bytes" else _OUTSIDE_SOURCE
            more.append(replace(own, label=own.label or OUTSIDE, source=source))
    found = ExplainedSum(name="needed", value=int(needed), terms=(first, *more))
    if sum(term.value for term in found.terms) != needed:
        raise AssertionError(f"the terms of what is needed do not add up to {needed}")
    return found
