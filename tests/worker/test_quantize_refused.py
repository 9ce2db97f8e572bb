"""What is refused before anything is made: other architectures, missing tensors, cut files, no room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.resolve import Machine
from llmtop.trainer import room
from llmtop.trainer.quantize import convert
from llmtop.trainer.quantize.convert import Choice, aside, check_room, outlook, quantize
from llmtop.trainer.quantize.plan import plan_gguf
from llmtop.trainer.quantize.source import read_source
from llmtop.trainer.quantize.target import read_target
from llmtop.trainer.worker.packing.measuring import WholeModel, source_model
from tests.worker.ggufmodels import make_model

Tensors = dict[str, torch.Tensor]
Q8 = read_target("gguf:Q8_0")


def with_tensors(folder: Path, change: Callable[[Tensors], object], **keys: Any) -> Path:
    from safetensors.torch import load_file, save_file

    make_model(folder, tokenizer=False, **keys)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def told(folder: Path) -> LlmtopError:
    with pytest.raises(LlmtopError) as error:
        plan_gguf(read_source(folder), "Q8_0")
    return error.value


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    def lose(tensors: Tensors) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    assert (
        "lack 9 tensors: model.layers.1.self_attn.q_proj.weight, " in told(with_tensors(tmp_path, lose)).what
    )


def test_tensors_of_another_model_are_named(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path, lambda tensors: tensors.update({"a.lora_A.weight": torch.ones(2, 2)}))
    assert "1 tensor too many: a.lora_A.weight" in told(folder).what


def test_tables_that_nobody_reads_are_left_out(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = with_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert all(name not in str(planned) for planned in plan_gguf(read_source(folder), "F16").planned)


def test_an_expert_that_is_not_there_is_named(tmp_path: Path) -> None:
    def lose(tensors: Tensors) -> None:
        del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]

    found = told(with_tensors(tmp_path, lose, case="mixtral"))
    assert "lack 1 tensor: model.layers.1.block_sparse_moe.experts.3.w2.weight" in found.what


def test_other_shapes_are_named(tmp_path: Path) -> None:
    folder = with_tensors(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}))
    assert "model.norm.weight (5,), not (64,)" in told(folder).what


def test_a_tied_head_with_numbers_of_its_own_is_kept(tmp_path: Path) -> None:
    """As transformers does: it is tied where it is the same or not there."""
    tied = {"tie_word_embeddings": True}
    other = with_tensors(
        tmp_path / "other",
        lambda it: it.update({"lm_head.weight": it["model.embed_tokens.weight"] + 1}),
        **tied,
    )
    same = with_tensors(
        tmp_path / "same",
        lambda it: it.update({"lm_head.weight": it["model.embed_tokens.weight"].clone()}),
        **tied,
    )
    names = [
        {planned.name for planned in plan_gguf(read_source(one), "F16").planned} for one in (other, same)
    ]
    assert ["output.weight" in known for known in names] == [True, False]


@pytest.mark.parametrize("kept", [0, 4, 5000])
def test_a_file_that_is_cut_short_is_named(kept: int, tmp_path: Path) -> None:
    file = make_model(tmp_path, tokenizer=False) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors" in told(tmp_path).why


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = with_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    assert "packed already" in told(folder).what


def test_what_was_quantized_is_sent_back_to_where_it_came_from(tmp_path: Path) -> None:
    packed = make_model(tmp_path, tokenizer=False, quantization_config={"quant_method": "bitsandbytes"})
    error = told(packed)
    assert "packed already" in error.what and "that they came from" in error.fix
    assert "random" not in str(error) and "training" not in str(error)


def test_no_more_tokens_are_counted_than_the_model_was_made_for(tmp_path: Path) -> None:
    source = read_source(make_model(tmp_path, tokenizer=False, max_position_embeddings=1024))
    found = outlook(source, Q8, tmp_path / "out.gguf", Choice())
    asked = outlook(source, Q8, tmp_path / "out.gguf", Choice(context=2048))
    assert found.context == asked.context == 1024 and found.load_bytes == asked.load_bytes
    assert [any("1,024 tokens" in note for note in one.notes) for one in (found, asked)] == [False, True]


def test_other_architectures_are_refused_with_what_works(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=64)).save_pretrained(str(tmp_path))
    error = told(tmp_path)
    assert "gpt2 cannot be written to GGUF" in error.what and "--to int8" in error.fix


@pytest.mark.parametrize(
    ("case", "changes", "what"),
    [
        ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar 64"),
        ("gemma2", {"attn_logit_softcapping": None}, "without a softcap"),
        ("gemma2", {"tie_word_embeddings": False}, "projection to logits of its own"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "order of layers"),
        ("llama", {"hidden_act": "relu"}, "activation relu"),
        ("qwen3", {"attention_bias": True}, "o_proj.bias"),
        ("phi", {"qk_layernorm": True}, "norms of queries and keys"),
        ("phi", {"hidden_act": "gelu"}, "activation gelu"),
        ("phi", {"tie_word_embeddings": True}, "head tied to the embedding"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob = true"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob = false"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "layers that have no experts"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic'",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    case: str, changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    error = told(make_model(tmp_path, case, tokenizer=False, **changes))
    assert what in error.what and "--to int8 or --to nf4" in error.fix


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(UsageError, match="no such folder"):
        read_source(folder)
    make_model(folder, tokenizer=False)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="holds no safetensors"):
        read_source(folder)


def make(folder: Path, out: Path, **choice: Any) -> None:
    source = read_source(folder)
    with aside(out) as place:
        quantize(source, Q8, out, place, Choice(**choice), lambda working: None)


def test_no_room_on_the_drive_or_in_memory_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_model(tmp_path / "tiny"), tmp_path / "out.gguf"
    found = outlook(read_source(folder), Q8, out, Choice())
    with monkeypatch.context() as small:
        small.setattr(room, "free_bytes", lambda path: 1000)
        with pytest.raises(LlmtopError, match="no room"):
            make(folder, out)
    with monkeypatch.context() as small:
        small.setattr(convert, "memory_left_bytes", lambda: found.host_bytes - 1)
        with pytest.raises(LlmtopError, match="too little host memory"):
            make(folder, out)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    check_room(found, out)


def test_an_output_that_is_there_stays(tmp_path: Path) -> None:
    folder, out = make_model(tmp_path / "tiny"), tmp_path / "out.gguf"
    make(folder, out)
    before = out.stat().st_ino
    with pytest.raises(UsageError, match="is there already"):
        make(folder, out)
    assert out.stat().st_ino == before
    make(folder, out, force=True)
    assert out.stat().st_ino != before and out.read_bytes().startswith(b"GGUF")


def test_a_folder_that_is_there_is_replaced_whole(tmp_path: Path) -> None:
    """With --force; a file of the old one does not stay among the new."""
    folder, out = make_model(tmp_path / "tiny"), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"quantization_config": {}}')
    make(folder, out, force=True)
    assert out.is_file() and sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny"]


@pytest.mark.parametrize("out", ["models", "models/tiny", "models/tiny/model.safetensors", "models/mine"])
def test_what_was_not_made_by_this_is_never_replaced(out: str, tmp_path: Path) -> None:
    """The source itself, what it lies in, its weights, and other people's files."""
    folder, mine = make_model(tmp_path / "models" / "tiny"), tmp_path / "models" / "mine"
    mine.write_text("mine")
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="is not replaced, --force or not"):
        make(folder, tmp_path / out, force=True)
    assert sorted(tmp_path.rglob("*")) == there and mine.read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_a_link_the_link_alone_is_replaced(kind: str, tmp_path: Path) -> None:
    folder, target = make_model(tmp_path / "tiny"), tmp_path / "target"
    if kind == "file":
        target.write_bytes(b"GGUF and more")
    else:
        target.mkdir()
    out = tmp_path / "out.gguf"
    out.symlink_to(target)
    make(folder, out, force=True)
    assert not out.is_symlink() and out.read_bytes().startswith(b"GGUF\x03") and target.exists()


def test_a_packed_model_lies_in_its_source_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    make(folder, folder / "tiny.gguf")
    make(folder, folder / "again.gguf")
    assert (folder / "tiny.gguf").read_bytes() == (folder / "again.gguf").read_bytes()


@pytest.mark.parametrize("kind", ["folder", "files"])
def test_links_are_followed_to_the_weights(kind: str, tmp_path: Path) -> None:
    """As in the cache of huggingface_hub, whose files are links."""
    folder, linked = make_model(tmp_path / "tiny"), tmp_path / "linked"
    if kind == "folder":
        linked.symlink_to(folder)
    else:
        linked.mkdir()
        for path in folder.iterdir():
            (linked / path.name).symlink_to(path)
    make(linked, tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes().startswith(b"GGUF")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, sharded = make_model(tmp_path / "tiny"), tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    model.save_pretrained(str(sharded), max_shard_size="100KB")
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    make(sharded, tmp_path / "out.gguf")
    shards[1].unlink()
    error = told(sharded)
    assert "broken or cut short" in error.what and shards[1].name in error.why


def test_8_bit_floats_without_scales_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = with_tensors(tmp_path, lambda it: it.update({name: it[name].to(torch.float8_e4m3fn)}))
    assert f"{name} is kept as F8_E4M3" in told(folder).why


@pytest.mark.filterwarnings("ignore")  # of torchao, as it is loaded
@pytest.mark.parametrize("kind", ["int8", "int8-int4", "int4-weight-only"])
def test_what_torchao_rounded_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    """As transformers saves it, plainly and in the form of a run with fake quantization."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    from llmtop.trainer.worker.qat import base_config

    config = Int8WeightOnlyConfig() if kind == "int8" else base_config(kind, 32)  # type: ignore[arg-type]
    folder = make_model(tmp_path / "tiny", tokenizer=False)
    keys = {"quantization_config": TorchAoConfig(config), "dtype": torch.bfloat16}
    AutoModelForCausalLM.from_pretrained(str(folder), **keys).save_pretrained(str(tmp_path / "packed"))
    error = told(tmp_path / "packed")
    assert "packed already" in error.what and error.why.startswith("torchao has rounded them")


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path) -> None:
    """Found out by the library that writes the files, after all that was looked at before."""
    from safetensors import SafetensorError

    from llmtop.trainer.worker.packing.bnbfolder import files_in_words

    with pytest.raises(LlmtopError, match="cannot read or write the weights"), files_in_words():
        raise SafetensorError("Error while serializing: I/O error: No space left on device")


@pytest.mark.parametrize(
    ("case", "changes"), [("qwen3_moe", {"mlp_only_layers": [1]}), ("phi", {"qk_layernorm": True})]
)
def test_what_gguf_cannot_hold_bitsandbytes_takes(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Tensors that no GGUF file has are not missing, and not too many."""
    source = read_source(make_model(tmp_path / "tiny", case, tokenizer=False, **changes))
    assert outlook(source, read_target("nf4"), tmp_path / "out", Choice()).predicted_bytes
    assert isinstance(source_model(source, torch.float32), WholeModel)


def test_a_driver_that_hangs_is_not_taken_for_a_machine_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = Machine(gpu="unknown", gpus=1, host_memory_bytes=None, driver_silent=True)
    monkeypatch.setattr(convert, "detect_machine", lambda: silent)
    source = read_source(make_model(tmp_path / "tiny", "llama", tokenizer=False))
    with pytest.raises(UsageError, match="driver of this machine's GPUs does not answer"):
        outlook(source, read_target("nf4"), tmp_path / "out", Choice())


@pytest.mark.parametrize("form", ["gguf:Q8_0", "nf4"])
def test_missing_tensors_are_found_before_anything_is_made(form: str, tmp_path: Path) -> None:
    folder = with_tensors(tmp_path / "tiny", lambda it: it.pop("model.norm.weight"))
    with pytest.raises(LlmtopError, match="lack 1 tensor: model.norm.weight"):
        outlook(read_source(folder), read_target(form), tmp_path / "out", Choice())


def test_two_at_once_are_not_let_in(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with aside(out), pytest.raises(UsageError, match="being written already"), aside(out):
        pass


def test_what_a_killed_one_left_is_taken_away(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with aside(out) as place:
        left = place
    left.mkdir()
    (left / "made").write_text("half")
    with aside(out) as place:
        assert not list(place.iterdir())
    assert not left.exists()
