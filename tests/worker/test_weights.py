"""A folder of weights is loaded whole or refused, with the tensors or the file that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtop.presets.errors import LlmtopError
from llmtop.trainer.worker.build import build_model
from tests.worker.launching import TINY_LLAMA, tiny_spec

Tensors = dict[str, torch.Tensor]


def saved(folder: Path, change: Callable[[Tensors], object] = lambda tensors: None, **keys: Any) -> Path:
    """A folder as transformers saves it, its tensors changed."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {key: value for key, value in TINY_LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**(config | keys))).save_pretrained(str(folder))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def load(folder: Path, *, quantization: str = "none", **keys: Any) -> torch.nn.Module:
    spec = tiny_spec(keys, weights_dir=str(folder), quantization=quantization)
    return build_model(spec, {}, torch.device("cpu"))


def test_the_whole_folder_is_what_the_model_holds(tmp_path: Path) -> None:
    def mark(tensors: Tensors) -> None:
        tensors["model.norm.weight"].fill_(7)
        tensors["of.another.model"] = torch.zeros(3)

    saved(tmp_path, mark)
    norm = load(tmp_path).get_parameter("model.norm.weight")
    assert bool((norm == 7).all())


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    load(tmp_path, tie_word_embeddings=True)


def test_missing_tensors_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name])
    with pytest.raises(LlmtopError, match=r"lack 9 tensors: model\.layers\.1\.\S+, .* and 6 more"):
        load(tmp_path)


def test_other_shapes_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(LlmtopError, match=r"model\.norm\.weight \(5,\), not \(64,\)"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 5000])
def test_a_file_that_is_cut_short_is_told(tmp_path: Path, kept: int) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(LlmtopError, match="broken or cut short") as told:
        load(tmp_path)
    assert "again" in told.value.fix
    assert path.name in told.value.why


@pytest.mark.parametrize("text", [b"{not json", b"\xff\xfe", b"[]", b'{"weight_map": {}}'])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_broken_index_is_told(tmp_path: Path, text: bytes, quantization: str) -> None:
    saved(tmp_path).unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(LlmtopError, match="broken or cut short") as told:
        load(tmp_path, quantization=quantization)
    assert "model.safetensors.index.json" in told.value.why


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_whole_numbers_are_no_weights(tmp_path: Path, quantization: str) -> None:
    """As libraries save 8-bit models: same names and shapes, with scales in tensors of other names."""

    def pack(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = (tensors[name] * 100).to(torch.int8)
        tensors[f"{name}_scale"] = torch.ones(1)

    saved(tmp_path, pack)
    with pytest.raises(LlmtopError, match=r"are packed: model\.layers\.0\.mlp\.up_proj\.weight"):
        load(tmp_path, quantization=quantization)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    saved(tmp_path).unlink()
    torch.save({"model.norm.weight": Path.unlink}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LlmtopError, match="more than tensors"):
        load(tmp_path)
