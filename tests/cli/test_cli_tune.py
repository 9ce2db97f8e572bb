"""`llmtop tune` as a command, as far as it starts no training."""

from __future__ import annotations

import pytest

from llmtop.presets.errors import ExitCode
from tests.cli.conftest import Llmtop


def test_a_dry_run_ranks_and_starts_nothing(llmtop: Llmtop) -> None:
    words = ("tune", "--model", "qwen2.5-0.5b", "--gpu", "h200", "--grad-accum", "4", "--dry-run")
    text = llmtop(*words).out
    assert "the fastest by prediction" in text and "predicted not to fit" in text
    space = llmtop(*words, "--fix", "zero=1", "--allow", "attention=sdpa", "--json").json()
    assert {c["choice"]["zero"] for c in space["candidates"]} == {1}


def test_the_edges_by_prediction(llmtop: Llmtop) -> None:
    for question in ("--max-batch", "--max-length"):
        model = ("--model", "llama-3.2-1b", "--gpu", "h200", "--gradient-checkpointing")
        edge = llmtop("tune", *model, question, "--dry-run", "--json").json()
        assert edge["largest"] == edge["predicted"] > 1 and edge["source"] == "predicted"
    on_cpu = llmtop("tune", "cpu-demo", "--max-batch")
    assert on_cpu.code == ExitCode.DONE and "predicted only: on the CPU" in " ".join(on_cpu.out.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("tune", "cpu-demo", "--fix", "zerro"), "did you mean 'zero'?"),
        (("tune", "--resume", "nothing"), "there is no search 'nothing'"),
        (("tune", "cpu-demo", "--resume", "x"), "--resume takes no recipe"),
        (
            (
                "tune",
                "--model",
                "llama-3.1-70b",
                "--gpu",
                "t4",
                "--fix",
                "zero",
                "--fix",
                "offload_optimizer",
            ),
            "t",
        ),
    ],
)
def test_mistakes_are_told(words: tuple[str, ...], told: str, llmtop: Llmtop) -> None:
    answer = llmtop(*words)
    assert answer.code == ExitCode.USAGE and told in answer.err
