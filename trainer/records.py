"""Files of text and their records: what may be read, and errors that name file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmtop.presets.errors import UsageError, nearest

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")

TEXT_ENCODING = "utf-8-sig"
"""UTF-8; a byte order mark at the start of a file is no part of its text."""


def files_under(folder: Path) -> Iterator[Path]:
    """The files of a folder of any depth, without hidden ones and those in hidden folders."""
    return (
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def check_regular(path: Path) -> None:
    """Raise UsageError for a pipe, socket or device: only one rank could read it, if it ends at all."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(
            f"data {path} is not a regular file",
            why="every rank reads the data for itself, from a file that stays",
            fix="write the text to a file and name that",
        )


def is_json_lines(path: Path) -> bool:
    return path.suffix.lower() in JSON_SUFFIXES


def record_text(path: Path, number: int, line: str, text_field: str) -> str:
    """The text of the record in line `number`."""
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where}: not JSON ({error.msg} at column {error.colno})",
            fix="a JSONL file holds one whole JSON object on each line",
        ) from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or nested beyond any real record.
        raise UsageError(f"{where}: not readable JSON", why=str(error).splitlines()[0]) from error
    if not isinstance(record, dict):
        raise UsageError(f"{where}: not a JSON object", fix='each line must look like {"text": "..."}')
    if text_field not in record:
        raise no_field(f"{where}: no field '{text_field}'", "fields", text_field, map(str, record))
    text = record[text_field]
    if not isinstance(text, str):
        raise UsageError(f"{where}: field '{text_field}' is {type(text).__name__}, not text")
    return _whole(text)


def _whole(text: str) -> str:
    """The text with a replacement character for each half of a surrogate pair: those have no bytes."""
    if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def no_field(what: str, things: str, wanted: str, known: Iterable[str]) -> UsageError:
    """The error for records or columns that lack the wanted one."""
    names = sorted(known)
    guess = nearest(wanted, names)
    return UsageError(
        what,
        why=f"its {things} are: {', '.join(names)}",
        fix=f"name the one that holds the text: --text-field {guess or 'NAME'}",
    )


def check_first_record(path: Path, text_field: str) -> None:
    """Read as far as the first record and raise UsageError for what training would stumble over there."""
    try:
        with path.open(encoding=TEXT_ENCODING) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    record_text(path, number, line, text_field)
                    return
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text",
            why=error.reason,
            fix="convert it to UTF-8, or take it out of the data",
        ) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}", why=error.strerror or str(error)) from error
