"""At ZeRO-3 a watched step keeps no more weights gathered than another, and knows what its peaks held."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.worker.launching import make_run, start_ranks, tiny_spec, wait_for_ranks
from tests.worker.zero3_ranks import LAYERS, SAMPLED, WIDTH, WIDTH_BYTES

pytestmark = pytest.mark.slow


def test_a_watched_step_keeps_no_more_weights_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = "fp32"
    run = make_run(tmp_path / "run", tiny_spec(gpus=2))
    # As a module, so that it finds the other test files.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-m", "tests.worker.zero3_ranks", str(tmp_path), precision]
    assert wait_for_ranks(start_ranks(run, command)) == [0, 0], run.log_path(0).read_text()[-3000:]
    for rank in range(2):
        told = json.loads((tmp_path / f"gathered{rank}.json").read_text())
        steps = told["gathered"]
        # DeepSpeed learns the order of the layers in the first step and prefetches by it from then on.
        watched, unwatched = steps[SAMPLED - 1], steps[SAMPLED - 2]
        assert watched == unwatched == steps[SAMPLED]
        layer_bytes = WIDTH * WIDTH * WIDTH_BYTES[precision]
        assert unwatched[1] <= 3 * layer_bytes < LAYERS * layer_bytes
        assert {step for step, *_ in told["peaks"]} >= {1, 2}
        assert set(told["replay_errors"]) == {0}
        for step, phase, unnamed, total in told["peaks"]:
            assert 0 <= unnamed <= 0.01 * total, (step, phase)
