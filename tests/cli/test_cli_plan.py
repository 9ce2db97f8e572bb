"""`plan` and `presets`: the contract of the JSON, and the text that a person reads."""

from __future__ import annotations

from typing import Any

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.memory.result import Component, Moment
from tests.cli.conftest import Llmtop

LLAMA = ("--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8", "--zero", "3")

KEYS = {
    "schema_version",
    "params",
    "trainable_params",
    "fits",
    "peak_allocated_bytes",
    "peak_allocated_upper_bytes",
    "peak_reserved_bytes",
    "peak_device_bytes",
    "host_bytes",
    "pinned_bytes",
    "nvme_bytes",
    "step_seconds",
    "tokens_per_second",
    "moments",
    "peak_moment",
    "suggestions",
    "assumptions",
}
"""What scripts may rely on; more may come."""


@pytest.mark.parametrize("words", [("cpu-demo",), LLAMA, (*LLAMA, "--offload-optimizer", "cpu")])
def test_plan_json_is_one_object_with_every_key(words: tuple[str, ...], llmtop: Llmtop) -> None:
    answer = llmtop("plan", *words, "--json")
    assert answer.code == ExitCode.DONE
    plan: dict[str, Any] = answer.json()
    assert set(plan) >= KEYS
    assert plan["schema_version"] == 1
    byte_keys = [key for key in plan if key.endswith("_bytes") and key != "peak_reserved_bytes"]
    assert all(plan[key] is None or type(plan[key]) is int for key in byte_keys)
    low, high = plan["peak_reserved_bytes"]
    assert plan["peak_allocated_bytes"] <= low <= high
    assert plan["peak_allocated_bytes"] <= plan["peak_allocated_upper_bytes"]


def test_moments_add_up_and_the_peak_is_the_largest(llmtop: Llmtop) -> None:
    plan = llmtop("plan", *LLAMA, "--json").json()
    totals = {moment["name"]: moment["total_bytes"] for moment in plan["moments"]}
    for moment in plan["moments"]:
        assert sum(moment["components"].values()) == moment["total_bytes"]
        assert set(moment["components"]) <= set(Component)
    assert set(totals) <= set(Moment)
    assert totals[plan["peak_moment"]] == max(totals.values()) == plan["peak_allocated_bytes"]


def test_plan_text_shows_verdict_moments_and_sources(llmtop: Llmtop) -> None:
    answer = llmtop("plan", *LLAMA)
    assert answer.code == ExitCode.DONE
    assert "verdict: " in answer.out
    for word in ("parameters", "optimizer_state", "total", "host memory", "taken for granted", "--zero 3"):
        assert word in answer.out
    assert max(map(len, answer.out.splitlines())) <= 130


def test_plan_of_a_run_that_does_not_fit_is_an_answer_and_names_a_way(llmtop: Llmtop) -> None:
    words = ("--model", "llama-3.1-70b", "--gpu", "rtx-4090", "--gpus", "1")
    plan = llmtop("plan", *words, "--json")
    assert plan.code == ExitCode.DONE
    assert plan.json()["fits"] is False
    assert "does not fit" in llmtop("plan", *words).out


def test_run_refuses_what_does_not_fit(llmtop: Llmtop) -> None:
    answer = llmtop("run", "--model", "llama-3.1-70b", "--gpu", "cpu", "--gpus", "1", "--precision", "fp32")
    assert answer.code == ExitCode.DOES_NOT_FIT
    assert "--force" in answer.err
    assert answer.out == ""
    assert llmtop("ls", "--json").json()["runs"] == []


@pytest.mark.parametrize(
    ("kind", "known"), [("models", "llama-3.1-8b"), ("gpus", "h200"), ("recipes", "cpu-demo")]
)
def test_presets_say_which_file_each_comes_from(kind: str, known: str, llmtop: Llmtop) -> None:
    listed = llmtop("presets", kind, "--json").json()["presets"]
    assert {line["kind"] for line in listed} == {kind}
    line = next(line for line in listed if line["name"] == known)
    assert line["file"].endswith(f"{known}.toml")
    assert known in llmtop("presets").out


@pytest.mark.parametrize(
    ("kind", "name", "key"),
    [
        ("models", "llama-3.1-8b", "num_layers"),
        ("gpus", "h200", "memory_bytes"),
        ("recipes", "cpu-demo", "zero"),
    ],
)
def test_a_preset_shows_its_values_and_sources(kind: str, name: str, key: str, llmtop: Llmtop) -> None:
    detail = llmtop("presets", kind, name, "--json").json()
    assert detail["values"][key] is not None
    assert detail["sources"][key]
    assert key in llmtop("presets", kind, name).out


def test_presets_of_an_unknown_kind(llmtop: Llmtop) -> None:
    answer = llmtop("presets", "model")
    assert answer.code == ExitCode.USAGE
    assert "did you mean 'models'?" in answer.err
