"""Weights streamed from safetensors files give the model that transformers' own loader gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.events import WeightsLoaded, WeightsRead
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.worker import shards
from llmtop.trainer.worker.build import DTYPES, build_model
from tests.worker.launching import events_of, log_end, make_run, start_ranks, tiny_spec, wait_for_ranks

COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TIED = {"tie_word_embeddings": True}
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", **TIED},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, **TIED},
    "phi3": {"model_type": "phi3", **NO_TOKENS},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, **TIED},
    "opt": {"model_type": "opt", "word_embed_proj_dim": 64, "ffn_dim": 96, **TIED, **NO_TOKENS},
    "neox": {"model_type": "gpt_neox"},
}
MERGED = {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
IDS = torch.arange(24).remainder(100).view(2, 12)


def config_of(keys: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    merged = {**COMMON, **keys}
    return CONFIG_MAPPING[merged["model_type"]].from_dict(merged)


def save(folder: Path, keys: dict[str, Any], *, shard_size: str = "60KB", base: bool = False) -> None:
    """A folder in fp32, in several files; with values that no initialisation gives by chance."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(keys))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    (model.base_model if base else model).save_pretrained(str(folder), max_shard_size=shard_size)


def by_transformers(folder: Path, keys: dict[str, Any], precision: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder), config=config_of(keys), dtype=DTYPES[precision], attn_implementation="sdpa"
    )


def reference(folder: Path, keys: dict[str, Any], precision: str) -> torch.Tensor:
    return logits_of(by_transformers(folder, keys, precision))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=IDS).logits.float()
        return logits


def built(folder: Path, keys: dict[str, Any], told: list[Any], **options: Any) -> torch.nn.Module:
    spec = tiny_spec({**COMMON, **keys}, weights_dir=str(folder), **options)
    return build_model(spec, {}, torch.device("cpu"), told.append)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_family_gets_what_its_files_hold(tmp_path: Path, family: str, precision: str) -> None:
    keys = FAMILIES[family]
    told: list[Any] = []
    save(tmp_path, keys)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = built(tmp_path, keys, told, precision=precision)
    assert {parameter.dtype for parameter in model.parameters()} == {DTYPES[precision]}
    assert not any(getattr(tensor, "is_meta", False) for tensor in model.state_dict().values())
    assert torch.equal(logits_of(model), reference(tmp_path, keys, precision))
    assert [event.way for event in told if isinstance(event, WeightsLoaded)] == ["streamed"]
    last = [event for event in told if isinstance(event, WeightsRead)][-1]
    assert last.read_bytes == last.total_bytes > 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_names_without_the_prefix_of_the_base_model(tmp_path: Path, family: str) -> None:
    keys = {**FAMILIES[family], **TIED}
    save(tmp_path, keys, base=True)
    assert torch.equal(logits_of(built(tmp_path, keys, [])), reference(tmp_path, keys, "fp32"))


def test_a_family_whose_tensors_are_merged_is_loaded_by_transformers_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []
    save(tmp_path, MERGED)
    model = built(tmp_path, MERGED, told)
    assert torch.equal(logits_of(model), reference(tmp_path, MERGED, "fp32"))
    assert [event.way for event in told] == ["transformers"]
    assert "merges or splits" in told[0].reason
    assert "not streamed, because transformers merges" in capfd.readouterr().err


def test_tied_by_the_configuration_and_different_in_the_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path, FAMILIES["llama"], shard_size="1GB")
    keys = {**FAMILIES["llama"], **TIED}
    model = built(tmp_path, keys, [])
    head, table = model.get_parameter("lm_head.weight"), model.get_parameter("model.embed_tokens.weight")
    assert head is not table
    assert "not tied" in capfd.readouterr().err
    assert torch.equal(logits_of(model), reference(tmp_path, keys, "fp32"))

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    model = built(tmp_path, keys, [])
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path, FAMILIES["llama"], shard_size="1GB")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LlmtopError, match=r"are packed: model\.layers\.0\.mlp\.up_proj"):
        built(tmp_path, FAMILIES["llama"], [])


def test_a_file_that_the_index_names_and_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, FAMILIES["llama"])
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(LlmtopError, match="cannot load") as told:
        built(tmp_path, FAMILIES["llama"], [])
    assert gone.name in told.value.why


def test_an_index_without_a_map_is_broken(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(LlmtopError, match="broken"):
        built(tmp_path, FAMILIES["llama"], [])


def test_bin_files_are_loaded_by_transformers(tmp_path: Path) -> None:
    told: list[Any] = []
    save(tmp_path, FAMILIES["llama"], shard_size="1GB")
    from safetensors.torch import load_file

    file = tmp_path / "model.safetensors"
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    file.unlink()
    built(tmp_path, FAMILIES["llama"], told)
    assert told[-1].way == "transformers"
    assert "no safetensors" in told[-1].reason


LARGE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 12_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """Every family, and a larger model, built by two ranks in ZeRO-3 shards."""
    runs = {}
    # The large one last: what the first ones import is no memory of its weights.
    for name, keys in {**FAMILIES, "mixtral": MERGED, "large": LARGE}.items():
        folder = tmp_path_factory.mktemp(name)
        save(folder / "weights", keys, shard_size="50MB" if name == "large" else "60KB")
        spec = tiny_spec(
            {**COMMON, **keys}, weights_dir=str(folder / "weights"), gpus=2, zero=3, precision="bf16"
        )
        runs[name] = make_run(folder / "run", spec)
    script = Path(__file__).with_name("streamed_ranks.py")
    paths = [str(run.path) for run in runs.values()]
    first = runs["llama"]
    codes = wait_for_ranks(start_ranks(first, [sys.executable, str(script), *paths]))
    assert codes == [0, 0], log_end(first, 0) + log_end(first, 1)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "mixtral"])
def test_shards_hold_what_the_whole_model_holds(sharded: dict[str, RunDir], family: str) -> None:
    run = sharded[family]
    keys = {**FAMILIES, "mixtral": MERGED}[family]
    whole = by_transformers(run.path.parent / "weights", keys, "bf16")
    wanted = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    for rank in (0, 1):
        found = torch.load(run.path / f"gathered-{rank}.pt")
        assert set(found["tensors"]) == set(wanted)
        for name, tensor in found["tensors"].items():
            assert torch.equal(tensor, wanted[name]), name
            assert tensor.dtype == wanted[name].dtype, name
        # Inside zero.Init DeepSpeed multiplies and adds a bias in two roundings.
        torch.testing.assert_close(found["logits"], logits_of(whole), atol=0.05, rtol=0.05)
        ways = [event.way for event in events_of(run, rank, WeightsLoaded)]
        assert ways == ["transformers" if family == "mixtral" else "streamed"]


@pytest.mark.slow
def test_no_rank_holds_a_second_copy(sharded: dict[str, RunDir]) -> None:
    run = sharded["large"]
    stored = sum(file.stat().st_size for file in (run.path.parent / "weights").glob("*.safetensors"))
    for rank in (0, 1):
        told = json.loads((run.path / f"told-{rank}.json").read_text())
        assert told["model_bytes"] > 90 << 20
        # The largest tensor is whole for a moment while its module is made; nothing else is.
        assert told["extra_bytes"] < 0.4 * told["model_bytes"], told
        (loaded,) = events_of(run, rank, WeightsLoaded)
        assert loaded.read_bytes is not None
        assert 0.45 * stored < loaded.read_bytes < 0.55 * stored


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_are_laid_on_the_loaded_weights(tmp_path: Path) -> None:
    save(tmp_path, FAMILIES["llama"])
    model = built(tmp_path, FAMILIES["llama"], [], lora_rank=4)
    # An adapter that has not been trained adds nothing.
    assert torch.equal(logits_of(model), reference(tmp_path, FAMILIES["llama"], "fp32"))
    assert {name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name} == set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_go_straight_to_the_device(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_CHUNK_ELEMENTS", 1000)
    keys = FAMILIES[family]
    save(tmp_path, keys)
    spec = tiny_spec({**COMMON, **keys}, weights_dir=str(tmp_path), precision="bf16")
    model = build_model(spec, {}, torch.device("cuda:0"))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cuda"}
    whole = by_transformers(tmp_path, keys, "bf16").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), whole[name]), name
