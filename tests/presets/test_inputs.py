"""What a run says of its weights, data and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtop.presets import resolve
from llmtop.presets.inputs import Inputs, inputs
from llmtop.presets.resolve import Layer, Machine
from llmtop.presets.spec import ValueSource
from tests.presets.family_cases import CASES

BOX = Machine(gpu="cpu", gpus=1, host_memory_bytes=2**34)


def told(**values: Any) -> Inputs:
    layer = Layer(ValueSource.RECIPE, "test.toml", {"model": "tiny-llama-cpu", "precision": "fp32"} | values)
    return inputs(resolve.assemble([layer], name="test", machine=BOX))


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
