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


def load(folder: Path, **keys: Any) -> torch.nn.Module:
    return build_model(tiny_spec(keys, weights_dir=str(folder)), {}, torch.device("cpu"))


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
