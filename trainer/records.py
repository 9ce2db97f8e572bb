"""One record of a JSONL file as text, or the error that names file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from llmtop.presets.errors import UsageError, nearest

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


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
    if not isinstance(record, dict):
        raise UsageError(f"{where}: not a JSON object", fix='each line must look like {"text": "..."}')
    if text_field not in record:
        raise no_field(f"{where}: no field '{text_field}'", "fields", text_field, map(str, record))
    text = record[text_field]
    if not isinstance(text, str):
        raise UsageError(f"{where}: field '{text_field}' is {type(text).__name__}, not text")
    return text


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
        with path.open(encoding="utf-8") as file:
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
