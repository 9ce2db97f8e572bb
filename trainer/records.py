"""Files of text and their records: what may be read, and errors that name file, line and field."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtop.presets.errors import UsageError, nearest
from llmtop.profiler.units import counted

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")

_START_BYTES = 1 << 16
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
        raise no_field(f"{where}: no field '{text_field}'", "fields", text_field, record)
    text = record[text_field]
    if not isinstance(text, str):
        raise field_is_no_text(f"{where}: field", text_field, record)
    return _whole(text)


def _whole(text: str) -> str:
    """The text with a replacement character for each half of a surrogate pair: those have no bytes."""
    if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def no_field(what: str, things: str, wanted: str, record: Mapping[str, Any]) -> UsageError:
    """The error for a record, or a row of columns, that lacks the wanted one."""
    names = sorted(record)
    told = f"its {things} are: {', '.join(names)}"
    guess = nearest(wanted, names)
    chats = [name for name in names if _is_chat(record[name])]
    if chats and (guess is None or guess in chats):
        return _chat(what, f"{told}; '{chats[0]}' holds the messages of a chat")
    return UsageError(what, why=told, fix=f"name the one that holds the text: --text-field {guess or 'NAME'}")


def field_is_no_text(what: str, text_field: str, record: Mapping[str, Any]) -> UsageError:
    """The error for a field that is there and holds something else; `what` leads its name."""
    value = record[text_field]
    if _is_chat(value):
        return _chat(f"{what} '{text_field}' holds the messages of a chat", "")
    texts = sorted(name for name, other in record.items() if isinstance(other, str))
    named = f" Its text fields: {', '.join(texts)}" if texts else ""
    return UsageError(
        f"{what} '{text_field}' is {type(value).__name__}, not text",
        why=f"the trainer takes plain text.{named}" if named else "the trainer takes plain text",
        fix=f"name the one that holds the text: --text-field {texts[0] if len(texts) == 1 else 'NAME'}",
    )


def _is_chat(value: object) -> bool:
    """Whether a field holds turns: of role and content, or as ShareGPT's from and value."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in value)
    )


def _chat(what: str, why: str) -> UsageError:
    plain = "llmtop's trainer takes plain text"
    return UsageError(
        what,
        why=f"{why}, and {plain}" if why else plain,
        fix="render each chat into a field 'text' with the tokenizer's chat template (docs/scripts.md has the"
        " lines), or watch a training script of your own: llmtop run -- python your_sft.py",
    )


def check_text_start(path: Path) -> None:
    """Raise UsageError for a file whose beginning is no text."""
    try:
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
        # A character that the cut goes through is no error.
        codecs.getincrementaldecoder(TEXT_ENCODING)().decode(start)
    except UnicodeDecodeError as error:
        raise not_text(path, f"{error.reason} at byte {error.start:,}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}", why=error.strerror or str(error)) from error
    if b"\0" in start:
        raise not_text(path, f"byte {start.index(0):,} is NUL")


def not_text(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is not UTF-8 text", why=why, fix="convert it to UTF-8, or take it out of the data"
    )


def check_enough(path: Path, files: Sequence[Path], ranks: int, seq_len: int) -> None:
    """Raise UsageError where the files cannot hold a sequence for each rank: no token is less than a byte."""
    held = sum(file.stat().st_size for file in files)
    if held == 0:
        raise UsageError(f"data {path} is empty", fix="give a file or folder that holds text")
    # Each document may begin and end with a token of its own.
    if held + 2 * len(files) < ranks * seq_len:
        raise UsageError(
            f"data {path} holds too little text: {counted(held, 'byte')}",
            why=f"{counted(ranks, 'sequence')} of {seq_len:,} tokens are needed, each of a byte or more",
            fix="give more text, or a smaller --seq-len",
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
        raise not_text(path, error.reason) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}", why=error.strerror or str(error)) from error
