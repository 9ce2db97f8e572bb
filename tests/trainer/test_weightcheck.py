"""Weights that were cut off or are missing are told from their headers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtop.presets.errors import UsageError
from llmtop.trainer.weightcheck import check_weights


def write_tensors(file: Path, values: int = 16) -> bytes:
    tensor = {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    whole = len(header).to_bytes(8, "little") + header + b"\0" * 4 * values
    file.write_bytes(whole)
    return whole


def test_whole_files_pass(tmp_path: Path) -> None:
    check_weights(tmp_path)
    write_tensors(tmp_path / "model.safetensors")
    check_weights(tmp_path)


def test_every_cut_is_found(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    whole = write_tensors(file)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="model.safetensors is damaged"):
            check_weights(tmp_path)
    file.write_bytes(whole + b"x")
    with pytest.raises(UsageError, match="damaged"):
        check_weights(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"{}x", b'{"w": 1}', b'{"w": {"data_offsets": []}}', b"\xff\xff"])
def test_what_is_no_header_is_told(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UsageError, match="damaged"):
        check_weights(tmp_path)


def test_the_files_of_an_index_must_be_there_and_whole(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for text, told in (
        ("{", "no JSON"),
        ("{}", "names no tensor"),
        ('{"weight_map": {}}', "names no tensor"),
    ):
        index.write_text(text)
        with pytest.raises(UsageError, match=told):
            check_weights(tmp_path)
    index.write_text(
        json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors", "u": "a.safetensors"}})
    )
    write_tensors(tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="b.safetensors is missing") as caught:
        check_weights(tmp_path)
    assert "names 2 files, and 1" in caught.value.why
    whole = write_tensors(tmp_path / "b.safetensors")
    check_weights(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(whole[:-1])
    with pytest.raises(UsageError, match="b.safetensors is damaged"):
        check_weights(tmp_path)
