"""What a run says of its weights, data and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets import resolve
from llmtop.presets.cautions import cautions
from llmtop.presets.errors import UsageError
from llmtop.presets.inputs import Inputs, inputs, require_tokenizer
from llmtop.presets.resolve import Layer, Machine
from llmtop.presets.spec import RunSpec, ValueSource
from tests.presets.family_cases import CASES

BOX = Machine(gpu="cpu", gpus=1, host_memory_bytes=2**34)


def spec_of(**values: Any) -> RunSpec:
    layer = Layer(ValueSource.RECIPE, "test.toml", {"model": "tiny-llama-cpu", "precision": "fp32"} | values)
    return resolve.assemble([layer], name="test", machine=BOX)


def told(**values: Any) -> Inputs:
    return inputs(spec_of(**values))


def test_a_preset_has_neither_weights_nor_tokenizer() -> None:
    found = told()
    assert found.weights.startswith("random (the preset has none")
    assert found.data.startswith("builtin:english")
    assert found.tokenizer.startswith("made from the data (byte-level BPE")
    assert told(tokenizer="bytes").tokenizer.startswith("bytes")
    assert told(tokenizer="/t").tokenizer == "from /t"


def test_a_folder_brings_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CASES["llama"]))
    assert told(model=str(folder)).weights.startswith("random (there are none with config.json")
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    found = told(model=str(folder), data="/texts/a.jsonl", text_field="body")
    assert found.weights == f"from {folder}"
    assert found.tokenizer == f"the model's own, from {folder}"
    assert found.data == "/texts/a.jsonl, field 'body' of its records"


def test_real_weights_want_their_own_tokenizer(tmp_path: Path) -> None:
    """Tokens of one made from the data mean nothing to them; random weights learn any."""
    (tmp_path / "config.json").write_text(json.dumps(CASES["llama"]))
    require_tokenizer(spec_of(model=str(tmp_path)))
    require_tokenizer(spec_of())
    (tmp_path / "model.safetensors").touch()
    real = spec_of(model=str(tmp_path))
    with pytest.raises(UsageError, match="has weights and no tokenizer") as caught:
        require_tokenizer(real)
    assert "tokenizer.json" in caught.value.fix and "--tokenizer FOLDER" in caught.value.fix
    assert inputs(real).tokenizer.startswith(f"none: {tmp_path}")
    assert any("no tokenizer, so a run here is refused" in caution for caution in cautions(real))
    for choice in ("bytes", str(tmp_path)):
        require_tokenizer(spec_of(model=str(tmp_path), tokenizer=choice))
    (tmp_path / "tokenizer.json").touch()
    require_tokenizer(real)
    assert not any("no tokenizer" in caution for caution in cautions(real))


def test_of_a_run_elsewhere_the_tokenizer_is_not_said_to_be_missing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CASES["llama"]))
    (folder / "model.safetensors").touch()
    spec = spec_of(model=str(folder))
    folder.rename(tmp_path / "away")
    assert inputs(spec).tokenizer == f"the model's own, from {folder}, which is not on this machine"
