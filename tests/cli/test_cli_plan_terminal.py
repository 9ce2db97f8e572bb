"""`plan` as it stands on a terminal after it has scrolled by, and what speaks against its verdict."""

from __future__ import annotations

import pytest

from llmtop.presets.errors import ExitCode
from tests.cli.conftest import Llmtop

WORDS = ("plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8", "--zero", "3")


def test_a_terminal_ends_with_the_verdict_and_the_peak(
    llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = llmtop(*WORDS)
    assert plan.code == ExitCode.DONE and plan.out.count("verdict: ") == 1
    (verdict,) = (line for line in plan.out.splitlines() if line.startswith("verdict: "))
    (peak,) = (line for line in plan.out.splitlines() if "peak allocated" in line)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    seen = llmtop(*WORDS).out
    assert all(len(line) <= 80 for line in seen.splitlines())
    last = " ".join(seen.split("\n\n")[-1].split())
    assert last == f"{verdict}; peak {' '.join(peak.split()[2:])}"
    assert "verdict" not in llmtop(*WORDS, "--json").out.splitlines()[-1]


def test_what_speaks_against_a_verdict_stands_beside_it(llmtop: Llmtop) -> None:
    """More was to be reserved than the GPU has, "which the allocator gives back": its pieces it cannot."""
    offload = ("--zero", "3", "--offload-optimizer", "cpu", "--offload-param", "cpu")
    more = (
        "--liger",
        "--gradient-checkpointing",
        "--micro-batch",
        "8",
        "--seq-len",
        "2500",
        "--precision",
        "bf16",
    )
    words = ("plan", "--model", "llama-3.1-70b", "--gpu", "a100-40gb", *offload, *more)
    plan = llmtop(*words, "--json").json()
    assert plan["fits"] and plan["peak_reserved_bytes"][0] > plan["device_memory_bytes"]
    sections = [" ".join(section.split()) for section in llmtop(*words).out.split("\n\n")]
    verdict = next(section for section in sections if section.startswith("verdict: fits"))
    assert "may lie in pieces: simulated, the allocator asks for" in verdict
    assert "before memory runs out" not in verdict
    assert sum("in pieces" in section for section in sections) == 1
