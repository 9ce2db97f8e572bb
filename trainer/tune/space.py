"""The settings that a search chooses from: the combinations of what varies, less what is refused.

The global batch stays what it is: a larger micro-batch has fewer accumulation steps. What is predicted not to
fit is put aside, not forgotten: the reader is told how many there were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from msgspec import Struct

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import Change, Refused, changed, judge
from llmtop.profiler.memory.predict import Brief

CHECKPOINTING = "checkpointing"
"""One knob for two options: `none`, or every how many layers one is recomputed."""
BUCKETS = "buckets"
"""One knob for the two buckets of DeepSpeed's ZeRO, in elements; `None` leaves them as they are."""
EVERY = (1, 2, 4)
BUCKET_SIZES = (None, 50_000_000, 200_000_000, 1_000_000_000)
MOST_CANDIDATES = 200_000

KNOBS = (
    "zero", "offload_optimizer", "offload_param", "micro_batch", CHECKPOINTING, "attention", "liger", BUCKETS
)  # fmt: skip
REDUCE_BUCKET = "deepspeed.zero_optimization.reduce_bucket_size"
GATHER_BUCKET = "deepspeed.zero_optimization.allgather_bucket_size"


class Knob(Struct, frozen=True, kw_only=True):
    """Something that varies, and the values that it takes."""

    key: str
    values: tuple[Any, ...]


class Candidate(Struct, frozen=True, kw_only=True):
    """One setting that can run, with its prediction."""

    choice: dict[str, Any]
    """Knob to value; what a correction of the prediction is learnt for."""
    change: Change
    """Options that it sets."""
    brief: Brief
    cost_seconds: float
    """Predicted seconds of a step; on the CPU, for which none is predicted, only its order counts."""

    @property
    def key(self) -> str:
        return key_of(self.choice)


class Space(Struct, frozen=True, kw_only=True):
    """All settings, told apart by whether they can be tried."""

    knobs: tuple[Knob, ...]
    candidates: tuple[Candidate, ...]
    """The fastest by prediction first."""
    too_large: int
    """Predicted not to fit."""
    refused: tuple[Refused, ...]

    @property
    def size(self) -> int:
        """Combinations that were looked at."""
        return len(self.candidates) + self.too_large + sum(one.count for one in self.refused)


def key_of(choice: dict[str, Any]) -> str:
    """The same for the same setting, in whatever order its knobs are written."""
    return json.dumps(choice, sort_keys=True)


def choice_of(spec: RunSpec, knobs: Sequence[Knob]) -> dict[str, Any]:
    """Where a run stands on each knob."""
    return {knob.key: standing(spec, knob.key) for knob in knobs}


def standing(spec: RunSpec, key: str) -> Any:
    """Where a run stands on one knob."""
    options = spec.options
    if key == CHECKPOINTING:
        return str(options.checkpointing_every) if options.gradient_checkpointing else "none"
    if key == BUCKETS:
        return None
    if "." in key:
        value: Any = options.deepspeed
        for part in key.split(".")[1:]:
            value = value.get(part) if isinstance(value, dict) else None
        return value
    return getattr(options, key)


def per_rank(spec: RunSpec) -> int:
    """Sequences of one rank in one step."""
    return spec.options.micro_batch * spec.options.grad_accum


def divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def usual_values(spec: RunSpec) -> dict[str, tuple[Any, ...]]:
    """What varies where nobody narrows it."""
    on_gpu = not spec.on_cpu
    attention = ("sdpa", "flash_attention_2", "eager") if on_gpu else ("sdpa", "eager")
    every = tuple(str(k) for k in EVERY if k <= spec.model.num_layers)
    offload = ("none", "cpu") if on_gpu else ("none",)
    stands = spec.options
    return {
        "zero": (0, 1, 2, 3),
        "offload_optimizer": tuple(dict.fromkeys((*offload, stands.offload_optimizer))),
        "offload_param": tuple(dict.fromkeys((*offload, stands.offload_param))),
        "micro_batch": divisors(per_rank(spec)),
        CHECKPOINTING: tuple(dict.fromkeys(("none", *every, standing(spec, CHECKPOINTING)))),
        "attention": tuple(dict.fromkeys((*attention, stands.attention))),
        "liger": (False, True) if on_gpu else (stands.liger,),
        # Between ranks only: alone, a bucket costs memory and moves nothing.
        BUCKETS: BUCKET_SIZES if spec.world_size > 1 and on_gpu else (None,),
    }


def change_of(spec: RunSpec, choice: dict[str, Any]) -> Change:
    """The options that a choice sets."""
    change: Change = {}
    for key, value in choice.items():
        if key == "micro_batch":
            change |= {"micro_batch": value, "grad_accum": per_rank(spec) // value}
        elif key == CHECKPOINTING:
            on = value != "none"
            change |= {"gradient_checkpointing": on, "checkpointing_every": int(value) if on else 1}
        elif key == BUCKETS:
            change |= {} if value is None else {REDUCE_BUCKET: value, GATHER_BUCKET: value}
        else:
            change[key] = value
    return change


def _cost_seconds(spec: RunSpec, brief: Brief) -> float:
    """Predicted seconds of a step. On the CPU: what grows the arithmetic, and a price for every pass."""
    if brief.step_seconds is not None:
        return brief.step_seconds
    options = spec.options
    again = 1 / options.checkpointing_every if options.gradient_checkpointing else 0.0
    passes = options.grad_accum / per_rank(spec)
    stage = {0: 0.0, 1: 0.02, 2: 0.03, 3: 0.2}[options.zero]
    return (1 + again / 3) * (1 + 0.3 * passes) + stage + (0.1 if options.attention == "eager" else 0.0)


def space_of(
    spec: RunSpec,
    knobs: Sequence[Knob],
    *,
    host_memory_bytes: int | None = None,
    lacks: Callable[[RunSpec], str] = lambda spec: "",
) -> Space:
    """Judge every combination. `lacks` says what this machine has not got for a run; empty for nothing."""
    size = 1
    for knob in knobs:
        size *= len(knob.values)
    if size > MOST_CANDIDATES:
        raise UsageError(
            f"{size:,} combinations to search", why=f"more than {MOST_CANDIDATES:,}", fix="--fix some options"
        )
    found: list[Candidate] = []
    too_large, refused = 0, dict[str, tuple[str, int]]()
    for choice in _choices(knobs):
        judged = _judge(spec, choice, lacks)
        if isinstance(judged, tuple):
            reason, why = judged
            refused[reason] = (why, refused.get(reason, (why, 0))[1] + 1)
        elif fits(judged, host_memory_bytes):
            found.append(judged)
        else:
            too_large += 1
    reasons = [Refused(reason=r, why=why, count=count) for r, (why, count) in refused.items()]
    return Space(
        knobs=tuple(knobs),
        candidates=tuple(sorted(found, key=lambda one: (one.cost_seconds, one.brief.needed_bytes or 0))),
        too_large=too_large,
        refused=tuple(sorted(reasons, key=lambda one: -one.count)),
    )


def fits(candidate: Candidate, host_memory_bytes: int | None) -> bool:
    """Whether nothing that is known says that it does not."""
    host_is_full = host_memory_bytes is not None and candidate.brief.host_bytes > host_memory_bytes
    return candidate.brief.fits is not False and not host_is_full


def _choices(knobs: Sequence[Knob]) -> Iterator[dict[str, Any]]:
    for values in product(*(knob.values for knob in knobs)):
        choice = dict(zip((knob.key for knob in knobs), values, strict=True))
        # Buckets are of stages 1 to 3: below them each size would be the same setting again.
        if choice.get("zero") == 0 and choice.get(BUCKETS) is not None:
            continue
        yield choice


def _judge(
    spec: RunSpec, choice: dict[str, Any], lacks: Callable[[RunSpec], str]
) -> Candidate | tuple[str, str]:
    change = change_of(spec, choice)
    try:
        run = changed(spec, change)
        judged = judge(run, change)
        if isinstance(judged, tuple):
            return judged
        missing = lacks(run)
        if missing:
            return missing, ""
    except LlmtopError as error:
        return error.what, error.why
    return Candidate(
        choice=choice, change=change, brief=judged.brief, cost_seconds=_cost_seconds(run, judged.brief)
    )
