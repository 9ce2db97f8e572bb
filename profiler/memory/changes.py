"""Single changes of a run that save memory, with what each costs, and the words of several together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
ALIKE = 0.03
"""Speeds that differ by a smaller share are told as the same."""


class Step(Struct, frozen=True, kw_only=True):
    """One change."""

    change: Change
    words: str
    needs: str = ""
    """Said of it in every company: a package, or that it trains something else."""
    cost: str = ""
    """In words, for a run whose speed is not predicted."""


def apply(spec: RunSpec, change: Change) -> RunSpec:
    """The spec with some options changed; raw DeepSpeed keys are merged into `zero_optimization`."""
    change = dict(change)
    bucket = change.pop("deepspeed.zero_optimization.reduce_bucket_size", None)
    if bucket is not None:
        zero = dict(spec.options.deepspeed.get("zero_optimization") or {})
        zero["reduce_bucket_size"] = bucket
        change["deepspeed"] = {**spec.options.deepspeed, "zero_optimization": zero}
    return replace(spec, options=replace(spec.options, **change))


def allowed(spec: RunSpec, change: Change) -> RunSpec | None:
    """The changed spec; None for one that cannot run."""
    changed = apply(spec, change)
    works = targets_exist(changed) and not refusals(changed) and not is_too_long(changed)
    return changed if works else None


def free_changes(spec: RunSpec) -> Iterator[Step]:
    """Same result, hardly any time."""
    options = spec.options
    if options.zero in (1, 2) and not spec.on_cpu:
        yield Step(
            change={"deepspeed.zero_optimization.reduce_bucket_size": 50_000_000},
            words="smaller reduce bucket",
        )
    if options.attention == "eager":
        yield Step(change={"attention": "sdpa"}, words="SDPA attention", cost="faster, same result")
    if options.precision == "fp32" and not spec.on_cpu:
        half = "bf16" if has_bf16(spec.gpu) else "fp16"
        yield Step(
            change={"precision": half, "attention": "sdpa"},
            words=f"{half} with SDPA attention",
            cost="several times faster",
        )
    if not options.liger:
        yield Step(change={"liger": True}, words="Liger kernels", cost="same result")
    if spec.world_size > 1 and options.zero < 3:
        for stage in range(options.zero + 1, 4):
            cost = "more traffic between GPUs" if stage == 3 else "no cost worth naming"
            yield Step(change={"zero": stage}, words=f"ZeRO-{stage}", cost=cost)


def slower_changes(spec: RunSpec) -> Iterator[Step]:
    """Same training, more time or host memory."""
    options = spec.options
    size, accumulate = options.micro_batch, options.grad_accum
    while (half := halved(size, accumulate)) is not None:
        size, accumulate = half
        yield Step(
            change={"micro_batch": size, "grad_accum": accumulate},
            words=f"micro-batch {size}, accumulated {accumulate} times",
            cost="less efficient kernels",
        )
    yield from _recomputing_more(spec)
    if options.optimizer in ("adamw", "adamw_torch") and options.offload_optimizer == "none":
        yield Step(
            change={"optimizer": "adamw_8bit"},
            words="8-bit AdamW",
            needs="needs bitsandbytes",
            cost="states in 8 bits",
        )
    if not spec.on_cpu:  # the CPU is where they are
        yield from offloads(spec)


def offloads(spec: RunSpec) -> Iterator[Step]:
    """The optimizer, then the weights too, to the host."""
    options = spec.options
    if options.offload_optimizer == "none":
        lowest = max(options.zero, 2)
        for stage in range(lowest, 4 if spec.world_size > 1 else lowest + 1):
            yield Step(
                change={"zero": stage, "offload_optimizer": "cpu", "optimizer": "adamw"},
                words=f"{_with_stage(options.zero, stage)}optimizer on the CPU",
                cost="several times slower",
            )
    if options.offload_param == "none":
        yield Step(
            change={"zero": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "optimizer": "adamw"},
            words=f"{_with_stage(options.zero, 3)}optimizer and weights on the CPU",
            cost="slowest",
        )


def _with_stage(before: int, after: int) -> str:
    return "" if before == after else f"ZeRO-{after} with "


def _recomputing_more(spec: RunSpec) -> Iterator[Step]:
    """Checkpointing of one layer in four, of one in two, of all: as far as the run is not there yet."""
    options = spec.options
    before = options.checkpointing_every if options.gradient_checkpointing else spec.model.num_layers + 1
    now = compute(options.checkpointing_every if options.gradient_checkpointing else None)
    for every in (4, 2, 1):
        if every < before:
            more = 100 * (compute(every) / now - 1)
            yield Step(
                change={"gradient_checkpointing": True, "checkpointing_every": every},
                words=checkpointing(every),
                cost=f"about {more:.0f}% more compute",
            )


def compute(every: int | None) -> float:
    """Of a step, against one without checkpointing: forward, a third of that, runs again for its layers."""
    return 1.0 if every is None else 1 + 1 / (3 * every)


def checkpointing(every: int) -> str:
    return "gradient checkpointing" if every == 1 else f"gradient checkpointing of one layer in {every}"


def different_changes(spec: RunSpec) -> Iterator[Step]:
    """Another training: fewer weights or less context."""
    options = spec.options
    if options.lora_rank == 0:
        yield Step(
            change={"lora_rank": 16},
            words="LoRA of rank 16",
            needs="trains adapters, not the whole model; needs peft",
        )
        yield Step(
            change={"lora_rank": 16, "quantization": "nf4"},
            words="QLoRA: NF4 weights with LoRA of rank 16",
            needs="trains adapters on 4-bit weights; needs peft and bitsandbytes",
        )
    elif options.quantization == "none":
        yield Step(
            change={"quantization": "nf4"}, words="NF4 base weights", needs="QLoRA; needs bitsandbytes"
        )
    if options.seq_len >= 1024:
        yield Step(
            change={"seq_len": options.seq_len // 2},
            words=f"{options.seq_len // 2}-token sequences",
            needs="less context",
        )


def pace(now: Prediction, then: Prediction) -> str:
    """How fast the changed run is, against this one, as predicted; empty where that is not known."""
    before, after = now.tokens_per_second, then.tokens_per_second
    if not before or not after:
        return ""
    if abs(after / before - 1) < ALIKE:
        return "about as fast"
    factor, word = (after / before, "faster") if after > before else (before / after, "slower")
    if factor < 1.05:
        return f"a little {word}"
    return f"{factor:.0f}x {word}" if factor >= 10 else f"{factor:.1f}x {word}"


def suggestion(steps: Sequence[Step], now: Prediction, then: Prediction) -> Suggestion:
    """Some changes as one, against the run as it is."""
    change = {key: value for step in steps for key, value in step.change.items()}
    speed = pace(now, then)
    notes = [step.needs for step in steps if step.needs]
    notes += [speed] if speed else [step.cost for step in steps if step.cost]
    said = f" ({'; '.join(dict.fromkeys(notes))})" if notes else ""
    to_host = "cpu" in (change.get("offload_optimizer"), change.get("offload_param"))
    return Suggestion(
        change=change,
        text=" + ".join(step.words for step in steps) + said,
        peak_allocated_bytes=then.peak_allocated_bytes,
        fits=then.fits,
        tight=then.tight,
        tokens_per_second=then.tokens_per_second,
        needed_bytes=then.needed_bytes,
        host_bytes=then.host_bytes if to_host else None,
    )
