"""The app in a terminal, with no run and no GPU."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import LIMIT_SECONDS, LLMTOP, environment
from tests.e2e.terminal import Terminal


def test_llmtop_alone_opens_on_the_runs_and_leaves_at_q(tmp_path: Path) -> None:
    with Terminal([LLMTOP], environment(tmp_path)) as terminal:
        terminal.wait_for("No run")
        terminal.type("q")
        assert terminal.process.wait(LIMIT_SECONDS) == 0
