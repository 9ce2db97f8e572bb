"""Part of the far end of a link (`remote.py`): as much of each run as a list of runs shows.

Any Python 3.8 runs this, with its library alone.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmtop.trainer.hosts.farfolder import newest_of

_MOST_DOCUMENT_BYTES = 4 << 20
_HEAD_BYTES = 16 * 1024
"""Of a log's first file: who began it and when."""


def glances(
    root: Path, files: list[list[Any]], of_hosts: list[list[Any]], lives: Callable[[dict[str, Any]], bool]
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """A message for each run, the newest first: its files in `parts`, one after the other in the bytes.

    `files`: names below a run's folder, each with 0, or for a log with how many bytes of its end are wanted
    (of numbered ones, as `rank-*.jsonl`, that of the lowest number); `of_hosts`: more of them, of a run that
    another machine has launched and whose own log is not here.
    """
    for folder in _newest_first(root):
        parts: list[list[Any]] = []
        body = b""
        is_part = not (folder / "supervisor.jsonl").exists()
        for name, end_bytes in [*files, *(of_hosts if is_part else [])]:
            for path, content in _contents(folder, name, end_bytes):
                parts.append([path, len(content)])
                body += content
        told = {
            "say": "run",
            "id": folder.name,
            "path": str(folder),
            "alive": _is_supervised(folder, lives),
            "age_seconds": _age_seconds(folder / "spec.json"),
            "parts": parts,
        }
        yield told, body


def _newest_first(root: Path) -> list[Path]:
    found = []
    for path in root.glob("[!.]*/spec.json"):
        try:
            found.append((*_given(path.parent.name, path.stat().st_mtime_ns), path.parent))
        except OSError:
            continue  # it is being removed
    return [folder for _, _, folder in sorted(found, reverse=True)]


def _given(name: str, written_ns: int) -> tuple[str, int]:
    """As `record.naming.age_order` sorts them, which is not to be had here."""
    if re.match(r"\d{8}-\d{6}-", name):
        return name[:15], written_ns
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(written_ns // 10**9)), written_ns


def _contents(folder: Path, name: str, end_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Of a document all of it; of a log its beginning and its end, as one file."""
    try:
        if not end_bytes:
            for path in sorted(folder.glob(name)):
                if path.stat().st_size <= _MOST_DOCUMENT_BYTES:
                    yield str(path.relative_to(folder)), path.read_bytes()
            return
        if "*" in name:
            name = _lowest(folder, name)
        stem = name.rpartition(".")[0]
        present = [one for one in os.listdir(folder) if one.startswith(stem + ".")]  # noqa: PTH208
        for one in newest_of(present):
            if one.endswith(".jsonl"):
                yield name, _ends(folder, name, one, end_bytes)
    except OSError:
        return  # it is being removed, or is not ours to read


def _lowest(folder: Path, pattern: str) -> str:
    """Of numbered logs, whichever of their files there are, the first file's name of the lowest number."""
    before, _, after = pattern.partition("*")
    words = (path.name[len(before) :].partition(".")[0] for path in folder.glob(pattern))
    numbers = [int(word) for word in words if word.isdigit()]
    return f"{before}{min(numbers)}{after}" if numbers else pattern


def _ends(folder: Path, first: str, newest: str, end_bytes: int) -> bytes:
    """Whole lines of the beginning of a log's first file, and of the end of its newest ones."""
    begin, end = _end(folder / newest, end_bytes)
    last = newest
    if not begin and newest != first:
        # It was gone on from in another file a moment ago.
        number = int(newest[len(first) - len("jsonl") : -len(".jsonl")]) - 1
        last = first[: -len("jsonl")] + f"{number}.jsonl" if number else first
        begin, before = _end(folder / last, end_bytes)
        end = before + end
    head_bytes = min(_HEAD_BYTES, begin) if last == first else _HEAD_BYTES
    try:
        with (folder / first).open("rb") as file:
            head = file.read(head_bytes)
    except OSError:
        return end  # it was thinned away, and the beginning with it
    return head[: head.rfind(b"\n") + 1] + end


def _end(path: Path, end_bytes: int) -> tuple[int, bytes]:
    """Whole lines of a file's end, and from where on they were looked for."""
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - end_bytes)
            file.seek(begin)
            end = file.read()
    except OSError:
        return 0, b""
    return begin, end[end.find(b"\n") + 1 :] if begin else end


def _is_supervised(folder: Path, lives: Callable[[dict[str, Any]], bool]) -> bool:
    own = folder / "supervisor.pid"
    paths = [own] if own.exists() else sorted(folder.glob("hosts/*/supervisor.pid"))
    return any(_lives(path, lives) for path in paths)


def _lives(path: Path, lives: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        return lives(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _age_seconds(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0
