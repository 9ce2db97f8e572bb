"""Blocks of steps with and without probes on one engine: each leaves exactly what its arm says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_each_arm_watches_as_much_as_it_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.blocks_ranks", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [found[arm]["steps"] for arm in ("bare", "watched", "classified")] == [0, 5, 5]
    assert found["bare"]["classified"] == found["watched"]["classified"] == []
    assert found["classified"]["classified"] == [25], "of the steps 22 to 26"
    assert all(times["wall"] > 0 and times["cpu"] > 0 for times in found.values())
