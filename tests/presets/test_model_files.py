"""Models from files and folders of a person: what is taken, and how what is not is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets import catalog
from llmtop.presets.errors import UsageError
from tests.presets.family_cases import CASES
from tests.presets.refusing import refused


def test_a_model_file_is_regular_and_small(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    large = tmp_path / "model.json"
    large.write_text(" " * (5 << 20))
    assert "not a regular file" in str(refused(catalog.load_model, str(tmp_path / "config.json")))
    assert "not a regular file" in str(refused(catalog.load_model, os.devnull))
    assert "larger than 4 MiB" in str(refused(catalog.load_model, str(large)))


def write_config(folder: Path, config: dict[str, Any], *weights: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    for name in weights:
        (folder / name).touch()
    return path


def test_a_folder_a_file_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    path = write_config(folder, CASES["llama"])
    assert catalog.load_model(str(folder)).weights_dir is None
    (folder / "model-00001-of-00002.safetensors").touch()
    with_weights = catalog.load_model(str(folder))
    assert with_weights.weights_dir == str(folder)
    assert with_weights.shape.name == "tiny"
    assert catalog.load_model(str(path)).weights_dir is None
    assert catalog.load_model(str(path)).shape.name == "tiny"
    monkeypatch.chdir(tmp_path)
    assert catalog.load_model("tiny").shape == with_weights.shape
    (tmp_path / "other.json").write_text(json.dumps(CASES["gpt2"]))
    assert catalog.load_model("other.json").shape.name == "other"


def test_weights_of_a_larger_model_are_refused(tmp_path: Path) -> None:
    text = {key: value for key, value in CASES["gemma3_text"].items() if key != "model_type"}
    nested = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}}
    path = write_config(tmp_path / "seeing", nested, "model.safetensors")
    told = refused(catalog.load_model, str(path.parent))
    assert str(path) in told.fix
    assert catalog.load_model(str(path)).shape.family == "gemma3_text"


def test_a_folder_of_packed_weights_is_refused_and_its_shape_is_not(tmp_path: Path) -> None:
    packed = {**CASES["llama"], "quantization_config": {"quant_method": "fp8"}}
    path = write_config(tmp_path / "packed", packed, "model.safetensors")
    with pytest.raises(UsageError, match=r"packed \(fp8\)") as caught:
        catalog.load_model(str(path.parent))
    assert str(path) in caught.value.fix
    assert catalog.load_model(str(path)).weights_dir is None


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    assert "no such file" in str(refused(catalog.load_model, str(tmp_path / "none.json")))
    assert "no config.json" in str(refused(catalog.load_model, str(tmp_path)))
    assert "no such recipe file" in str(refused(catalog.load_recipe, str(tmp_path / "none.toml")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write_config(tmp_path, CASES["llama"])
    path.chmod(0)
    assert "cannot be read" in str(refused(catalog.load_model, str(path)))


@pytest.mark.parametrize("family", ["frobnicate", "lama"])
def test_an_unknown_family_gets_the_list_of_all(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CASES["llama"], "model_type": family}))
    fix = refused(catalog.load_model, str(tmp_path)).fix
    assert ("did you mean 'llama'?" in fix) == (family == "lama")
    assert "granite" in fix and "qwen3" in fix


def test_a_name_of_the_hub_is_told_as_one() -> None:
    with pytest.raises(UsageError) as caught:
        catalog.load_model("meta-llama/Llama-3.1-8B")
    told = str(caught.value)
    assert "nothing is downloaded" in told and "hf download meta-llama/Llama-3.1-8B" in told
    assert "--model llama-3.1-8b is a preset" in told


def test_an_unknown_architecture_is_told_before_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba9"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match="'mamba9' is not known"):
        catalog.load_model(str(tmp_path))
