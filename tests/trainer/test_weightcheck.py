"""A folder of weights that is not whole is refused before anything is started, whatever its form."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtop.presets.errors import UsageError
from llmtop.presets.weightfiles import safetensors_files, stored_tensors
from llmtop.trainer import weightcheck
from llmtop.trainer.weightcheck import check_weights
from tests.recorded_spec import recorded_spec

INDEX = "model.safetensors.index.json"


def write_tensors(path: Path, **header: Any) -> None:
    """A safetensors file of one weight, 2 x 4 numbers of 2 bytes."""
    entry = {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]}
    text = json.dumps({"__metadata__": {"format": "pt"}, "a.weight": entry | header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))


def write_index(folder: Path, *names: str, index: str = INDEX) -> None:
    (folder / index).write_text(json.dumps({"weight_map": {f"t{n}": name for n, name in enumerate(names)}}))


def check(folder: Path) -> None:
    check_weights(msgspec.structs.replace(recorded_spec(), weights_dir=str(folder)))


def refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as told:
        check(folder)
    assert told.value.fix
    return f"{told.value.what}; {told.value.why}"


def test_whole_folders_pass(tmp_path: Path) -> None:
    one, several, old, older = (tmp_path / name for name in ("one", "several", "old", "older"))
    for folder in (one, several, old, older):
        folder.mkdir()
    write_tensors(one / "model.safetensors")
    for name in ("model-1.safetensors", "model-2.safetensors"):
        write_tensors(several / name)
    write_index(several, "model-1.safetensors", "model-2.safetensors")
    with zipfile.ZipFile(old / "pytorch_model.bin", "w") as saved:
        saved.writestr("archive/data.pkl", b"")
    (older / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    for folder in (one, several, old, older):
        check(folder)


@pytest.mark.parametrize(
    ("version", "named", "refused"),
    [
        ("2.9.1+cu128", None, True),
        ("2.5.0", "consolidated.pth", True),
        ("2.9.1", "other.safetensors", False),
        ("2.10.0", None, False),
        ("3.0", "consolidated.pth", False),
        (None, None, False),
    ],
)
def test_pickles_are_read_by_a_torch_that_reads_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, named: str | None, refused: bool
) -> None:
    monkeypatch.setattr(weightcheck, "torch_version", lambda: version)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    spec = recorded_spec()
    config = spec.hf_config | ({"transformers_weights": named} if named else {})
    spec = msgspec.structs.replace(spec, weights_dir=str(tmp_path), hf_config=config)
    if not refused:
        check_weights(spec)
        return
    with pytest.raises(UsageError, match=f"pickles, which torch {re.escape(version or '')} does not") as told:
        check_weights(spec)
    assert "2.10" in told.value.fix


def test_headers_say_what_the_library_says(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "none": torch.zeros(0), "one": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = stored_tensors(safetensors_files(tmp_path))
    assert {key: (tensor.shape, tensor.dtype, tensor.size_bytes) for key, tensor in stored.items()} == {
        "a": ((3, 5), "BF16", 30),
        "none": ((0,), "F32", 0),
        "one": ((), "F32", 4),
    }


def test_every_cut_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "model.safetensors: " in refusal(tmp_path)


def test_what_is_no_safetensors_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content, words in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"<html><body>404</body></html>", "no safetensors file"),
        (b"\2" + bytes(7) + b"[]", "does not describe tensors"),
        (b"\2" + bytes(7) + b"{{", "not JSON"),
    ):
        path.write_bytes(content)
        assert words in refusal(tmp_path)
    write_tensors(path, data_offsets=None)
    assert "does not describe tensors" in refusal(tmp_path)
    write_tensors(path, data_offsets=[0, 12])
    assert "4 bytes follow" in refusal(tmp_path)


@pytest.mark.parametrize("text", [b"{not json", b"\xff\xfe", b"[]", b'{"weight_map": {}}', b"[" * 100_000])
@pytest.mark.parametrize("index", [INDEX, "pytorch_model.bin.index.json"])
def test_a_broken_index_is_told(tmp_path: Path, text: bytes, index: str) -> None:
    (tmp_path / index).write_bytes(text)
    assert index in refusal(tmp_path)


@pytest.mark.parametrize("index", [INDEX, "pytorch_model.bin.index.json"])
def test_files_that_are_missing_are_named(tmp_path: Path, index: str) -> None:
    write_index(tmp_path, "part-1", "part-2", index=index)
    (tmp_path / "part-1").touch()
    assert f"{index} names part-2, which" in refusal(tmp_path)


def test_parts_without_an_index_are_told(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model-00001-of-00002.safetensors")
    assert "names that are not looked for" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\3\4 and no end"])
def test_what_torch_did_not_save_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert "broken or cut short; pytorch_model.bin: " in refusal(tmp_path)
