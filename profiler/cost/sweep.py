"""Many predictions at once: the product of values of some options, each judged, sorted and counted.

What does not depend on the candidate is done once: a base is resolved for each model and GPU, and only the
options change from one candidate to the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from llmtop.presets import option_values, resolve
from llmtop.presets.errors import LlmtopError, UsageError, nearest
from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunSpec
from llmtop.presets.zero import zero_settings
from llmtop.profiler.memory import flatlimit
from llmtop.profiler.memory.predict import Brief, predict_brief

MOST_CANDIDATES = 500_000
"""About a minute's work."""
BASE_KEYS = ("model", "gpu")
"""Options that bring a file of their own, and defaults that follow from it."""
_COUNTED = ("zero",)
"""Options whose `a..b` counts; those of other numbers doubles."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\+(\d+))?")
_SHORT = {
    "micro_batch": "micro",
    "gradient_checkpointing": "recompute",
    "offload_optimizer": "opt on",
    "offload_param": "params on",
    "grad_accum": "accum",
    "attention": "attention",
    "seq_len": "seq",
    "checkpointing_every": "every",
}
"""Heads of columns, where an option's own name is long, in tables and as they may be typed."""
_LONG = {head: key for key, head in _SHORT.items()}
_LIKE_A_RANGE = re.compile(r"(\d+)\s*(?:-|:|\.|\.\.\.|…|to)\s*(\d+)")
_EXAMPLE = "for example micro_batch=1..64,zero=0..3,attention=eager|sdpa"

Change = dict[str, Any]


def head_of(key: str) -> str:
    """An option or a raw key as tables name it, in few letters."""
    return _SHORT.get(key, key.rpartition(".")[2])


class Axis(Struct, frozen=True, kw_only=True):
    """One option and the values that it takes in turn."""

    key: str
    """An option's name, or deepspeed. and a dotted key."""
    values: tuple[Any, ...]


class SweepRow(Struct, frozen=True, kw_only=True):
    """One candidate that can run, as it is predicted."""

    settings: Change
    brief: Brief = field(name="prediction")


class Refused(Struct, frozen=True, kw_only=True):
    """Candidates that cannot run, for one reason."""

    reason: str
    why: str
    count: int


class Sweep(Struct, frozen=True, kw_only=True):
    axes: tuple[Axis, ...]
    candidates: int
    rows: tuple[SweepRow, ...] = field(default_factory=tuple)
    """The fastest that fits first; what does not fit is last, of that the nearest to fitting first."""
    refused: tuple[Refused, ...] = ()
    """The most frequent first."""

    @property
    def fitting(self) -> int:
        return sum(row.brief.fits is True for row in self.rows)


def parse_axes(text: str) -> tuple[Axis, ...]:
    """`micro_batch=1..64,zero=0..3,attention=eager|sdpa`; raises UsageError that says what is wrong."""
    parts: list[str] = []
    for part in text.split(","):
        # A value may hold commas itself: lora_targets=attention|q_proj,v_proj.
        if "=" in part or not parts:
            parts.append(part)
        else:
            parts[-1] += f",{part}"
    axes = tuple(_axis(part) for part in parts)
    keys = [axis.key for axis in axes]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise UsageError(
            f"--sweep {text[:200]}: {twice} is there twice", fix=f"join its values by |: {_EXAMPLE}"
        )
    size = prod(len(axis.values) for axis in axes)
    if size > MOST_CANDIDATES:
        raise UsageError(
            f"--sweep {text[:200]}: {size:,} candidates",
            why=f"more than {MOST_CANDIDATES:,} take minutes and tell nobody anything",
            fix="fewer values, or fewer options",
        )
    return axes


def _axis(part: str) -> Axis:
    where = f"--sweep {part[:200]}"
    key, equals, given = (word.strip() for word in part.partition("="))
    if not equals or not key or not given:
        raise UsageError(f"{where}: not of the form OPTION=VALUES", fix=_EXAMPLE)
    name = key if key.startswith("deepspeed.") else _LONG.get(key, key.replace("-", "_"))
    values = [value for word in given.split("|") for value in _values(name, word.strip(), where)]
    return Axis(key=name, values=tuple(value for i, value in enumerate(values) if value not in values[:i]))


def _values(key: str, word: str, where: str) -> Iterator[Any]:
    if key.startswith("deepspeed."):
        resolve.parse_set(f"{key}={word}")  # says what is wrong with a key
        yield option_values.raw_value(word)
        return
    if key not in option_values.field_types():
        guess = nearest(key, [*option_values.field_types(), *_LONG])
        raise UsageError(
            f"{where}: unknown option '{key}'", fix=f"did you mean '{guess}'?" if guess else _EXAMPLE
        )
    found = _RANGE.fullmatch(word)
    meant = _meant(key, word)
    if found is None and meant:
        raise UsageError(
            f"{where}: {word} is no value of {key}",
            why="a..b is a range, and | stands between values",
            fix=f"did you mean '{key}={meant}'?",
        )
    if found is None or type(option_values.parse(key, found[1], where)) is not int:
        yield option_values.parse(key, word, where)
        return
    first, last = int(found[1]), int(found[2])
    if first > last:
        raise UsageError(f"{where}: {word} goes down", fix=f"{key}={last}..{first}")
    step = int(found[3] or 0) or (1 if key in _COUNTED else 0)
    if step and (last - first) // step >= MOST_CANDIDATES:
        raise UsageError(f"{where}: {word} is too many values", fix=f"{key}={first}..{last} doubles")
    for number in range(first, last + 1, step) if step else _doubling(first, last):
        yield option_values.parse(key, str(number), where)


def _meant(key: str, word: str) -> str:
    """A range or several values in another spelling, as a sweep takes them; empty where it is neither."""
    whole = _is_value(key, "1")
    ends = _LIKE_A_RANGE.fullmatch(word)
    if ends is not None and whole and not _is_value(key, word):
        return f"{ends[1]}..{ends[2]}"
    parts = [part.strip() for part in word.split(",")]
    apart = key in BASE_KEYS or not _is_value(key, word)
    return "|".join(parts) if len(parts) > 1 and apart and all(_is_value(key, part) for part in parts) else ""


def _is_value(key: str, word: str) -> bool:
    try:
        option_values.parse(key, word, "")
    except UsageError:
        return False
    return True


def _doubling(first: int, last: int) -> Iterator[int]:
    """The end belongs to it, also where doubling jumps over it."""
    number = first
    while number < last:
        yield number
        number = number * 2 or 1
    yield last


def changed(spec: RunSpec, change: Change) -> RunSpec:
    """The spec with some options changed; raw DeepSpeed keys are merged into those that it has."""
    own = {key: value for key, value in change.items() if "." not in key}
    dotted = {key: value for key, value in change.items() if "." in key}
    if dotted:
        merged = dict(spec.options.deepspeed)
        for key, value in dotted.items():
            nested: Any = value
            for part in reversed(key.split(".")[1:]):
                nested = {part: nested}
            merged = option_values.merge(merged, nested)
        own["deepspeed"] = merged
    spec = replace(spec, options=replace(spec.options, **own))
    if dotted:
        zero_settings(spec.options.zero, spec.options.deepspeed, spec.model.hidden_size)
    return spec


def judge(spec: RunSpec, settings: Change) -> SweepRow | tuple[str, str]:
    """One candidate, or (reason, why) where it is refused. Raises UsageError where it is known to fail."""
    refused = refusals(spec)
    if refused:
        return refused[0].rule, refused[0].why
    flatlimit.check(spec)
    return SweepRow(settings=settings, brief=predict_brief(spec))


def sweep(axes: Sequence[Axis], base_of: Callable[[Change], RunSpec]) -> Sweep:
    """Judge every combination. `base_of` resolves a run with some of `BASE_KEYS` set, unchecked."""
    outer = [axis for axis in axes if axis.key in BASE_KEYS]
    inner = [axis for axis in axes if axis.key not in BASE_KEYS]
    rows: list[SweepRow] = []
    refused: dict[str, tuple[str, int]] = {}
    for own in _combinations(outer):
        base = base_of(own)
        for change in _combinations(inner):
            try:
                judged = judge(changed(base, change), {**own, **change})
            except LlmtopError as error:
                judged = error.what, error.why
            if isinstance(judged, SweepRow):
                rows.append(judged)
            else:
                reason, why = judged
                refused[reason] = (why, refused.get(reason, (why, 0))[1] + 1)
    found = [Refused(reason=reason, why=why, count=count) for reason, (why, count) in refused.items()]
    return Sweep(
        axes=tuple(axes),
        candidates=prod(len(axis.values) for axis in axes),
        rows=tuple(sorted(rows, key=best_first)),
        refused=tuple(sorted(found, key=lambda one: -one.count)),
    )


def _combinations(axes: Sequence[Axis]) -> Iterator[Change]:
    keys = [axis.key for axis in axes]
    for values in product(*(axis.values for axis in axes)):
        yield dict(zip(keys, values, strict=True))


def best_first(row: SweepRow) -> tuple[int, float, int]:
    """Sorts what fits, by speed, before what may, before what does not, the nearest to fitting first.

    Of equals, what needs less comes first.
    """
    brief = row.brief
    need = brief.needed_bytes or brief.peak_allocated_bytes
    if brief.fits is False:
        return 2, float(need - (brief.device_memory_bytes or 0)), need
    return 0 if brief.fits else 1, -(brief.tokens_per_second or 0.0), need
