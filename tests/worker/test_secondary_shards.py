"""ZeRO++'s second shards as DeepSpeed really holds them, and as the prediction counts them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.worker.launching import make_run, start_ranks, tiny_spec, wait_for_ranks
from tests.worker.zero3_ranks import LAYERS, VOCAB, WIDTH

pytestmark = pytest.mark.slow
GROUP = 2


def test_second_shards_of_trained_weights_go_with_the_step_and_those_of_frozen_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", tiny_spec(gpus=GROUP))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "-m", "tests.worker.secondary_ranks", str(tmp_path), str(GROUP)]
    assert wait_for_ranks(start_ranks(run, command)) == [0] * GROUP, run.log_path(0).read_text()[-3000:]
    trained = ((LAYERS + 1) * WIDTH * WIDTH + 2 * WIDTH) // GROUP
    frozen = VOCAB * WIDTH // GROUP
    for rank in range(GROUP):
        seen = json.loads((tmp_path / f"second{rank}.json").read_text())
        assert seen[0] == ["init", trained, frozen]
        for moment, of_trained, of_frozen in seen[1:]:
            assert of_frozen == frozen
            # While a weight is still gathered after forward, its second shard is not made yet.
            least = {"forward": trained - WIDTH * WIDTH, "backward": trained, "step": 0}[moment]
            assert least <= of_trained <= (0 if moment == "step" else trained), moment
