"""The user's text as pieces: built-in English, text and JSONL files, folders of them, saved datasets."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.paths import expand_user
from llmtop.presets.version import install_words
from llmtop.trainer.records import (
    TEXT_ENCODING,
    check_regular,
    field_is_no_text,
    files_under,
    is_json_lines,
    no_field,
    not_text,
    record_text,
)

BUILTIN_ENGLISH = "builtin:english"

_PIECE_BYTES = 1 << 20
_DATASETS_MARKERS = ("dataset_info.json", "state.json", "dataset_dict.json")


class Piece(NamedTuple):
    """A stretch of one document."""

    text: str
    ends_document: bool


def read_pieces(source: str, text_field: str) -> Iterator[Piece]:
    """All text of a source, always in the same order. Raises LlmtopError naming the file that is wrong."""
    if source == BUILTIN_ENGLISH:
        return _builtin_english()
    if source.startswith("builtin:"):
        raise UsageError(f"data = {source!r} is not known", fix=f"use {BUILTIN_ENGLISH}, a file or a folder")
    path = Path(expand_user(source))
    if not path.exists():
        raise UsageError(f"data = {source!r}: there is no such file or folder")
    check_regular(path)
    if path.is_dir():
        if any((path / name).is_file() for name in _DATASETS_MARKERS):
            return _saved_dataset(path, text_field)
        return chain.from_iterable(_file_pieces(file, text_field) for file in _files_under(path))
    return _file_pieces(path, text_field)


def _builtin_english() -> Iterator[Piece]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Piece(topics[name], True)


def _files_under(folder: Path) -> list[Path]:
    files = sorted(files_under(folder))
    if not files:
        raise UsageError(f"data folder {folder} holds no files")
    return files


def _file_pieces(path: Path, text_field: str) -> Iterator[Piece]:
    if is_json_lines(path):
        return _json_lines(path, text_field)
    return _text_file(path)


def _text_file(path: Path) -> Iterator[Piece]:
    """One document, cut at line ends so that a large file is never held whole."""
    held: list[str] = []
    held_chars = 0
    try:
        with path.open(encoding=TEXT_ENCODING) as file:
            for number, line in enumerate(file, 1):
                if "\0" in line:
                    raise not_text(path, f"line {number} holds a NUL byte")
                held.append(line)
                held_chars += len(line)
                if held_chars >= _PIECE_BYTES:
                    yield Piece("".join(held), False)
                    held, held_chars = [], 0
    except UnicodeDecodeError as error:
        raise not_text(path, f"{error.reason} near byte {error.start} of a block") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    yield Piece("".join(held), True)


def _json_lines(path: Path, text_field: str) -> Iterator[Piece]:
    try:
        with path.open(encoding=TEXT_ENCODING) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Piece(record_text(path, number, line, text_field), True)
    except UnicodeDecodeError as error:
        raise not_text(path, error.reason) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _saved_dataset(path: Path, text_field: str) -> Iterator[Piece]:
    if importlib.util.find_spec("datasets") is None:
        raise LlmtopError(
            f"{path} is a saved `datasets` folder and the package `datasets` is not installed",
            fix=f"{install_words('data')}; or export the text as JSONL",
        )
    import datasets

    loaded: Any = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        split = "train" if "train" in loaded else sorted(loaded)[0]
        loaded = loaded[split]
    if text_field not in loaded.column_names:
        first = loaded[0] if len(loaded) else dict.fromkeys(loaded.column_names)
        raise no_field(f"{path}: no column '{text_field}'", "columns", text_field, first)
    for number, record in enumerate(loaded):
        text = record[text_field]
        if not isinstance(text, str):
            raise field_is_no_text(f"{path}, row {number}: column", text_field, record)
        yield Piece(text, True)


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {path}", why=error.strerror or str(error))
