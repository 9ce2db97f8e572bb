"""The user's data as text, and every way in which it can be wrong."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.trainer.worker.text import Piece, read_pieces


def documents(source: Path | str, field: str = "text") -> list[str]:
    whole: list[str] = []
    held = ""
    for piece in read_pieces(str(source), field):
        held += piece.text
        if piece.ends_document:
            whole.append(held)
            held = ""
    assert held == ""
    return whole


def test_the_built_in_english_is_large_and_always_the_same() -> None:
    first, second = documents("builtin:english"), documents("builtin:english")
    assert first == second
    assert sum(map(len, first)) > 400_000
    assert " the " in "".join(first)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("eins\n\nzwei ü\n", encoding="utf-8")
    assert documents(path) == ["eins\n\nzwei ü\n"]


def test_a_large_file_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    text = "a line of text\n" * 200_000
    path.write_text(text)
    pieces = list(read_pieces(str(path), "text"))
    assert len(pieces) > 2
    assert max(len(piece.text) for piece in pieces) < len(text)
    assert documents(path) == [text]


def test_the_home_of_nobody_is_a_missing_file() -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        read_pieces("~no-such-user/x.txt", "text")


def test_jsonl_takes_the_named_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one", "n": 1}\n\n{"body": "two"}\n')
    assert documents(path, "body") == ["one", "two"]


def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"text": "a\ud800b\ud83d\ude00"}')
    assert documents(path) == ["a\ufffdb\U0001f600"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_byte_order_mark_is_no_text(name: str, tmp_path: Path) -> None:
    line = json.dumps({"text": "one"})
    (tmp_path / name).write_text(f"\ufeff{line}", encoding="utf-8")
    assert documents(tmp_path) == ["one" if name == "a.jsonl" else line]


@pytest.mark.parametrize("record", ["[" * 100_000, '{"n": ' + "9" * 5000 + "}"])
def test_json_beyond_reason_names_file_and_line(record: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + record + "\n")
    with pytest.raises(UsageError, match=r"a\.jsonl, line 2: not readable JSON"):
        documents(path)


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="not a regular file"):
        documents(tmp_path / "pipe.jsonl")


def test_a_folder_is_read_sorted_and_deep_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "z.txt").write_text("last")
    (tmp_path / "b" / "m.jsonl").write_text('{"text": "middle"}')
    (tmp_path / "a.md").write_text("first")
    (tmp_path / ".git" / "x").write_bytes(b"\xff\xfe\x00")
    assert documents(tmp_path) == ["first", "middle", "last"]


def test_a_saved_dataset_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(LlmtopError, match=r"pip install -e '\.\[data\]'"):
        documents(tmp_path)


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    rows = datasets.Dataset.from_dict({"body": ["one", "two"]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(folder))
    assert documents(folder, "body") == ["one", "two"]
    with pytest.raises(UsageError, match="no column 'text'"):
        documents(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bad.jsonl", b'{"text": "ok"}\n{"text": \n', ["bad.jsonl, line 2", "not JSON"]),
        ("list.jsonl", b"[1, 2]\n", ["list.jsonl, line 1", "not a JSON object"]),
        ("other.jsonl", b'{"body": "x"}\n', ["line 1", "no field 'text'", "body", "--text-field"]),
        ("number.jsonl", b'{"text": 5}\n', ["line 1", "int"]),
        ("latin.txt", b"caf\xe9 au lait\n", ["latin.txt", "UTF-8"]),
        ("image.png", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", ["image.png", "UTF-8"]),
        ("nul.txt", b"fine\nnot \x00 fine\n", ["nul.txt", "line 2", "NUL"]),
    ],
)
def test_wrong_files_are_named_with_the_place(
    tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        documents(path)
    message = str(caught.value)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("source", ["/no/such/file", "builtin:latin"])
def test_a_source_that_is_not_there_is_named(source: str) -> None:
    with pytest.raises(UsageError, match=source):
        documents(source)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no files"):
        documents(tmp_path)


def test_an_empty_file_is_an_empty_document(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    assert list(read_pieces(str(path), "text")) == [Piece("", True)]


def test_json_text_keeps_its_escapes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = 'quotes " and\nlines \u2603'
    path.write_text(json.dumps({"text": text}))
    assert documents(path) == [text]
