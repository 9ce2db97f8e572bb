"""A search's folder: what was asked, every trial as a line, and the run directory of each.

tunes/ID/tune.json       what was asked (`Asked`)
tunes/ID/journal.jsonl   a line when a trial begins and one when it has ended (`Line`)
tunes/ID/trials/RUN/     run directories: `llmtop report PATH` reads them
tunes/ID/search.pid      who is at it, pid and start time
tunes/ID/search.log      what a search wrote that nobody sat at (the app starts such)
tunes/ID/nest.log        what the process wrote that holds the libraries (`nest.py`)
tunes/ID/best.toml       the recipe that `llmtop run` accepts; best.deepspeed.json beside it
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.foreign import decode_json, read_json, why_unreadable
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.eventlog import ends_torn, write_line
from llmtop.profiler.record.holding import hold
from llmtop.profiler.record.naming import age_order, meant
from llmtop.profiler.record.processidentity import ProcessIdentity, process_identity
from llmtop.profiler.record.rundir import runs_root, unused_path
from llmtop.profiler.record.wholefile import document, write_atomic
from llmtop.trainer.tune.rank import Outcome

TRIALS, MINUTES = 12, 5.0
"""Of a search where nobody says otherwise."""
_ASKED = "tune.json"
_JOURNAL = "journal.jsonl"
_HOLDER = "search.pid"


class Asked(Struct, frozen=True, kw_only=True):
    """What a search was started with."""

    schema_version: int = 1
    spec: RunSpec
    """The setting to start from."""
    fix: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    trials: int = TRIALS
    minutes: float = MINUTES


class Line(Struct, frozen=True, kw_only=True):
    """One line of the journal."""

    event: Literal["began", "ended", "interrupted"]
    """`interrupted`: it told nothing, and may be begun again."""
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
    error_seconds: float | None = None
    """Standard error of `step_seconds`."""
    steps_measured: int = 0
    runs: int = 1
    """How many trials of this setting the figures are of."""
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    """Allocated, of the largest rank."""
    wall_seconds: float = 0.0
    """From launch to the end, start-up included."""


class TuneDir:
    """The folder of one search; whoever writes to it holds it (`held`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: Path, asked: Asked) -> TuneDir:
        path = unused_path(root, asked.spec.model.name)
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            # One by one: a mode given with parents is that of the last alone.
            path.mkdir(mode=0o700)
            (path / "trials").mkdir(mode=0o700)
            write_atomic(path / _ASKED, document(asked))
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

    @property
    def log_path(self) -> Path:
        return self.path / "search.log"

    @property
    def journal_path(self) -> Path:
        return self.path / _JOURNAL

    @contextmanager
    def held(self) -> Iterator[None]:
        """Refused where another process is at this search: each would end the trials of the other."""
        taken = UsageError(
            f"search {self.tune_id} is going on already",
            why=f"another process holds {self.path}",
            fix=f"wait for its end, or interrupt it; then: llmtop tune --resume {self.tune_id}",
        )
        with ExitStack() as stack:
            try:
                stack.enter_context(hold(self.path, lambda: taken))
                write_atomic(self.path / _HOLDER, msgspec.json.encode(process_identity(os.getpid())))
            except OSError as error:
                raise self._failure(error, "use") from error
            stack.callback(self._forget_holder)
            yield

    def _forget_holder(self) -> None:
        with suppress(OSError):  # with its folder gone there is nothing that would be read
            (self.path / _HOLDER).unlink()

    def holder(self) -> ProcessIdentity | None:
        """Who is at this search now; None when nobody is."""
        try:
            found = read_json(self.path / _HOLDER, ProcessIdentity)
        except (OSError, msgspec.MsgspecError):
            return None
        return found if found.alive else None

    def asked(self) -> Asked:
        try:
            return read_json(self.path / _ASKED, Asked)
        except (OSError, msgspec.MsgspecError) as error:
            raise LlmtopError(
                f"cannot read {self.path / _ASKED}",
                why=why_unreadable(error),
                fix="another version of llmtop made the search, or it is damaged: start a new one;"
                f" llmtop report PATH reads each of its trials in {self.trials_root}",
            ) from error

    def append(self, line: Line) -> None:
        """A whole line in one write, on the disk before anything else happens. Raises LlmtopError."""
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self.journal_path, flags, 0o600)
            try:
                write_line(descriptor, msgspec.json.encode(line), after_torn=ends_torn(descriptor))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._failure(error, "write to") from error

    def write(self, name: str, content: bytes) -> Path:
        """A file of the result. Raises LlmtopError."""
        try:
            write_atomic(self.path / name, content)
        except OSError as error:
            raise self._failure(error, "write to") from error
        return self.path / name

    def lines(self) -> list[Line]:
        """Every whole line; one that was torn when the machine went away is passed over."""
        try:
            content = self.journal_path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise self._failure(error, "read") from error
        return decode_lines(content)

    def ended(self) -> list[Line]:
        """One line for each trial that is over, in the order of their ends."""
        return [line for line in self.lines() if line.event == "ended"]

    def open_trial(self) -> Line | None:
        """The trial that has begun and of which nothing more was written: its search was killed."""
        lines = self.lines()
        return lines[-1] if lines and lines[-1].event == "began" else None

    def _failure(self, error: OSError, verb: str) -> LlmtopError:
        return LlmtopError(
            f"search {self.tune_id} cannot {verb} its folder",
            why=f"{error.filename or self.path}: {error.strerror or error}",
            fix=f"free some space and make {self.path} writable; then: llmtop tune --resume {self.tune_id}"
            if self.path.is_dir()
            else "its folder is gone, and its trials with it: start it anew",
        )


def decode_lines(content: bytes) -> list[Line]:
    """Those lines of a journal that are whole and known."""
    found: list[Line] = []
    for text in content.splitlines():
        try:
            found.append(decode_json(text, Line))
        except msgspec.MsgspecError:
            continue
    return found


def tunes_root() -> Path:
    """Beside the runs; a run is never taken for one, as it has no spec of its own."""
    return runs_root() / "tunes"


def list_tunes(root: Path) -> list[TuneDir]:
    """Every search, the newest first."""
    found: list[tuple[str, int, str]] = []
    for path in root.glob(f"*/{_ASKED}"):
        with suppress(FileNotFoundError):  # it is being removed
            found.append(age_order(path.parent.name, path.stat().st_mtime_ns))
    return [TuneDir(root / name) for _, _, name in sorted(found, reverse=True)]


def find_tune(root: Path, ref: str) -> TuneDir:
    """By id, a unique beginning or end of one, `latest`, or a folder's path."""
    if os.sep in ref:
        return _at(Path(ref))
    found = meant(
        ref,
        [tune.tune_id for tune in list_tunes(root)],
        thing="search",
        things="searches",
        empty=UsageError(f"there is no search '{ref}'", why=f"{root} is empty", fix="start one: llmtop tune"),
        otherwise=f"its folders are in {root}",
    )
    return TuneDir(root / found)


def _at(path: Path) -> TuneDir:
    if not (path / _ASKED).exists():
        raise UsageError(
            f"{path} is no search", why=f"there is no {_ASKED} in it", fix="give the id of one, or latest"
        )
    return TuneDir(path)
