"""What of a run's folder goes into an archive, how, and what stays at home and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from msgspec import Struct

from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import file_bytes
from llmtop.profiler.units import counted, format_bytes

How = Literal["events", "document", "text", "bytes"]
"""Lines of events; JSON; other text; as it is. Secrets are taken out of the first three."""

_TEXTS = frozenset({".txt", ".log", ".md", ".toml", ".csv", ".ini", ".yaml", ".yml"})
_HEAVY: dict[str, str] = {
    "checkpoints": "weights and optimizer states: llmtop resume needs them where the run was",
    "tokens": "the training data as numbers",
    "tokenizer": "made from the training data",
}
OF_A_LIVE_RUN = frozenset(
    {"control", "standby", "bookmark", "looks.json", "supervisor.pid", "imported.json", "remote.json"}
    | {"live.json", "save.json", "snapshot.json"}
)
_NOT_OF_THE_RECORD = frozenset(
    OF_A_LIVE_RUN
    | {"environment.json", "report.html", "report.json", "findings.json", "changes.json", "memory.csv"}
    | {"metrics", "README.txt", "manifest.json"}
)
"""Of a run that goes on, or a cache, or made anew for each archive: an imported run has those already."""
_LOCKS = (".lock", ".pid")
LOGS = "the ranks' output was left out on request"
BINARY = "may hold names and code of yours; --snapshots takes them along as they are"


LONGEST_NAME_BYTES = 240
DEEPEST = 6


def name_problem(name: str) -> str:
    """Why a name has no place in an archive; empty for one that has.

    Both sides ask it: who packs leaves such a file at home, who unpacks refuses the whole.
    """
    if not name.isprintable() or "\\" in name:
        return "its name has characters that no export writes"
    parts = name.split("/")
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts):
        return "its name leads out of the run's folder"
    if any(part.startswith(".") for part in parts):
        return "no export holds hidden files"
    if len(parts) > DEEPEST or len(name.encode("utf-8", "replace")) > LONGEST_NAME_BYTES:
        return "its name is longer than any of a run"
    return ""


class Member(Struct, frozen=True, kw_only=True):
    """A file of the folder that goes into the archive, under its own name."""

    name: str
    path: Path
    how: How


class LeftOut(Struct, frozen=True, kw_only=True):
    """What an archive does not hold, so that nobody looks for it in vain."""

    name: str
    """A file, or a folder with all that is in it."""
    size_bytes: int
    files: int = 1
    why: str

    @property
    def in_words(self) -> str:
        files = f" in {counted(self.files, 'file')}" if self.files != 1 else ""
        return f"{self.name} ({format_bytes(self.size_bytes)}{files}): {self.why}"


def contents(run: RunDir, *, logs: bool, snapshots: bool) -> tuple[list[Member], list[LeftOut]]:
    """The small documents first. Links are not followed, and hidden files are somebody's unfinished ones."""
    members: list[Member] = []
    left: list[LeftOut] = []
    for name, path in _files(run.path):
        how, why = _judged(name, logs=logs, snapshots=snapshots)
        why = name_problem(name) or why
        if how is not None and not why:
            members.append(Member(name=name, path=path, how=how))
        else:
            left.append(LeftOut(name=name, size_bytes=file_bytes(path), why=why))
    for folder, why in _HEAVY.items():
        sizes = [file_bytes(path) for _, path in _files(run.path / folder)]
        if sizes:
            left.append(LeftOut(name=folder, size_bytes=sum(sizes), files=len(sizes), why=why))
    order: dict[How, int] = {"document": 0, "text": 1, "bytes": 2, "events": 3}
    return sorted(members, key=lambda member: (order[member.how], member.name)), left


def _judged(name: str, *, logs: bool, snapshots: bool) -> tuple[How | None, str]:
    suffix = PurePosixPath(name).suffix.lower()
    if suffix == ".jsonl":
        return "events", ""
    if suffix == ".json":
        return "document", ""
    if suffix in _TEXTS:
        return ("text", "") if logs or suffix != ".log" else (None, LOGS)
    return ("bytes", "") if snapshots else (None, BINARY)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Regular files by their name within the run, without what is never told of."""
    for place, folders, names in os.walk(folder):
        at = Path(place)
        inside = at.relative_to(folder)
        if not inside.parts:
            folders[:] = [one for one in folders if one not in _HEAVY and one not in _NOT_OF_THE_RECORD]
            names = [one for one in names if one not in _NOT_OF_THE_RECORD]
        names = [name for name in names if not name.endswith(_LOCKS)]
        folders[:] = sorted(one for one in folders if not one.startswith(".") and not (at / one).is_symlink())
        for name in sorted(names):
            path = at / name
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield (inside / name).as_posix(), path
