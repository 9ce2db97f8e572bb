"""Weights of real runs, taken out and loaded by Transformers and PEFT in a process without llmtop."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.weightsjob import Finished, WeightsJob
from llmtop.trainer.weightsout import find_state
from llmtop.trainer.worker.weightsout.job import do_job
from tests.worker.handmade_state import llama_shapes, saved_run
from tests.worker.launching import log_end, make_run, run_module, start_ranks, tiny_spec, wait_for_ranks

pytestmark = pytest.mark.slow

SCRIPT = "tests.worker.weights_ranks"
BF16 = {"precision": "bf16"}
LORA = {"lora_rank": 4, "learning_rate": 2e-2}
TIED = {"tie_word_embeddings": True}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 128,
    "n_positions": 256,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
WIDE = {"intermediate_size": 512}
"""So that packed weights are large enough for a sample of them to be kept."""
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

HAS_TORCHAO = find_spec("torchao") is not None
QAT: dict[str, dict[str, Any]] = {
    "qat_weights": {"zero": 2, "qat": "int4-weight-only", "hf_config": {"tie_word_embeddings": True}},
    "qat_inputs": {"zero": 1, "qat": "int8-int4", "qat_group": 16, "precision": "bf16"},
}

RUNS: dict[str, dict[str, Any]] = {
    # world size 1
    "zero0": {"zero": 0, **BF16},
    "zero2_fp32": {"zero": 2, "weight_decay": 0.1, "hf_config": TIED},
    "moe": {"zero": 2, "hf_config": MIXTRAL},
    "lora_random": {"zero": 2, **LORA},
    "lora_folder": {"zero": 2, **LORA, "weights_dir": "llama"},
    "lora_gpt2": {"zero": 2, **LORA, "weights_dir": "gpt2", "hf_config": GPT2},
    "nf4": {"zero": 2, **LORA, **BF16, "quantization": "nf4", "weights_dir": "wide", "hf_config": WIDE},
    "int8": {"zero": 2, **LORA, **BF16, "quantization": "int8", "weights_dir": "wide", "hf_config": WIDE},
    **(QAT if HAS_TORCHAO else {}),
    # world size 2; ZeRO-3 last, see matrix_ranks
    "one": {"gpus": 2, "zero": 1, **BF16},
    "two": {"gpus": 2, "zero": 2, **BF16, "hf_config": TIED, "optimizer": "adamw_8bit"},
    "three_lora": {"gpus": 2, "zero": 3, **LORA, "weights_dir": "llama"},
    "three": {"gpus": 2, "zero": 3, **BF16, "hf_config": TIED},
}
EXPORTS: dict[str, dict[str, Any]] = {
    **{name: {"run": name} for name in ("zero0", "zero2_fp32", "moe", "one", "two", "three")},
    "two_in_parts": {"run": "two", "shard_bytes": 50_000},
    "three_master": {"run": "three", "dtype": "fp32"},
    **{
        f"{name}_merged": {"run": name, "content": "merged"}
        for name in ("lora_random", "lora_folder", "lora_gpt2", "nf4", "int8", "three_lora")
    },
    **{f"{name}_plain": {"run": name} for name in (QAT if HAS_TORCHAO else ())},
    **{f"{name}_quantized": {"run": name, "content": "quantized"} for name in (QAT if HAS_TORCHAO else ())},
    "nf4_original": {"run": "nf4", "content": "merged", "base": "original", "dtype": "fp32"},
    **{
        f"{name}_adapters": {"run": name, "content": "adapters", "on": RUNS[name].get("weights_dir")}
        for name in ("lora_folder", "lora_gpt2", "three_lora", "nf4")
    },
}
EXACT = ["zero0", "zero2_fp32", "one", "two", "two_in_parts", "three"]
"""Whole models in the run's own precision: what is loaded is what the live engine had, bit for bit."""


class Taken:
    def __init__(self, root: Path, runs: dict[str, RunDir], finished: dict[str, Finished]) -> None:
        self.root = root
        self.runs = runs
        self.finished = finished

    def live(self, name: str) -> dict[str, Any]:
        live: dict[str, Any] = torch.load(self.runs[name].path / "live.pt")
        return live

    def loaded(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(self.root / f"{name}.loaded.pt")
        return loaded

    def files(self, name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for path in (self.root / "out" / name).glob("*.safetensors"):
            with safe_open(str(path), "pt") as opened:
                found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        return found


def load_as_a_user(places: Path) -> None:
    command = [sys.executable, "-m", SCRIPT, "load", str(places)]
    done = subprocess.run(command, capture_output=True, timeout=240, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]


def save_base(folder: Path, hf_config: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

    keys = tiny_spec(hf_config).hf_config
    torch.manual_seed(11)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[keys["model_type"]].from_dict(keys))
    model.generation_config = GenerationConfig(max_new_tokens=7)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Taken:
    root = tmp_path_factory.mktemp("weights")
    save_base(root / "llama", {})
    save_base(root / "wide", WIDE)
    save_base(root / "gpt2", GPT2)
    runs = {}
    for name, options in RUNS.items():
        chosen = {"steps": 2, "tokenizer": "bytes", "save_at_end": True, **options}
        if "weights_dir" in chosen:
            chosen["weights_dir"] = str(root / chosen["weights_dir"])
        runs[name] = make_run(root / "runs" / name, tiny_spec(chosen.pop("hf_config", None), **chosen))
    for world in (1, 2):
        mine = [run for run in runs.values() if run.spec().world_size == world]
        command = [sys.executable, "-m", SCRIPT, "train", *(str(run.path) for run in mine)]
        codes = wait_for_ranks(start_ranks(mine[0], command))
        assert codes == [0] * world, "".join(log_end(mine[0], rank) for rank in range(world))
    jobs, places = {}, {}
    for name, export in EXPORTS.items():
        run = runs[export["run"]]
        target = root / "out" / name
        jobs[name] = WeightsJob(
            run=str(run.path),
            state=str(find_state(run)),
            target=str(target),
            content=export.get("content", "full"),
            base=export.get("base", "trained"),
            dtype=export.get("dtype", run.spec().options.precision),
            shard_bytes=export.get("shard_bytes", 1 << 30),
        )
        places[name] = {"folder": str(target), "base": str(root / export["on"]) if "on" in export else None}
    (root / "jobs.json").write_bytes(msgspec.json.encode(jobs))
    (root / "places.json").write_text(json.dumps(places))
    run_module(SCRIPT, "export", str(root / "jobs.json"), log=root / "export.log")
    load_as_a_user(root / "places.json")
    finished = msgspec.json.decode((root / "finished.json").read_bytes(), type=dict[str, Finished])
    return Taken(root, runs, finished)


@pytest.mark.parametrize("name", EXACT)
def test_a_loaded_model_is_the_one_that_was_trained_bit_for_bit(taken: Taken, name: str) -> None:
    live, loaded = taken.live(EXPORTS[name]["run"]), taken.loaded(name)
    assert live["weights"].keys() == loaded["weights"].keys()
    for key, was in live["weights"].items():
        assert was.dtype == loaded["weights"][key].dtype and torch.equal(was, loaded["weights"][key]), key
    assert torch.equal(live["logits"], loaded["logits"])


def test_experts_are_in_the_files_as_others_read_them(taken: Taken) -> None:
    """Transformers keeps them in one tensor, and files have them one by one."""
    live, loaded = taken.live("moe"), taken.loaded("moe")
    assert any(key.endswith("experts.0.w1.weight") for key in taken.files("moe"))
    assert not any("gate_up_proj" in key for key in taken.files("moe"))
    for key, was in live["weights"].items():
        assert torch.equal(was, loaded["weights"][key]), key
    assert torch.equal(live["logits"], loaded["logits"])


def test_master_weights_are_what_the_model_had_before_rounding(taken: Taken) -> None:
    live, master = taken.live("three"), taken.loaded("three_master")
    told = [one for one in master["weights"].values() if one.is_floating_point()]
    assert {one.dtype for one in told} == {torch.float32}
    for key, was in live["weights"].items():
        assert torch.equal(was, master["weights"][key].bfloat16()), key
    assert any(not torch.equal(one, one.bfloat16().float()) for one in told)


@pytest.mark.parametrize("name", ["two", "three", "zero2_fp32"])
def test_tied_weights_are_stored_once_and_tied_again(taken: Taken, name: str) -> None:
    assert taken.loaded(name)["tied"]
    assert "lm_head.weight" not in taken.files(name) and "model.embed_tokens.weight" in taken.files(name)


def test_parts_have_an_index_that_names_each_tensor_once(taken: Taken) -> None:
    folder = taken.root / "out" / "two_in_parts"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    parts = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(parts) > 2 and sorted(set(index["weight_map"].values())) == parts
    assert all(path.stat().st_size < 60_000 for path in folder.glob("*.safetensors"))
    files = taken.files("two_in_parts")
    assert files.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in files.values())
    assert taken.finished["two_in_parts"].parameters == sum(one.numel() for one in files.values())


@pytest.mark.parametrize("name", ["lora_random", "lora_folder", "lora_gpt2", "three_lora"])
def test_adapters_are_merged_as_peft_merges_them(taken: Taken, name: str) -> None:
    live, merged = taken.live(name), taken.loaded(f"{name}_merged")
    assert torch.allclose(live["logits"], merged["logits"], atol=2e-5)
    by_hand = merge_by_hand(live["weights"], gpt2="gpt2" in name)
    for key, was in by_hand.items():
        assert torch.equal(was, merged["weights"][key]), key


def merge_by_hand(weights: dict[str, torch.Tensor], *, gpt2: bool) -> dict[str, torch.Tensor]:
    """With an alpha of twice the rank."""
    found = {}
    for key, value in weights.items():
        if ".base_layer.weight" not in key:
            continue
        up, down = (weights[key.replace("base_layer", f"lora_{half}.default")] for half in "BA")
        added = (up @ down) * 2.0
        name = key.removeprefix("base_model.model.").replace(".base_layer", "")
        found[name] = value + (added.T if gpt2 else added)
    assert found and all(not torch.equal(found[name], weights[key]) for name, key in renamed(found).items())
    return found


def renamed(found: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight" for name in found}


@pytest.mark.parametrize("name", ["lora_folder", "lora_gpt2", "three_lora"])
def test_peft_loads_adapters_alone(taken: Taken, name: str) -> None:
    live, loaded = taken.live(name), taken.loaded(f"{name}_adapters")
    assert torch.equal(live["logits"], loaded["logits"])
    config = json.loads((taken.root / "out" / f"{name}_adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == taken.runs[name].spec().weights_dir
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert sorted(path.name for path in (taken.root / "out" / f"{name}_adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_packed_base_is_merged_with_the_values_that_it_stood_for(taken: Taken, name: str) -> None:
    live, merged = taken.live(name), taken.loaded(f"{name}_merged")
    plain = taken.loaded("nf4_original")
    off = float((live["logits"] - merged["logits"]).abs().mean())
    other = float((live["logits"] - plain["logits"]).abs().mean())
    spread = float(live["logits"].float().std())
    assert off < 0.02 * spread, "int8 rounds its inputs too"
    if name == "nf4":
        assert off < other / 3
        assert "trained on" in " ".join(taken.finished["nf4_merged"].notes)
        assert "not exactly" in " ".join(taken.finished["nf4_original"].notes)


@pytest.mark.skipif(not HAS_TORCHAO, reason="the extra `qat` is not installed")
@pytest.mark.parametrize("name", QAT)
def test_what_was_trained_to_be_rounded_answers_the_same_rounded(taken: Taken, name: str) -> None:
    """Bit for bit: the rounding in training is that of the files."""
    live, quantized, plain = (
        one["logits"]
        for one in (taken.live(name), taken.loaded(f"{name}_quantized"), taken.loaded(f"{name}_plain"))
    )
    assert torch.equal(live, quantized)
    assert not torch.equal(live, plain), "the plain weights are not rounded"
    files = taken.files(f"{name}_quantized")
    codes = {key: values for key, values in files.items() if key.endswith("_weight_qdata")}
    assert len(codes) == 14 and {values.dtype for values in codes.values()} == {torch.int8}
    assert all(int(values.min()) >= -8 and int(values.max()) <= 7 for values in codes.values())
    assert "byte" in " ".join(taken.finished[f"{name}_quantized"].notes)
    assert "--quantized" in " ".join(taken.finished[f"{name}_plain"].notes)
    count = taken.finished[f"{name}_plain"].parameters
    assert taken.finished[f"{name}_quantized"].parameters == count


def test_folders_have_a_configuration_and_settings_to_generate_with(taken: Taken) -> None:
    config = json.loads((taken.root / "out" / "three" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert config["use_cache"] is True and config["tie_word_embeddings"] is True
    made = json.loads((taken.root / "out" / "lora_folder_merged" / "generation_config.json").read_text())
    assert made["max_new_tokens"] == 7, "the base's own"
    assert "bytes of its text" in " ".join(taken.finished["three"].notes)


@pytest.mark.parametrize("what", ["lacks", "has, and the model has not,", "has another"])
def test_a_state_of_another_model_is_refused_by_the_name_of_a_tensor(tmp_path: Path, what: str) -> None:
    shapes = llama_shapes()
    if what == "lacks":
        del shapes["model.norm.weight"]
    elif what == "has another":
        shapes["model.norm.weight"] = (63,)
    else:
        shapes["model.norm.bias"] = (64,)
    with pytest.raises(LlmtopError, match=f"the saved state {what} model.norm"):
        do_job(job_of(saved_run(tmp_path / "run", shapes), tmp_path / "out"), lambda answer: None)
    assert list((tmp_path / "out").iterdir()) == []


def job_of(run: RunDir, target: Path, **other: Any) -> WeightsJob:
    target.mkdir()
    wanted = {"content": "full", "dtype": "fp32", "shard_bytes": 1 << 30, **other}
    return WeightsJob(run=str(run.path), state=str(find_state(run)), target=str(target), **wanted)


def test_numbers_beyond_fp16_are_told(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", scale=1e6)
    with pytest.raises(LlmtopError, match="beyond the range of fp16"):
        do_job(job_of(run, tmp_path / "out", dtype="fp16"), lambda answer: None)


def test_a_tokenizer_goes_with_the_weights(tmp_path: Path) -> None:
    from llmtop.trainer.worker.tokenizer import train_byte_level_bpe

    run = saved_run(tmp_path / "run", tokenizer="auto")
    train_byte_level_bpe(["some text to make a tokenizer of"] * 3, 384, run.tokenizer_dir)
    finished = do_job(job_of(run, tmp_path / "out"), lambda answer: None)
    assert finished.notes == ()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("some text")["input_ids"]) == "some text"
