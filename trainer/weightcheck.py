"""Whether a folder's safetensors files are whole, told from their headers alone and without their library.

A download that was cut off is found here in milliseconds, and not after every rank has imported torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from llmtop.presets.errors import UsageError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_FIX = "download it again, or give another folder"


def check_weights(folder: Path) -> None:
    """Raise UsageError for a file of the weights that is missing, cut off or none of its kind."""
    for file in _files(folder):
        problem = _problem(file)
        if problem:
            raise UsageError(f"model {folder}: {file.name} is damaged", why=problem, fix=_FIX)


def _files(folder: Path) -> list[Path]:
    """As the ranks will read them: the single file, else what the index names."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        return []
    try:
        listed = json.loads((folder / _INDEX).read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model {folder}: {_INDEX} is no JSON", why=str(error), fix=_FIX) from error
    shards = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise UsageError(f"model {folder}: {_INDEX} names no tensor", fix=_FIX)
    files = [folder / name for name in sorted(map(str, shards.values()))]
    files = list(dict.fromkeys(files))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UsageError(
            f"model {folder}: {absent[0]} is missing",
            why=f"{_INDEX} names {len(files)} files, and {len(absent)} of them are not there",
            fix="download what is missing",
        )
    return files


def _problem(file: Path) -> str:
    """What is wrong with the file; empty for a whole one."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
                return f"it has {size:,} bytes and ends within its header, or is no safetensors file"
            header = json.loads(opened.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = _LENGTH_BYTES + length + max(ends, default=0)
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError):
        return "its header is not one of safetensors"
    return "" if size == whole else f"it has {size:,} bytes and must have {whole:,}"
