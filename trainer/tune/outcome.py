"""What a search found: the recipe, the DeepSpeed configuration, and why it won."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from llmtop.presets.spec import RunOptions, RunSpec
from llmtop.profiler.cost.sweep import changed
from llmtop.profiler.units import format_seconds
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.tune.journal import Line, TuneDir
from llmtop.trainer.tune.pool import apart, fastest, pooled
from llmtop.trainer.tune.space import key_of

RECIPE = "best.toml"
DEEPSPEED = "best.deepspeed.json"


class Found(Struct, frozen=True, kw_only=True):
    """The answer of `tune --json`."""

    schema_version: int = 1
    tune: str
    folder: str
    stopped: str
    best: Line | None
    start: Line | None
    """The starting setting as measured; None where it does not fit or failed."""
    runner_up: Line | None
    why: tuple[str, ...]
    recipe: str | None
    deepspeed_config: str | None
    lost: int
    """Trials that ran out of memory, failed or timed out."""
    trials: tuple[Line, ...]
    """A line for each setting that was tried."""
    runs: int
    """Trials made, with those that were made again for a surer time."""


def found(tune: TuneDir, spec: RunSpec, start_choice: Mapping[str, Any], stopped: str) -> Found:
    """Writes the recipe and the DeepSpeed JSON of the fastest, and says why it is that one."""
    lines = tune.ended()
    trials = pooled(lines)
    measured = fastest(trials)
    best = measured[0] if measured else None
    runner_up = measured[1] if len(measured) > 1 else None
    start = next((t for t in measured if key_of(t.choice) == key_of(dict(start_choice))), None)
    if best is not None:
        won = changed(spec, best.change)
        tune.write(RECIPE, recipe_text(won, _described(best, start)).encode())
        tune.write(DEEPSPEED, (json.dumps(deepspeed_config(won), indent=2) + "\n").encode())
    return Found(
        tune=tune.tune_id,
        folder=str(tune.path),
        stopped=stopped,
        best=best,
        start=start,
        runner_up=runner_up,
        why=tuple(_why(best, start, runner_up, len(trials))) if best is not None else (),
        recipe=str(tune.path / RECIPE) if best is not None else None,
        deepspeed_config=str(tune.path / DEEPSPEED) if best is not None else None,
        lost=sum(line.step_seconds is None for line in lines),
        trials=tuple(trials),
        runs=len(lines),
    )


def _described(best: Line, start: Line | None) -> str:
    rate = f"{best.tokens_per_second or 0:,.0f} tokens/s measured"
    if start is None or start is best or not start.step_seconds or not best.step_seconds:
        return f"Found by llmtop tune: {rate}"
    return f"Found by llmtop tune: {rate}, {start.step_seconds / best.step_seconds:.2f}x its start"


def _why(best: Line, start: Line | None, runner_up: Line | None, tried: int) -> Iterator[str]:
    runs = f" over {best.runs} runs" if best.runs > 1 else ""
    yield f"{_step(best)} a step{runs}, {best.tokens_per_second or 0:,.0f} tokens/s"
    if start is best and tried == 1:
        yield "only the starting setting was tried, so nothing tells whether another one is faster"
    elif start is best:
        yield "no setting that was tried is faster than the starting one"
    elif start is not None:
        yield f"{_against(best, start)} the starting setting ({_step(start)}): {_differences(start, best)}"
    else:
        yield "the starting setting has no measured time to compare with"
    if runner_up is not None and runner_up is not start:
        second = f"the runner-up ({_step(runner_up)})"
        yield f"{_against(best, runner_up)} {second}: {_differences(runner_up, best)}"


def _step(line: Line) -> str:
    return f"{format_seconds(line.step_seconds)} ± {format_seconds(line.error_seconds)}"


def _against(best: Line, other: Line) -> str:
    words = f"{(other.step_seconds or 0.0) / (best.step_seconds or math.inf):.2f}x as fast as"
    return words if apart(best, other) else f"no faster than the times scatter, {words}"


def _differences(before: Line, after: Line) -> str:
    keys = [key for key, value in after.choice.items() if before.choice.get(key) != value]
    return ", ".join(f"{key} {_word(before.choice.get(key))} -> {_word(after.choice[key])}" for key in keys)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "as given" if value is None else str(value)


def recipe_text(spec: RunSpec, description: str) -> str:
    """A recipe TOML with every option that is not the plain default."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(RunOptions)}
    lines = [f"description = {_toml(description)}", ""]
    tables: list[str] = []
    for key, value in msgspec.structs.asdict(spec.options).items():
        if key == "deepspeed":
            tables = list(_table("deepspeed", value)) if value else []
        elif key not in _LEFT_OUT and value is not None and (value != defaults.get(key) or key in _ALWAYS):
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join([*lines, *tables]) + "\n"


_ALWAYS = ("zero", "precision", "attention", "micro_batch", "grad_accum", "seq_len", "liger")
"""Options that are written also where they are the default: another default would be another setting."""
_LEFT_OUT = ("deepspeed_config",)
"""A file whose keys win over a recipe's, and so over what was found; what it says is in the other options."""


def _table(path: str, values: Mapping[str, Any]) -> Iterator[str]:
    plain = {k: v for k, v in values.items() if not isinstance(v, dict) and v is not None}
    if plain:
        yield ""
        yield f"[{path}]"
    yield from (f"{_toml_key(key)} = {_toml(value)}" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _table(f"{path}.{_toml_key(key)}", value)


def _toml_key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "").isalnum() and key.isascii()
    return key if bare else json.dumps(key)


def _toml(value: Any) -> str:
    """JSON's texts, numbers and switches are TOML's too."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)
