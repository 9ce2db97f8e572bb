"""Code that lies in a model's folder is never run, and pickles that hold more than tensors are not read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from llmtop.presets import catalog
from llmtop.presets.errors import LlmtopError
from llmtop.presets.weightfiles import check_bin

LLAMA = {
    **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "vocab_size": 300, "max_position_embeddings": 64},
}
CODE = "from pathlib import Path\nPath({marker!r}).write_text('ran')\nclass Own: pass\n"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def folder_with_code(tmp_path: Path, marker: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    classes = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}
    (folder / "config.json").write_text(json.dumps({**LLAMA, "auto_map": classes}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": classes}))
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    return folder


def test_reading_a_model_runs_none_of_its_code(tmp_path: Path, marker: Path) -> None:
    loaded = catalog.load_model(str(folder_with_code(tmp_path, marker)))
    assert loaded.shape.hidden_size == 32 and not marker.exists()


@pytest.mark.slow
def test_loading_tokenizer_and_model_runs_none_of_its_code(tmp_path: Path, marker: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from llmtop.trainer.worker.tokenizer import FolderTokenizer

    folder = folder_with_code(tmp_path, marker)
    with pytest.raises(LlmtopError, match="cannot load the tokenizer"):
        FolderTokenizer(folder)
    loaded = catalog.load_model(str(folder))
    keys = {key: value for key, value in loaded.hf_config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model("llama", **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not marker.exists()


class Runs:
    """A pickle of it writes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.write_text, (self.marker, "ran")


def test_a_pickle_is_looked_at_and_not_read(tmp_path: Path, marker: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(Runs(marker)))
    check_bin(file)
    assert not marker.exists()


@pytest.mark.slow
def test_what_loads_weights_refuses_a_pickle_that_runs_something(tmp_path: Path, marker: Path) -> None:
    """Transformers' own loader, by the way that `.bin` files are read for a run."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Runs(marker)}, protocol=2))
    with pytest.raises(Exception, match=r"(?i)weights.only|unsupported"):
        transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    assert not marker.exists()
