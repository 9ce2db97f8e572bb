"""A run's folder: made, opened, found; what lies in it is named in `runfiles.py`."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.foreign import read_json
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.naming import age_order, meant, short_ids
from llmtop.profiler.record.processidentity import ProcessIdentity, process_identity
from llmtop.profiler.record.remote import read_remote
from llmtop.profiler.record.runfiles import HARDWARE as HARDWARE
from llmtop.profiler.record.runfiles import SUPERVISOR as SUPERVISOR
from llmtop.profiler.record.runfiles import RunFiles
from llmtop.profiler.record.settingfiles import (
    DEEPSPEED,
    IN_FORCE,
    PREDICTION,
    SPEC,
    read_document,
    read_spec,
    write_setting,
)
from llmtop.profiler.record.settingfiles import InForce as InForce
from llmtop.profiler.record.wholefile import document, random_hex, sync_folder, write_atomic

_SHELL_ACTS_ON = re.compile(r"""[;&|<>()$`\\"'*?\[\]{}#!~^]""")


def runs_root() -> Path:
    """`$LLMTOP_RUNS_DIR`, else `$XDG_STATE_HOME/llmtop/runs`, else `~/.local/state/llmtop/runs`.

    Raises UsageError where something else than a folder is there; it may not be there yet.
    """
    explicit, state = os.environ.get("LLMTOP_RUNS_DIR"), os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    root = Path(explicit) if explicit else base / "llmtop" / "runs"
    if not str(root).isprintable():
        raise UsageError(
            f"{ascii(str(root))[1:-1]} cannot be the folder of the runs",
            why="its name is not text that can be printed",
            fix="set LLMTOP_RUNS_DIR to another folder",
        )
    if not root.is_dir() and os.path.lexists(root):
        raise UsageError(
            f"{root} is not a folder",
            why="$LLMTOP_RUNS_DIR says that the runs are there" if explicit else "the runs are kept there",
            fix="set LLMTOP_RUNS_DIR to a folder; it is made where it is not there yet",
        )
    return root


class RunDir(RunFiles):
    """One run's folder. Files are read when asked for; `open` has already read the spec."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._specs: dict[int, RunSpec] = {}
        self._predictions: dict[int, Prediction] = {}
        self.ranks_here: range | None = None
        """Where only a part of the run is read: the ranks that it is about."""

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @classmethod
    def create(
        cls,
        root: Path,
        spec: RunSpec,
        prediction: Prediction,
        deepspeed_config: dict[str, Any],
    ) -> RunDir:
        """Make a new run's folder with its three documents. It appears whole or not at all."""
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            final = unused_path(root, spec.name)
            aside = root / f".{final.name}.new"
            aside.mkdir(mode=0o700)
            for folder in ("control", "checkpoints"):
                (aside / folder).mkdir(mode=0o700)
            write_setting(aside, spec, prediction, deepspeed_config)
            aside.rename(final)
            sync_folder(root)
        except OSError as error:
            raise LlmtopError(
                f"cannot create a run in {root}",
                why=error.strerror or str(error),
                fix="make the folder writable, free some space, or set LLMTOP_RUNS_DIR to another folder",
            ) from error
        run = cls(final)
        run._specs[0], run._predictions[0] = spec, prediction
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open an existing run; raises LlmtopError naming the file that is missing or broken."""
        if not path.is_dir():
            raise LlmtopError(f"{path} is not a run", why="there is no such folder", fix="see `llmtop ls`")
        run = cls(path)
        run.spec()
        return run

    def spec(self, setting: int | None = None) -> RunSpec:
        """Of a setting by its number; by default of the one in force."""
        number = self.in_force().setting if setting is None else setting
        if number not in self._specs:
            self._require_plain_name()
            path = self.setting_dir(number) / SPEC
            self._specs[number] = read_spec(path)
        return self._specs[number]

    def _require_plain_name(self) -> None:
        """The name stands in commands that a person is told to type."""
        if _SHELL_ACTS_ON.search(self.run_id) or not self.run_id.isprintable():
            raise LlmtopError(
                f"{self.path} is not taken for a run",
                why="a shell or a terminal would act on characters of its name",
                fix="rename the folder: letters, digits, '.', '_' and '-'",
            )

    def prediction(self, setting: int | None = None) -> Prediction:
        number = self.in_force().setting if setting is None else setting
        if number not in self._predictions:
            self._predictions[number] = read_document(self.setting_dir(number) / PREDICTION, Prediction)
        return self._predictions[number]

    def deepspeed_config(self, setting: int | None = None) -> dict[str, Any]:
        number = self.in_force().setting if setting is None else setting
        return read_document(self.setting_dir(number) / DEEPSPEED, dict[str, Any])

    def in_force(self) -> InForce:
        """The setting in force; raises LlmtopError when the file that names it is damaged."""
        path = self.path / IN_FORCE
        return read_document(path, InForce) if path.exists() else InForce()

    def put_in_force(
        self, setting: int, *, fall_back: int | None = None, ended_on: int | None = None
    ) -> None:
        """From now on whoever asks for the run's spec gets that setting's."""
        in_force = InForce(setting=setting, fall_back=fall_back, ended_on=ended_on)
        write_atomic(self.path / IN_FORCE, document(in_force))

    def add_setting(self, spec: RunSpec, prediction: Prediction, deepspeed_config: dict[str, Any]) -> int:
        """Keep a setting that is to be tried; its number. It appears whole or not at all."""
        folder = self.settings_dir
        folder.mkdir(mode=0o700, exist_ok=True)
        numbers = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
        number = max(numbers, default=0) + 1
        aside = folder / f".{number}.{random_hex(3)}.new"
        aside.mkdir(mode=0o700)
        write_setting(aside, spec, prediction, deepspeed_config)
        aside.rename(self.setting_dir(number))
        sync_folder(folder)
        return number

    def given_devices(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of the newest start that had it; None: none had, or it cannot be read."""
        try:
            return read_json(self.devices_path, str)
        except (OSError, msgspec.MsgspecError):
            return None

    @property
    def is_imported(self) -> bool:
        """Whether it came from an archive: then it is only looked at, nothing of it runs here."""
        return self.imported_path.exists()

    def require_own(self, what: str) -> None:
        """Raise UsageError for a run that came from an archive; `what` as in `takes no requests`."""
        if self.is_imported:
            raise UsageError(
                f"run {self.run_id} {what}",
                why="it came from an archive: nothing of it runs here",
                fix=f"look at it: llmtop report {self.run_id}",
            )
        if self._supervisors_of_hosts():
            raise UsageError(
                f"run {self.run_id} {what} here",
                why="this folder is one host's part of it: another machine has launched the run",
                fix="ask there, where `llmtop ls` lists it too",
            )

    def settings(self) -> tuple[int, ...]:
        """Numbers of all that were ever tried; 0 is the one that the run was launched with."""
        try:
            names = [path.name for path in self.settings_dir.iterdir()]
        except OSError:
            names = []
        return (0, *sorted(int(name) for name in names if name.isdecimal()))

    def write_supervisor_pid(self, pid: int | None = None) -> None:
        """Say who supervises this run: by default the calling process."""
        identity = process_identity(os.getpid() if pid is None else pid)
        if identity is None:
            raise LlmtopError(
                f"the supervisor of {self.run_id} ended at once",
                why=f"process {pid} is gone",
                fix=f"read {self.log_path(SUPERVISOR)}",
            )
        write_atomic(self.supervisor_pid_path, document(identity))

    def supervisor_identity(self) -> ProcessIdentity | None:
        """Who supervises this run, as written; None before that or when the file is not readable."""
        try:
            return read_json(self.supervisor_pid_path, ProcessIdentity)
        except (OSError, msgspec.MsgspecError):
            return None

    def supervisor_alive(self) -> bool:
        """Whether the process that wrote `supervisor.pid` still runs (a reused pid does not count).

        Of a run on another machine: whether it ran when that was heard of last.
        """
        if self.is_imported:
            return False
        remote = read_remote(self.path)
        if remote is not None:
            return remote.alive
        identity = self.supervisor_identity()
        if identity is None:
            return any(one.alive for one in self._supervisors_of_hosts())
        return identity.alive

    def _supervisors_of_hosts(self) -> list[ProcessIdentity]:
        """Of a host's part of a run that another machine has launched; none of any other folder.

        The launching machine's has the lead's own `supervisor.pid` before anything of a host comes.
        """
        if (self.path / "supervisor.pid").exists() or read_remote(self.path) is not None:
            return []
        found = []
        for path in sorted(self.path.glob("hosts/*/supervisor.pid")):
            with suppress(OSError, msgspec.MsgspecError):
                found.append(read_json(path, ProcessIdentity))
        return found

    def created(self) -> float | None:
        """Wall clock at which the spec was written; None when the run is gone, or was not made here."""
        if self.is_imported:
            return None
        try:
            return self.spec_path.stat().st_mtime
        except OSError:
            return None


def list_runs(root: Path) -> tuple[RunDir, ...]:
    """Every run under `root`, newest first. Nothing is decoded: a listed run may still be broken."""
    found: list[tuple[str, int, str]] = []
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return ()
    for name in names:
        try:
            written = (root / name / SPEC).stat().st_mtime_ns
        except OSError:
            continue  # not a run, or one that is being removed
        found.append(age_order(name, written))
    return tuple(RunDir(root / name) for _, _, name in sorted(found, reverse=True))


def find_run(root: Path, ref: str) -> RunDir:
    """The run that `ref` means: an id, a unique beginning or end of one, `latest`, or a folder's path."""
    if os.sep in ref:
        return RunDir.open(Path(ref))
    found = meant(
        ref,
        [run.run_id for run in list_runs(root)],
        thing="run",
        things="runs",
        empty=UsageError(f"there is no run '{ref}'", why=f"{root} is empty", fix="start one: llmtop demo"),
        otherwise="see `llmtop ls`",
    )
    return RunDir.open(root / found)


def short_id(run: RunDir) -> str:
    """What commands take for a run where it is, by the runs that are there now."""
    # Nobody here knows the others of another machine.
    others = list_runs(run.path.parent) if read_remote(run.path) is None else ()
    return short_ids((run.run_id,), [one.run_id for one in others])[run.run_id]


def unused_path(root: Path, name: str) -> Path:
    """A new id is sortable by start (UTC), readable and unique: `20261129-184512-cpu-demo-3f2a`."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32].strip("-") or "run"
    while True:
        now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        path = root / f"{now}-{slug}-{random_hex(2)}"
        if not path.exists():
            return path
