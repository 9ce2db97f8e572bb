"""Changes that would make a run fit, or use the room that it leaves, in the order of what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.rules import has_bf16, refusals
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.flatlimit import is_too_long
from llmtop.profiler.memory.halving import halved
from llmtop.profiler.memory.lora import targets_exist
from llmtop.profiler.memory.result import Prediction, Suggestion

Predict = Callable[[RunSpec], Prediction]
Change = dict[str, Any]
SMALLEST_GAIN = 0.01
"""A change that lowers the peak by less is not worth a line."""
MOST = 6


def suggestions(spec: RunSpec, prediction: Prediction, predict: Predict) -> tuple[Suggestion, ...]:
    """Changes that lower the peak of a run that does not fit, or that use the room of one that does."""
    if prediction.fits is None:
        return ()
    if prediction.fits:
        return tuple(_fastest_first(_using_room(spec, prediction, predict), prediction))[:MOST]
    return _making_it_fit(spec, prediction, predict)


def apply(spec: RunSpec, change: Change) -> RunSpec:
    """The spec with some options changed; raw DeepSpeed keys are merged into `zero_optimization`."""
    change = dict(change)
    bucket = change.pop("deepspeed.zero_optimization.reduce_bucket_size", None)
    if bucket is not None:
        zero = dict(spec.options.deepspeed.get("zero_optimization") or {})
        zero["reduce_bucket_size"] = bucket
        change["deepspeed"] = {**spec.options.deepspeed, "zero_optimization": zero}
    return replace(spec, options=replace(spec.options, **change))


def _allowed(spec: RunSpec, change: Change) -> RunSpec | None:
    changed = apply(spec, change)
    works = targets_exist(changed) and not refusals(changed) and not is_too_long(changed)
    return changed if works else None


def _saving_changes(spec: RunSpec) -> Iterator[tuple[Change, str]]:
    """Changes that save memory, roughly from free to dear; the words say what each costs."""
    yield from _free_changes(spec)
    yield from _slower_changes(spec)
    yield from _different_changes(spec)


def _free_changes(spec: RunSpec) -> Iterator[tuple[Change, str]]:
    """Same result, hardly any time."""
    options = spec.options
    if options.zero in (1, 2) and not spec.on_cpu:
        yield (
            {"deepspeed.zero_optimization.reduce_bucket_size": 50_000_000},
            "smaller reduce bucket (no cost worth naming)",
        )
    if options.attention == "eager":
        yield {"attention": "sdpa"}, "SDPA attention (faster, same result)"
    if options.precision == "fp32" and not spec.on_cpu:
        half = "bf16" if has_bf16(spec.gpu) else "fp16"
        yield {"precision": half, "attention": "sdpa"}, f"{half} with SDPA attention (several times faster)"
    if not options.liger:
        yield {"liger": True}, "Liger kernels (same result; what they gain in speed is not predicted)"
    if spec.world_size > 1 and options.zero < 3:
        for stage in range(options.zero + 1, 4):
            cost = "more traffic between GPUs" if stage == 3 else "no cost worth naming"
            yield {"zero": stage}, f"ZeRO-{stage} ({cost})"


def _slower_changes(spec: RunSpec) -> Iterator[tuple[Change, str]]:
    """Same training, more time or host memory."""
    options = spec.options
    size, accumulate = options.micro_batch, options.grad_accum
    while (half := halved(size, accumulate)) is not None:
        size, accumulate = half
        yield (
            {"micro_batch": size, "grad_accum": accumulate},
            f"micro-batch {size}, accumulated {accumulate} times (less efficient kernels)",
        )
    yield from _recomputing_more(spec)
    if options.optimizer in ("adamw", "adamw_torch") and options.offload_optimizer == "none":
        yield {"optimizer": "adamw_8bit"}, "8-bit AdamW (states in 8 bits; needs bitsandbytes)"
    if spec.on_cpu:
        return  # the CPU is where they are
    if options.offload_optimizer == "none":
        stage = max(options.zero, 2)
        yield (
            {"zero": stage, "offload_optimizer": "cpu", "optimizer": "adamw"},
            f"{_with_stage(options.zero, stage)}optimizer on the CPU (several times slower)",
        )
    if options.offload_param == "none":
        yield (
            {"zero": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "optimizer": "adamw"},
            f"{_with_stage(options.zero, 3)}optimizer and weights on the CPU (slowest)",
        )


def _with_stage(before: int, after: int) -> str:
    return "" if before == after else f"ZeRO-{after} with "


def _recomputing_more(spec: RunSpec) -> Iterator[tuple[Change, str]]:
    """Checkpointing of one layer in four, of one in two, of all: as far as the run is not there yet."""
    options = spec.options
    before = options.checkpointing_every if options.gradient_checkpointing else spec.model.num_layers + 1
    now = _compute(options.checkpointing_every if options.gradient_checkpointing else None)
    for every in (4, 2, 1):
        if every < before:
            change = {"gradient_checkpointing": True, "checkpointing_every": every}
            more = 100 * (_compute(every) / now - 1)
            yield change, f"{_checkpointing(every)} (about {more:.0f}% more compute)"


def _compute(every: int | None) -> float:
    """Of a step, against one without checkpointing: forward, a third of that, runs again for its layers."""
    return 1.0 if every is None else 1 + 1 / (3 * every)


def _checkpointing(every: int) -> str:
    return "gradient checkpointing" if every == 1 else f"gradient checkpointing of one layer in {every}"


def _different_changes(spec: RunSpec) -> Iterator[tuple[Change, str]]:
    """Another training: fewer weights or less context."""
    options = spec.options
    if options.lora_rank == 0:
        yield {"lora_rank": 16}, "LoRA of rank 16 (trains adapters, not the whole model; needs peft)"
        yield (
            {"lora_rank": 16, "quantization": "nf4"},
            "QLoRA: NF4 weights with LoRA of rank 16 (trains adapters on 4-bit weights; needs peft and"
            " bitsandbytes)",
        )
    elif options.quantization == "none":
        yield {"quantization": "nf4"}, "NF4 base weights (QLoRA; needs bitsandbytes)"
    if options.seq_len >= 1024:
        yield (
            {"seq_len": options.seq_len // 2},
            f"{options.seq_len // 2}-token sequences (less context)",
        )


class _Tried(Struct, frozen=True, kw_only=True):
    """One change, alone, and what it would give."""

    suggestion: Suggestion
    same_training: bool
    token_seconds: float
    """Of a step, for each token of it: a change may be of shorter sequences. Infinite where not predicted."""


def _making_it_fit(spec: RunSpec, prediction: Prediction, predict: Predict) -> tuple[Suggestion, ...]:
    """What fits alone, the fastest first and other trainings last; then what fits together; then the rest."""
    tried = list(_alone(spec, prediction, predict))
    together = _together(spec, prediction, predict)
    fitting = sorted(
        (t for t in tried if t.suggestion.fits), key=lambda t: (not t.same_training, t.token_seconds)
    )
    fitting = _largest_alone(fitting, "micro_batch")
    fitting = _largest_alone(fitting, "checkpointing_every")
    rest = [t.suggestion for t in tried if not t.suggestion.fits and not _is_half_way(t.suggestion.change)]
    combined = [] if together is None or any(t.same_training for t in fitting) else [together]
    return tuple([*combined, *(t.suggestion for t in fitting), *rest][:MOST])


def _largest_alone(fitting: list[_Tried], option: str) -> list[_Tried]:
    """Of the values of an option that fit, the largest alone: it costs least."""
    sizes = [size for t in fitting if isinstance(size := t.suggestion.change.get(option), int)]
    largest = max(sizes, default=None)
    return [t for t in fitting if t.suggestion.change.get(option, largest) == largest]


def _is_half_way(change: Change) -> bool:
    """Whether another change does the same further, so that this one is no use where it does not fit."""
    return "micro_batch" in change or change.get("checkpointing_every", 1) > 1


def _alone(spec: RunSpec, prediction: Prediction, predict: Predict) -> Iterator[_Tried]:
    ceiling = prediction.peak_allocated_bytes * (1 - SMALLEST_GAIN)
    kinds = ((_free_changes, True), (_slower_changes, True), (_different_changes, False))
    for changes, same in kinds:
        for change, text in changes(spec):
            changed = _allowed(spec, change)
            if changed is None:
                continue
            alone = predict(changed)
            if alone.peak_allocated_bytes < ceiling:
                rate = alone.tokens_per_second
                yield _Tried(
                    suggestion=_suggestion(change, text, alone),
                    same_training=same,
                    token_seconds=1 / rate if rate else float("inf"),
                )


def _together(spec: RunSpec, prediction: Prediction, predict: Predict) -> Suggestion | None:
    """Changes piled up, from free to dear, until the run fits; None when it never does."""
    stacked: Change = {}
    words: list[tuple[frozenset[str], str]] = []
    best = prediction.peak_allocated_bytes
    for change, text in _saving_changes(spec):
        combined = _allowed(spec, {**stacked, **change})
        if combined is None:
            continue
        so_far = predict(combined)
        if so_far.peak_allocated_bytes >= best * (1 - SMALLEST_GAIN):
            continue
        stacked, best = {**stacked, **change}, so_far.peak_allocated_bytes
        # A later change that sets the same options replaces the earlier one, in words too.
        words = [(keys, said) for keys, said in words if not keys <= change.keys()]
        words.append((frozenset(change), text.split(" (")[0]))
        if so_far.fits:
            said = " + ".join(text for _, text in words)
            return None if len(words) == 1 else _suggestion(stacked, said, so_far)
    return None


def _fastest_first(found: Iterator[Suggestion], now: Prediction) -> list[Suggestion]:
    """By what they gain; those that gain nothing are no use. Where no speed is predicted, as they came."""
    rate = now.tokens_per_second or 0.0
    gaining = [
        s for s in found if s.tokens_per_second is None or s.tokens_per_second > rate * (1 + SMALLEST_GAIN)
    ]
    return sorted(gaining, key=lambda suggestion: -(suggestion.tokens_per_second or 0.0))


def _using_room(spec: RunSpec, prediction: Prediction, predict: Predict) -> Iterator[Suggestion]:
    options = spec.options
    if prediction.device_memory_bytes is None or spec.on_cpu:
        return
    if options.offload_param != "none" or options.offload_optimizer != "none":
        change: Change = {"offload_param": "none", "offload_optimizer": "none"}
        yield from _if_fits(spec, change, "no offload (several times faster)", predict)
    elif options.zero == 3:
        yield from _if_fits(spec, {"zero": 2}, "ZeRO-2 (less traffic between GPUs)", predict)
    if options.quantization != "none":
        packed: Change = {"quantization": "none"}
        yield from _if_fits(spec, packed, "weights that are not packed (no unpacking in each pass)", predict)
    if options.gradient_checkpointing:
        yield from _recomputing_less(spec, predict)
    larger: Suggestion | None = None
    size = options.micro_batch * 2
    while size <= 1024:
        found = list(_if_fits(spec, {"micro_batch": size}, f"micro-batch {size} fits", predict))
        if not found:
            break
        larger, size = found[0], size * 2
    if larger is not None:
        yield larger


def _recomputing_less(spec: RunSpec, predict: Predict) -> Iterator[Suggestion]:
    """No checkpointing where that fits; else that of the fewest layers."""
    before = spec.options.checkpointing_every
    none: Change = {"gradient_checkpointing": False, "checkpointing_every": 1}
    changes: list[tuple[Change, int | None, str]] = [(none, None, "no checkpointing")]
    changes += [
        ({"checkpointing_every": every}, every, _checkpointing(every)) for every in (4, 2) if every > before
    ]
    for change, every, text in changes:
        less = 100 * (1 - _compute(every) / _compute(before))
        found = list(_if_fits(spec, change, f"{text} (about {less:.0f}% less compute)", predict))
        if found:
            yield found[0]
            return


def _if_fits(spec: RunSpec, change: Change, text: str, predict: Predict) -> Iterator[Suggestion]:
    changed = _allowed(spec, change)
    if changed is None:
        return
    prediction = predict(changed)
    if prediction.fits:
        yield _suggestion(change, text, prediction)


def _suggestion(change: Change, text: str, prediction: Prediction) -> Suggestion:
    to_host = "cpu" in (change.get("offload_optimizer"), change.get("offload_param"))
    return Suggestion(
        change=change,
        text=text,
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        fits=prediction.fits,
        tokens_per_second=prediction.tokens_per_second,
        needed_bytes=prediction.needed_bytes,
        host_bytes=prediction.host_bytes if to_host else None,
    )
