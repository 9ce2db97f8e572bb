"""What a person wants varied, in words: `--fix KEY[=VALUE]` and `--allow KEY=V,V`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmtop.presets import option_values, resolve
from llmtop.presets.errors import UsageError, nearest
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import changed
from llmtop.profiler.effects.switches import WITHOUT_EFFECT
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.tune.space import (
    BUCKETS,
    CHECKPOINTING,
    GATHER_BUCKET,
    KNOBS,
    REDUCE_BUCKET,
    Knob,
    divisors,
    per_rank,
    standing,
    usual_values,
)

_ALIASES = {
    "gradient_checkpointing": CHECKPOINTING,
    "checkpointing_every": CHECKPOINTING,
    "grad_accum": "micro_batch",
    "reduce_bucket_size": BUCKETS,
    "allgather_bucket_size": BUCKETS,
    REDUCE_BUCKET: BUCKETS,
    GATHER_BUCKET: BUCKETS,
}
_COMPARED_BY = ("model", "gpu", "gpus", "nodes", "seq_len", "steps")
"""Options that make a trial comparable with the others."""
_NOT_VARIED = ("total_gpus", "inter_node_gbps", "deepspeed_config")
"""The same, for what may be fixed."""
_TIMELESS = WITHOUT_EFFECT - {*_COMPARED_BY, *_NOT_VARIED} | {"max_grad_norm", "heal"}
"""Options that no trial's time tells anything of: it is the same, or a trial leaves it out. One that varied
would be chosen by the scatter of times."""
_EXAMPLE = "for example --fix zero=2 --allow attention=sdpa,eager"


def knobs_of(
    spec: RunSpec, fix: Sequence[str], allow: Sequence[str], *, anew: bool = True
) -> tuple[Knob, ...]:
    """What varies around a run; raises UsageError for words that make no sense.

    `anew`: refuse as well to vary what tells nothing; a search that was begun with it may go on.
    """
    values = usual_values(spec)
    said: dict[str, str] = {}
    for text in allow:
        where = f"--allow {text}"
        key, given = _split(text, where, spec)
        if anew and key in (*_NOT_VARIED, *_TIMELESS):
            raise _same(where, key)
        _once(said, key, where)
        if given is None:
            raise UsageError(f"{where}: no values", fix=_EXAMPLE)
        values[key] = tuple(_value(key, word, where, spec) for word in given.split(","))
    for text in fix:
        where = f"--fix {text}"
        key, given = _split(text, where, spec)
        _once(said, key, where)
        values[key] = (_kept(key, where, spec) if given is None else _value(key, given, where, spec),)
    for size in values["micro_batch"]:
        if per_rank(spec) % size:
            raise UsageError(
                f"micro_batch = {size} does not divide the {per_rank(spec)} sequences of a rank's step",
                why="the global batch stays as it is (micro_batch x grad_accum x ranks)",
                fix=f"use some of {', '.join(map(str, divisors(per_rank(spec))))}, or another --grad-accum",
            )
    return tuple(Knob(key=key, values=tuple(dict.fromkeys(some))) for key, some in values.items())


def _kept(key: str, where: str, spec: RunSpec) -> Any:
    """What an option is now."""
    value = standing(spec, key)
    if value is None and key.startswith("deepspeed."):
        raise UsageError(f"{where}: the run sets no {key}", fix=f"give a value: --fix {key}=VALUE")
    return value


def _once(said: dict[str, str], key: str, where: str) -> None:
    if key in said:
        raise UsageError(
            f"{where}: {key} is told already by {said[key]}",
            fix=f"keep one of them; several values are one --allow {key}=V,V",
        )
    said[key] = where


def _split(text: str, where: str, spec: RunSpec) -> tuple[str, str | None]:
    name, equals, given = (word.strip() for word in text.partition("="))
    key = name if name.startswith("deepspeed.") else name.replace("-", "_")
    if key == "grad_accum":
        accum = [int(word) for word in given.split(",") if word.isdecimal() and int(word)]
        sizes = [str(per_rank(spec) // one) for one in accum if per_rank(spec) % one == 0]
        if equals and (not sizes or len(sizes) < len(given.split(","))):
            raise UsageError(
                f"{where}: does not divide the {per_rank(spec)} sequences of a rank's step",
                fix=f"use some of {', '.join(map(str, divisors(per_rank(spec))))}",
            )
        given = ",".join(sizes)
    key = _ALIASES.get(key, key)
    known = {*KNOBS, *option_values.field_types()}
    if key.startswith("deepspeed."):
        resolve.parse_set(f"{key}=0", where)
    elif key not in known:
        guess = nearest(key, known)
        raise UsageError(
            f"{where}: unknown option '{key}'", fix=f"did you mean '{guess}'?" if guess else _EXAMPLE
        )
    elif key in _COMPARED_BY:
        raise _same(where, key)
    return key, given if equals else None


def _same(where: str, key: str) -> UsageError:
    return UsageError(
        f"{where}: {key} is the same in every trial",
        why="the search is for speed, which does not hang on it" if key in _TIMELESS else "",
        fix=f"give --{key.replace('_', '-')} instead",
    )


def _value(key: str, word: str, where: str, spec: RunSpec) -> Any:
    word = word.strip()
    if key == CHECKPOINTING:
        if word.lower() in ("none", "off", "false", "no", "0"):
            return "none"
        if word.lower() in ("all", "on", "true", "yes"):
            return "1"
        if word.isdecimal() and int(word) <= spec.model.num_layers:
            return str(int(word))
        if word.isdecimal():
            raise UsageError(
                f"{where}: every {word} layers of a model that has {spec.model.num_layers}",
                fix=f"none, all, or a number up to {spec.model.num_layers}",
            )
        raise UsageError(f"{where}: checkpointing takes none, all, or every how many layers", fix=_EXAMPLE)
    if key == BUCKETS:
        size = option_values.raw_value(word)
        if word == "none" or (type(size) is int and size > 0):
            return None if word == "none" else size
        raise UsageError(f"{where}: buckets are a number of elements, as 2e8, or none", fix=_EXAMPLE)
    if key.startswith("deepspeed."):
        return _raw(key, word, where, spec)
    return option_values.parse(key, word, where)


def _raw(key: str, word: str, where: str, spec: RunSpec) -> Any:
    """A value of a raw key, refused as a launch would refuse it."""
    value = option_values.raw_value(word)
    try:
        deepspeed_config(changed(spec, {key: value}))
    except UsageError as error:
        raise UsageError(f"{where}: {error.what}", why=error.why, fix=error.fix) from error
    return value
