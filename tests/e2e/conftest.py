"""Real runs, as few as there can be: each is started once and shared by the tests that look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from llmtop.profiler.record.rundir import RunDir, list_runs
from tests.trust.guard import guarded_environment

LLMTOP = str(Path(sys.executable).parent / "llmtop")
LIMIT_SECONDS = 280.0


class Demo(NamedTuple):
    """`llmtop demo --headless`, from its first line to its last."""

    done: subprocess.CompletedProcess[str]
    run: RunDir
    env: Mapping[str, str]

    def llmtop(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another command that sees the demo's run."""
        return subprocess.run(
            [LLMTOP, *words], env=self.env, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )


def environment(folder: Path) -> dict[str, str]:
    """Of a person with no runs and no presets."""
    return {**os.environ, "LLMTOP_RUNS_DIR": str(folder / "runs"), "XDG_CONFIG_HOME": str(folder / "config")}


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    # Its caches as well: it may find nothing that an earlier run has brought from elsewhere.
    env = {**guarded_environment(environment(folder), folder), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [LLMTOP, "demo", "--headless", "--steps", "60"],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        cwd=folder,
    )
    (run,) = list_runs(folder / "runs")
    return Demo(done, run, env)
