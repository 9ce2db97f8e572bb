"""A state that eight ranks saved goes on at four, to the last bit of every tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.launching import run_module
from tests.worker.state_ranks import SAVED

pytestmark = pytest.mark.slow

SAVES: dict[str, dict[str, Any]] = {"eight_three": {"zero": 3, "world": 8, "precision": "fp32"}}
LOADS: dict[str, dict[str, Any]] = {
    "eight_three_to_four": {"zero": 3, "world": 4, "precision": "fp32", "loads": "eight_three"},
    "eight_three_to_four_one": {"zero": 1, "world": 4, "precision": "fp32", "loads": "eight_three"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    plan = [{"name": name, **case} for name, case in {**SAVES, **LOADS}.items()]
    (folder / "plan.json").write_text(json.dumps(plan))
    run_module("tests.worker.state_ranks", str(folder / "plan.json"), log=folder / "log")
    return folder


def _losses(folder: Path, name: str) -> list[float]:
    losses: list[float] = json.loads((folder / f"{name}-0.json").read_text())["losses"]
    return losses


@pytest.mark.parametrize("name", LOADS)
def test_weights_and_optimizer_state_are_the_same_to_the_last_bit(folder: Path, name: str) -> None:
    was = torch.load(folder / f"{LOADS[name]['loads']}.pt", weights_only=False)
    loaded = torch.load(folder / f"{name}.pt", weights_only=False)
    assert was.keys() == loaded.keys()
    for key, tensors in was.items():
        if key in ("steps", "groups", "schedule", "scale"):
            assert loaded[key] == tensors, key
        elif key != "counts":  # of samples, which another number of ranks rounds
            assert len(tensors) == len(loaded[key]) > 0, key
            pairs = zip(tensors, loaded[key], strict=True)
            assert all(torch.equal(one.view(-1), other.view(-1)) for one, other in pairs), key


@pytest.mark.parametrize("name", LOADS)
def test_the_loss_goes_on(folder: Path, name: str) -> None:
    before = _losses(folder, LOADS[name]["loads"])[SAVED:]
    assert _losses(folder, name) == pytest.approx(before, rel=2e-4)
