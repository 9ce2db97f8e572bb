"""Presets and runs of their own for the tests of the app."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tui.tuiruns import LiveRun

RECIPE = """
description = "8B for the tests"
model = "llama-3.1-8b"
gpu = "h200"
gpus = 2
zero = 2
micro_batch = 4
"""


@pytest.fixture(autouse=True)
def own_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that no change of the built-in ones touches."""
    folder = tmp_path / "config" / "llmtop" / "presets" / "recipes"
    folder.mkdir(parents=True)
    (folder / "test-8b.toml").write_text(RECIPE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the runs of a test lie."""
    return tmp_path / "runs"


@pytest.fixture
def live(root: Path) -> Iterator[LiveRun]:
    """A CPU run of two ranks that has finished 20 of 60 steps and goes on."""
    run = LiveRun(root)
    run.start()
    run.steps(1, 20)
    yield run
    run.close()
