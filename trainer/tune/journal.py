"""A search's folder: what was asked, every trial as a line, and the run directory of each.

tunes/ID/tune.json       what was asked (`Asked`)
tunes/ID/journal.jsonl   a line when a trial begins and one when it has ended (`Line`)
tunes/ID/trials/RUN/     run directories: `llmtop report PATH` reads them
tunes/ID/best.toml       the recipe that `llmtop run` accepts; best.deepspeed.json beside it
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from llmtop.presets.errors import LlmtopError, UsageError, nearest
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.eventlog import ends_torn, write_line
from llmtop.profiler.record.rundir import LATEST, runs_root, unused_path
from llmtop.profiler.record.wholefile import write_atomic
from llmtop.trainer.tune.rank import Outcome, Tried
from llmtop.trainer.tune.space import Candidate, Space, key_of

_ASKED = "tune.json"
_JOURNAL = "journal.jsonl"


class Asked(Struct, frozen=True, kw_only=True):
    """What a search was started with."""

    schema_version: int = 1
    spec: RunSpec
    """The setting to start from."""
    fix: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    trials: int = 12
    minutes: float = 5.0


class Line(Struct, frozen=True, kw_only=True):
    """One line of the journal."""

    event: Literal["began", "ended", "interrupted"]
    number: int
    choice: dict[str, Any]
    change: dict[str, Any]
    at: float
    """Wall clock."""
    run: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    predicted_step_seconds: float | None = None
    needed_bytes: int | None = None
    step_seconds: float | None = None
    """Mean of the steps after the first ones."""
    spread_seconds: float | None = None
    """Standard deviation of a step."""
    steps_measured: int = 0
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    """Allocated, of the largest rank."""
    wall_seconds: float = 0.0
    """From launch to the end, start-up included."""


class TuneDir:
    """The folder of one search, written by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: Path, asked: Asked) -> TuneDir:
        path = unused_path(root, asked.spec.model.name)
        try:
            (path / "trials").mkdir(parents=True, mode=0o700)
            write_atomic(path / _ASKED, msgspec.json.format(msgspec.json.encode(asked), indent=1) + b"\n")
        except OSError as error:
            raise LlmtopError(
                f"cannot create a search in {root}",
                why=error.strerror or str(error),
                fix="make the folder writable, free some space, or set LLMTOP_RUNS_DIR to another folder",
            ) from error
        return cls(path)

    @property
    def tune_id(self) -> str:
        return self.path.name

    @property
    def trials_root(self) -> Path:
        return self.path / "trials"

    def asked(self) -> Asked:
        try:
            return msgspec.json.decode((self.path / _ASKED).read_bytes(), type=Asked)
        except (OSError, msgspec.MsgspecError) as error:
            raise LlmtopError(f"cannot read {self.path / _ASKED}", why=str(error)) from error

    def append(self, line: Line) -> None:
        """A whole line in one write, on the disk before anything else happens."""
        path = self.path / _JOURNAL
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            write_line(descriptor, msgspec.json.encode(line), after_torn=ends_torn(descriptor))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lines(self) -> list[Line]:
        """Every whole line; one that was torn when the machine went away is passed over."""
        path = self.path / _JOURNAL
        found: list[Line] = []
        for text in path.read_bytes().splitlines() if path.exists() else ():
            try:
                found.append(msgspec.json.decode(text, type=Line))
            except msgspec.MsgspecError:
                continue
        return found

    def ended(self) -> list[Line]:
        """One line for each trial that is over: what began and never ended was lost with its machine."""
        last: dict[str, Line] = {}
        for line in self.lines():
            last[key_of(line.choice)] = line
        return [
            line if line.event == "ended" else msgspec.structs.replace(
                line, event="ended", outcome="failed", reason="lost: the search itself was killed during it"
            )
            for line in last.values()
            if line.event != "interrupted"
        ]  # fmt: skip


def tunes_root() -> Path:
    """Beside the runs; a run is never taken for one, as it has no spec of its own."""
    return runs_root() / "tunes"


def find_tune(root: Path, ref: str) -> TuneDir:
    """By id, a unique beginning or end of one, `latest`, or a folder's path."""
    if os.sep in ref and (Path(ref) / _ASKED).exists():
        return TuneDir(Path(ref))
    ids = sorted(path.parent.name for path in root.glob(f"*/{_ASKED}"))
    if not ids:
        raise UsageError(f"there is no search '{ref}'", why=f"{root} is empty", fix="start one: llmtop tune")
    hits = [ids[-1]] if ref == LATEST else [i for i in ids if i.startswith(ref) or i.endswith(ref)]
    if len(hits) != 1:
        guess = nearest(ref, ids)
        raise UsageError(
            f"'{ref}' means {len(hits)} searches" if hits else f"there is no search '{ref}'",
            why=", ".join(hits[:5]),
            fix="give more of the id" if hits else f"did you mean '{guess or ids[-1]}'?",
        )
    return TuneDir(root / hits[0])


def tried_of(lines: list[Line], space: Space) -> list[Tried]:
    """Journal lines as the ranking has them; those that the space no longer holds are left out."""
    known: dict[str, Candidate] = {one.key: one for one in space.candidates}
    found = []
    for line in lines:
        candidate = known.get(key_of(line.choice))
        if candidate is not None and line.outcome is not None:
            found.append(Tried(candidate=candidate, outcome=line.outcome, step_seconds=line.step_seconds))
    return found
