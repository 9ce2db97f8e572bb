"""A saved state read back at other ZeRO stages, world sizes, precisions and optimizers, on real DeepSpeed.

Every model has two parameter groups, a frozen layer, a buffer that training changes and tied weights; some
have adapters. What was saved is compared tensor for tensor with what DeepSpeed says it has after loading.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from llmtop.trainer.statefile import newest, read_index
from tests.worker.launching import run_module
from tests.worker.state_ranks import SAVED

pytestmark = pytest.mark.slow

FP32 = {"precision": "fp32"}
DROPS = {"dropout": 0.1}
BF16_OPTIMIZER = {"zero": 1, "grad_accum_dtype": "fp32"}
OFFLOAD = {"offload": True, "sub_group_size": 900}
ALL_OFFLOAD = {**OFFLOAD, "offload_param": True}
ADAM8 = {"optimizer": "adam8"}

SAVES: dict[str, dict[str, Any]] = {
    "unfused": {"zero": 0, **DROPS},
    "fused": {"zero": 0, "fused": True},
    "plain": {"zero": 0, **FP32},
    "one": {"zero": 1, **DROPS},
    "two": {"zero": 2, **DROPS},
    "three": {"zero": 3, **DROPS},
    "bf16_optimizer": {**BF16_OPTIMIZER},
    "offloaded": {"zero": 3, **ALL_OFFLOAD},
    "two_fp32": {"zero": 2, **FP32},
    "three_fp32": {"zero": 3, **FP32},
    "alone": {"zero": 2, "world": 1, **FP32},
    "alone_three": {"zero": 3, "world": 1, **FP32},
    "packed": {"zero": 2, **ADAM8},
    "packed_plain": {"zero": 0, **FP32, **ADAM8},
    "adapters": {"zero": 2, "lora": True},
}

LOADS: dict[str, dict[str, Any]] = {
    "two_to_two": {"zero": 2, "loads": "two", **DROPS},
    "three_to_three": {"zero": 3, "loads": "three", **DROPS},
    "one_to_two": {"zero": 2, "loads": "one", **DROPS},
    "two_to_three": {"zero": 3, "loads": "two", **DROPS},
    "three_to_one": {"zero": 1, "loads": "three", **DROPS},
    "three_to_unfused": {"zero": 0, "loads": "three", **DROPS},
    "unfused_to_two": {"zero": 2, "loads": "unfused", **DROPS},
    "unfused_to_unfused": {"zero": 0, "loads": "unfused", **DROPS},
    "fused_to_fused": {"zero": 0, "fused": True, "loads": "fused"},
    "fused_to_three": {"zero": 3, "loads": "fused"},
    "bf16_optimizer_to_two": {"zero": 2, "loads": "bf16_optimizer"},
    "offloaded_to_bf16_optimizer": {**BF16_OPTIMIZER, "loads": "offloaded"},
    "offloaded_to_offloaded_two": {"zero": 2, **OFFLOAD, "loads": "offloaded"},
    "two_to_offloaded": {"zero": 3, **ALL_OFFLOAD, **DROPS, "loads": "two"},
    "plain_to_two": {"zero": 2, **FP32, "loads": "plain"},
    "three_fp32_to_plain": {"zero": 0, **FP32, "loads": "three_fp32"},
    "two_fp32_to_three": {"zero": 3, **FP32, "loads": "two_fp32"},
    "two_fp32_to_alone": {"zero": 2, **FP32, "world": 1, "loads": "two_fp32"},
    "three_fp32_to_alone": {"zero": 1, **FP32, "world": 1, "loads": "three_fp32"},
    "plain_to_alone_three": {"zero": 3, **FP32, "world": 1, "loads": "plain"},
    "alone_to_three": {"zero": 3, **FP32, "loads": "alone"},
    "alone_three_to_two": {"zero": 2, **FP32, "loads": "alone_three"},
    "two_to_fp32": {"zero": 2, **FP32, "loads": "two"},
    "two_fp32_to_bf16": {"zero": 1, "loads": "two_fp32"},
    "packed_to_packed": {"zero": 2, **ADAM8, "loads": "packed"},
    "packed_to_packed_three": {"zero": 3, **ADAM8, "loads": "packed"},
    "packed_to_full": {"zero": 2, "loads": "packed"},
    "full_to_packed": {"zero": 1, **ADAM8, **FP32, "loads": "two_fp32"},
    "packed_plain_to_packed_plain": {"zero": 0, **FP32, **ADAM8, "loads": "packed_plain"},
    "adapters_to_three": {"zero": 3, "lora": True, "loads": "adapters"},
    "adapters_to_adapters": {"zero": 2, "lora": True, "loads": "adapters"},
    "adapters_on_another_base": {"zero": 2, "lora": True, "other_base": True, "loads": "adapters"},
    "adapters_to_all": {"zero": 2, "loads": "adapters"},
    "after_a_death": {"zero": 2, **DROPS, "loads": "mishaps"},
}
REFUSED = {
    "adapters_on_another_base": "not those that the adapters were trained on",
    "adapters_to_all": "the training state has no",
}
PACKED = {name for name, case in LOADS.items() if {**SAVES, **case}.get("optimizer")} | {"packed_to_full"}
WHOLE = [name for name in LOADS if name not in PACKED and name not in REFUSED and name != "after_a_death"]
EXACT = [
    "two_to_two",
    "three_to_three",
    "one_to_two",
    "unfused_to_unfused",
    "fused_to_fused",
    "packed_to_packed",
    "packed_plain_to_packed_plain",
    "adapters_to_adapters",
]
ALIKE_FP32 = [
    "plain_to_two",
    "three_fp32_to_plain",
    "two_fp32_to_three",
    "two_fp32_to_alone",
    "three_fp32_to_alone",
    "plain_to_alone_three",
    "alone_to_three",
    "alone_three_to_two",
]


class States:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def told(self, name: str, rank: int = 0) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.folder / f"{name}-{rank}.json").read_text())
        return told

    def state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self.folder / f"{name}.pt", weights_only=False)
        return state

    def checkpoint(self, name: str) -> Path:
        return self.folder / f"{name}-checkpoints" / f"step-{SAVED}"

    def tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(str(path), "pt") as file:
                found |= {f"{path.name}:{key}": file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return found


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> States:
    folder = tmp_path_factory.mktemp("states")
    mishaps = {"mishaps": {"zero": 2, **DROPS, "mishaps": True}}
    plan = [{"world": 2, "name": name, **case} for name, case in {**SAVES, **mishaps, **LOADS}.items()]
    (folder / "plan.json").write_text(json.dumps(plan))
    run_module("tests.worker.state_ranks", str(folder / "plan.json"), log=folder / "log")
    return States(folder)


@pytest.mark.parametrize("name", WHOLE)
def test_every_tensor_and_number_comes_back(states: States, name: str) -> None:
    saved, loaded = states.state(LOADS[name]["loads"]), states.state(name)
    assert saved.keys() == loaded.keys()
    rounded = LOADS[name]["loads"] == "two_fp32" and LOADS[name].get("precision") is None
    for key, was in saved.items():
        if key in ("steps", "groups", "schedule", "counts", "scale"):
            assert loaded[key] == was or (key == "counts" and "alone" in name), key
        elif rounded and key in ("frozen", "buffers"):
            # What is not trained has no copy in fp32: it goes into the model as the model keeps it.
            assert [one.bfloat16().float().tolist() for one in was] == [one.tolist() for one in loaded[key]]
        else:
            assert len(was) == len(loaded[key])
            for one, other in zip(was, loaded[key], strict=True):
                assert torch.equal(one.view(-1), other.view(-1)), key


@pytest.mark.parametrize("name", [*EXACT, "after_a_death"])
def test_the_same_layout_goes_on_as_if_it_had_not_stopped(states: States, name: str) -> None:
    source = "two" if name == "after_a_death" else LOADS[name]["loads"]
    assert states.told(name)["losses"] == states.told(source)["losses"][SAVED:]


@pytest.mark.parametrize("name", ALIKE_FP32)
def test_another_layout_goes_on_within_the_noise_of_sums(states: States, name: str) -> None:
    assert states.told(name)["losses"] == pytest.approx(
        states.told(LOADS[name]["loads"])["losses"][SAVED:], rel=2e-4
    )


@pytest.mark.parametrize("name", [name for name in LOADS if name not in REFUSED])
def test_the_loss_goes_on_in_every_case(states: States, name: str) -> None:
    before = states.told(LOADS[name]["loads"])["losses"][SAVED:]
    assert states.told(name)["losses"] == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("name", [name for name in EXACT if name not in REFUSED])
def test_random_states_of_every_rank_come_back(states: States, name: str) -> None:
    for rank in (0, 1):
        assert states.told(name, rank)["draws"] == states.told(LOADS[name]["loads"], rank)["draws"]
    assert states.told(name, 0)["draws"] != states.told(name, 1)["draws"]


def test_wrappers_are_those_that_the_cases_mean(states: States) -> None:
    wrappers = {name: states.told(name)["wrapper"] for name in SAVES}
    assert wrappers["unfused"] == "FP16_UnfusedOptimizer"
    assert wrappers["fused"] == "FP16_Optimizer"
    assert wrappers["plain"] == "AdamW"
    assert wrappers["bf16_optimizer"] == "BF16_Optimizer"
    assert wrappers["one"] == wrappers["two"] == "DeepSpeedZeroOptimizer"
    assert wrappers["three"] == "DeepSpeedZeroOptimizer_Stage3"


@pytest.mark.parametrize("name", ["packed_to_packed", "packed_plain_to_packed_plain", "two_to_two"])
def test_what_is_saved_again_is_the_same_to_the_byte(states: States, name: str) -> None:
    first = states.tensors(states.checkpoint(LOADS[name]["loads"]))
    again = states.tensors(states.folder / f"{name}-again" / f"step-{SAVED}")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first if "rng" not in key)


def test_what_is_not_exact_is_told(states: States) -> None:
    notes = {name: " ".join(states.told(name).get("notes", [])) for name in LOADS}
    assert "packed anew" in notes["packed_to_packed_three"]
    assert "packed to 8 bits" in notes["full_to_packed"]
    assert "random states of their own" in notes["alone_to_three"]
    told = {"packed_to_packed_three", "full_to_packed", "alone_to_three", "alone_three_to_two"}
    assert {name for name, note in notes.items() if note} == told


@pytest.mark.parametrize("name", REFUSED)
def test_another_model_is_refused_on_every_rank(states: States, name: str) -> None:
    for rank in (0, 1):
        assert REFUSED[name] in states.told(name, rank)["refused"]


def test_a_rank_reads_only_its_part(states: States) -> None:
    size = states.told("two")["size"]
    read = [states.told("two_to_two", rank)["bytes_read"] for rank in (0, 1)]
    frozen = 73 * 73 * 2
    assert all(count < 0.5 * size for count in read)
    assert sum(read) < size + frozen + 1000, "frozen weights are whole on both ranks below stage 3"


def test_adapters_leave_the_base_out_and_say_so(states: States) -> None:
    index = read_index(states.checkpoint("adapters"))
    assert index.left_out and index.frozen_check
    assert {one.name for one in index.parameters if one.saved} == {
        one.name for one in index.parameters if one.trainable
    }
    assert all("lora_" in one.name or "bias" in one.name for one in index.parameters if one.saved)


@pytest.mark.parametrize("name", ["one", "three", "unfused", "fused", "plain", "alone", "packed"])
def test_the_index_tells_what_is_where(states: States, name: str) -> None:
    index = read_index(states.checkpoint(name))
    tied = next(one for one in index.parameters if one.name == "embedding.weight")
    assert tied.aliases == ("head.weight",) and tied.shape == (61, 24)
    assert [one.name for one in index.parameters if not one.trainable] == ["frozen.weight", "frozen.bias"]
    assert [one.name for one in index.buffers] == ["seen"]
    assert [group["weight_decay"] for group in index.groups] == [0.1, 0.0]
    covered = [0] * len(index.parameters)
    for file in index.files:
        for slab in file.slabs:
            for piece in slab.pieces:
                covered[piece.parameter] += piece.count
    assert covered == [one.elements for one in index.parameters]
    sizes = {file.name: file.size_bytes for file in index.files}
    assert sizes == {path.name: path.stat().st_size for path in states.checkpoint(name).glob("*.safetensors")}
    trained = sum(one.elements for one in index.parameters if one.trainable)
    stored = index.stored_bytes()
    assert 4 * trained <= stored["master"] <= 4 * (trained + 200)
    assert stored["exp_avg"] == (stored["master"] if name != "packed" else stored["exp_avg_sq"])
    rest = index.size_bytes - sum(stored.values())
    assert 0 < rest < 20_000 * index.source.world_size, "headers and random states"


def test_refused_saves_leave_the_training_and_the_last_checkpoint_alone(states: States) -> None:
    for rank in (0, 1):
        told = states.told("mishaps", rank)
        assert told["full"].startswith("rank 1 could not write") and "No space left" in told["full"]
        assert told["narrow"] == "there is no room"
        assert told["unknown"] == "this cannot be saved: nobody knows how"
        assert told["losses"] == states.told("two")["losses"]


def test_a_death_in_a_save_leaves_the_last_checkpoint(states: States) -> None:
    folder = states.folder / "mishaps-checkpoints"
    left = {path.name for path in folder.iterdir()}
    assert left == {f"step-{SAVED}", f".step-{SAVED + 1}.partial"}
    found = newest(folder)
    assert (
        found is not None
        and found.step == SAVED
        and set(found.files)
        == {
            "index.json",
            "rank-00000.safetensors",
            "rank-00001.safetensors",
        }
    )
