"""Saved states on real GPUs: DeepSpeed's fused and host Adam, fp16 and its scale, paged moments, NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtop.trainer.supervisor.rankenv import free_port
from tests.worker.state_ranks import SAVED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    # The first one builds DeepSpeed's ops, which takes minutes.
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs an NVIDIA GPU"),
]

OWN = {"optimizer": "deepspeed"}
FP16 = {"precision": "fp16"}
OFFLOAD = {"offload": True, **OWN}

# ZeRO-3 last: it leaves behind a linear layer that rounds otherwise.
CASES: dict[str, dict[str, Any]] = {
    "fused": {"zero": 0, **OWN},
    "two": {"zero": 2, **OWN},
    "fp16": {"zero": 0, **OWN, **FP16},
    "host": {"zero": 2, **OFFLOAD},
    "plain": {"zero": 0, "precision": "fp32", **OWN},
    "paged": {"zero": 2, "optimizer": "paged8"},
    "fused_to_fused": {"zero": 0, **OWN, "loads": "fused"},
    "fused_to_two": {"zero": 2, **OWN, "loads": "fused"},
    "two_to_host": {"zero": 2, **OFFLOAD, "loads": "two"},
    "host_to_fused": {"zero": 0, **OWN, "loads": "host"},
    "fp16_to_fp16": {"zero": 1, **OWN, **FP16, "loads": "fp16"},
    "two_to_fp16": {"zero": 2, **OWN, **FP16, "loads": "two"},
    "plain_to_plain": {"zero": 0, "precision": "fp32", **OWN, "loads": "plain"},
    "paged_to_paged": {"zero": 2, "optimizer": "paged8", "loads": "paged"},
    "three": {"zero": 3, **OWN},
    "three_host": {"zero": 3, **OFFLOAD, "offload_param": True, "sub_group_size": 900},
    "two_to_three": {"zero": 3, **OWN, "loads": "two"},
    "three_to_three_host": {"zero": 3, **OFFLOAD, "offload_param": True, "loads": "three"},
    "three_host_to_two": {"zero": 2, **OWN, "loads": "three_host"},
    "fp16_to_three": {"zero": 3, **OWN, **FP16, "loads": "fp16"},
    "plain_to_three": {"zero": 3, **OWN, "loads": "plain"},
}
LOADS = [name for name, case in CASES.items() if "loads" in case]
WORLDS = range(1, 1 + min(2, torch.cuda.device_count()))


@pytest.fixture(scope="module", params=WORLDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    world, made = request.param, tmp_path_factory.mktemp(f"states{request.param}")
    plan = [{"world": world, "name": name, **case} for name, case in CASES.items()]
    (made / "plan.json").write_text(json.dumps(plan))
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(world):
        with (made / f"log{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.worker.state_ranks", str(made / "plan.json")],
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=Path(__file__).parents[2],
                )
            )
    try:
        codes = [process.wait(480) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "".join((made / f"log{rank}").read_text()[-3000:] for rank in range(world))
    return made


def told(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-0.json").read_text())
    return found


@pytest.mark.parametrize("name", [name for name in LOADS if "paged" not in name])
def test_every_tensor_and_number_comes_back(folder: Path, name: str) -> None:
    saved = torch.load(folder / f"{CASES[name]['loads']}.pt", weights_only=False)
    loaded = torch.load(folder / f"{name}.pt", weights_only=False)
    narrower = {"fp32": "bf16", "bf16": "fp16"}
    before, after = (CASES[one].get("precision", "bf16") for one in (CASES[name]["loads"], name))
    for key, was in saved.items():
        if key == "scale":
            # The wrapper of ZeRO-0 does not count hysteresis: that stays as the new one has it.
            assert before != "fp16" or was.items() <= loaded[key].items()
        elif key in ("steps", "groups", "schedule", "counts"):
            assert loaded[key] == was, key
        elif key in ("frozen", "buffers") and narrower.get(before) == after:
            assert all(
                torch.allclose(one, other, rtol=1e-2) for one, other in zip(was, loaded[key], strict=True)
            )
        else:
            assert all(torch.equal(one, other) for one, other in zip(was, loaded[key], strict=True)), key


@pytest.mark.parametrize("name", LOADS)
def test_the_loss_and_the_random_states_go_on(folder: Path, name: str) -> None:
    source = told(folder, CASES[name]["loads"])
    assert told(folder, name)["losses"] == pytest.approx(source["losses"][SAVED:], rel=0.05)
    assert told(folder, name)["draws"] == source["draws"]


def test_wrappers_are_those_that_the_cases_mean(folder: Path) -> None:
    names = {name: told(folder, name)["wrapper"] for name in ("fused", "fp16", "plain", "two", "three")}
    assert names == {
        "fused": "FP16_Optimizer",
        "fp16": "FP16_Optimizer",
        "plain": "FusedAdam",
        "two": "DeepSpeedZeroOptimizer",
        "three": "DeepSpeedZeroOptimizer_Stage3",
    }
