"""Any configuration at all: never a traceback, and never a configuration that DeepSpeed then refuses."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunOptions
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.dsimport.hints import spellings
from llmtop.trainer.dsimport.keys import BLOCKS, Key
from llmtop.trainer.dsimport.problem import Findings
from llmtop.trainer.dsimport.read import import_config, translate
from tests.recorded_spec import recorded_spec
from tests.trainer.real_deepspeed import refusal_of

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        ["auto", "cpu", "nvme", "AdamW", "WarmupLR", "bf16", "5e8", "true", 0, 1, 2, 3, 1e9, -1]
    )
)
NAMES = st.sampled_from(sorted({name for path in BLOCKS for name in spellings(path)})) | st.text(max_size=5)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=25,
)


def plausible(key: Key) -> st.SearchStrategy[Any]:
    """Values that somebody might write for the key, mostly good ones."""
    good: dict[str, list[Any]] = {
        "flag": [True, False, "true", 1],
        "whole": [0, 1, 2, 3, 8, 1e6, 5e8, "16"],
        "number": [0, 0.5, 1.0, 2e-5, "1.0"],
        "text": ["AdamW", "Adam", "WarmupLR", "WarmupDecayLR", "name"],
        "texts": [["a.b.C"], "a.b.C", []],
        "choice": [*key.choices, *[choice.upper() for choice in key.choices]],
        "path": ["/drive"],
        "anything": [1, True],
        "block": [{}],
    }
    return st.sampled_from([*good[key.kind], "auto", "auto", *([None] if key.nullable else [])])


@st.composite
def block(draw: st.DrawFn, path: str) -> dict[str, Any]:
    keys = BLOCKS[path].keys
    names = draw(st.lists(st.sampled_from(sorted(spellings(path))), max_size=6, unique=True))
    result: dict[str, Any] = {}
    for name in names:
        full = f"{path}.{name}" if path else name
        key = keys.get(name) or keys[name.removeprefix("stage3_")]
        table = "bf16" if full == "bfloat16" else full
        if key.kind == "block" and table in BLOCKS and draw(st.integers(0, 9)):
            result[name] = draw(block(table))
        else:
            result[name] = draw(plausible(key))
    return result


@st.composite
def configuration(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration of known keys; ZeRO, precision and optimizer are there more often than the rest."""
    config = draw(block(""))
    for name in ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler"):
        if draw(st.booleans()):
            config[name] = draw(block(name))
    if isinstance(config.get("zero_optimization"), dict) and draw(st.integers(0, 3)):
        config["zero_optimization"]["stage"] = draw(st.integers(0, 3))
    if isinstance(config.get("optimizer"), dict):
        config["optimizer"]["params"] = draw(
            st.dictionaries(
                st.sampled_from(["lr", "betas", "eps", "weight_decay", "torch_adam", "foreach", "x"]),
                st.sampled_from([1e-4, [0.9, 0.95], "auto", True]),
                max_size=3,
            )
        )
    return config


@given(ANYTHING)
@settings(max_examples=150, deadline=None)
def test_any_json_gives_an_answer_or_a_named_error(value: Any) -> None:
    descriptor, name = tempfile.mkstemp(suffix=".json")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file)
    try:
        imported = import_config(Path(name))
    except LlmtopError:
        return
    finally:
        Path(name).unlink()
    msgspec.json.encode(imported.values)
    assert all(problem.key and problem.what for problem in imported.problems)


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_an_answer_or_a_named_error(content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(suffix=".json")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    try:
        import_config(Path(name))
    except LlmtopError:
        pass
    finally:
        Path(name).unlink()


@given(configuration())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_let_through_runs_on_deepspeed(config: dict[str, Any]) -> None:
    findings = Findings()
    values = translate(copy.deepcopy(config), findings, world_size=1)
    fatal = [problem for problem in findings.problems if problem.fatal]
    if fatal:
        return
    msgspec.convert({"model": "m", **values}, RunOptions)
    spec = recorded_spec("cuda", ranks=1, **{k: v for k, v in values.items() if k not in ("gpus", "nodes")})
    try:
        generated = deepspeed_config(spec)
    except LlmtopError as error:
        # What the file leaves open may be settled in a way that does not go with the rest of it.
        if {"zero", "precision"} <= set(values):
            raise AssertionError(f"import let through what launch refuses: {error}") from error
        return
    assert "auto" not in str(generated.get("zero_optimization", {}).get("reduce_bucket_size"))
    generated.get("aio", {}).pop("use_gds", None)  # refused where there is no GPU, as on this test's machine
    assert refusal_of(generated) is None


@given(configuration())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_deepspeed_refuses_is_never_passed_over_in_silence(config: dict[str, Any]) -> None:
    findings = Findings()
    translate(copy.deepcopy(config), findings, world_size=1)
    refusal = refusal_of(copy.deepcopy(config))
    if refusal is not None:
        assert findings.problems, refusal
