"""`plan` as it stands on a terminal after it has scrolled by."""

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
