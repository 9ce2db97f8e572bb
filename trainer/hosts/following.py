"""A run on another machine, `[USER@]HOST:RUN`, as a folder here that is kept alike over SSH."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.foreign import decode_json
from llmtop.presets.paths import cache_dir
from llmtop.profiler.record.holding import hold
from llmtop.profiler.record.hosts import HOSTS_FILE, Host, Hosts
from llmtop.profiler.record.naming import meant
from llmtop.profiler.record.remote import Remote, write_remote
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.units import format_bytes
from llmtop.trainer.hosts.hostfile import require_host_name
from llmtop.trainer.hosts.link import Link
from llmtop.trainer.hosts.selection import Place, Wanted, select, with_part
from llmtop.trainer.hosts.ssh import link_command
from llmtop.trainer.hosts.twin import Twin

PYTHON = "LLMTOP_REMOTE_PYTHON"
"""The interpreter there, if it is not `python3`; any of 3.8 or newer does, without llmtop."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FORM = re.compile(r"(?P<host>[^:/\s]+):(?P<run>[^:]*)")
_SILENT_SECONDS = 30.0
_MOST_FAILURES = 3
"""In a row, before anything has come whole."""
_KEPT_SECONDS = 30 * 86400.0
"""A copy that nobody has looked at for so long is removed."""
_PAUSE_SECONDS = 0.02
_TELL_SECONDS = 5.0
"""Between two words about how much has come, where it takes that long."""


def remote_name(ref: str) -> tuple[str, str] | None:
    """Host and run of `[USER@]HOST:RUN`; None for a run of this machine."""
    match = _FORM.fullmatch(ref)
    return (match["host"], match["run"]) if match else None


def python_there() -> str:
    return os.environ.get(PYTHON, "python3")


def unanswered(link: Link) -> str:
    """Why nothing is to be expected of a machine that was asked; empty while something is."""
    fails = link.refused or link.failures >= _MOST_FAILURES
    if not fails and link.quiet_seconds <= _SILENT_SECONDS:
        return ""
    return link.problem or "it does not answer"


def how_to_try(host: str) -> str:
    """What to do about a machine that cannot be asked."""
    by_hand = f"ssh {host} {python_there()} --version"
    return f"try: {by_hand} (it must ask nothing); {PYTHON} names another interpreter there"


class Following:
    """Keeps the folder alike until it is closed. Raises LlmtopError where host or run are not there.

    A run on one machine and one over hosts of few ranks come whole. Of a larger one what it is, what its lead
    says and the newest summary of each host come, and of a rank or a host only what was asked for (`bring`).
    """

    def __init__(
        self,
        host: str,
        ref: str,
        wanted: Wanted = "whole",
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        """`tell` is given a few words now and then where it takes long until the folder is alike."""
        require_host_name(host, ref)
        self._host = host
        self._tell = tell
        self._held = ExitStack()
        self._asked = 0
        """What the newest `bring` is asked about."""
        self._remote: Remote | None = None
        self._twin: Twin | None = None
        self._folder: Path | None = None
        self._link = Link(link_command(host, python_there()), {"do": "runs"}, None, on_change=self._note)
        self._link.start()
        try:
            self._begin(ref, wanted)
        except BaseException:
            self.close()
            raise

    def _begin(self, ref: str, wanted: Wanted) -> None:
        self._wait(lambda: self._link.runs is not None)
        run_id = self._meant(ref)
        opening = {"do": "open", "id": run_id, "pid": "supervisor.pid"}
        self._link.open({**opening, "tell": HOSTS_FILE}, None)
        self._wait(lambda: self._link.told is not None)
        self._kept, place = select(wanted, _hosts(self._link.told or ""))
        self._is_whole = place != "parts"
        self._folder = self._make_folder(run_id, place)
        self._twin = Twin(self._folder, self._kept)
        self._link.open(opening, self._twin)
        self._wait(lambda: self._link.synced > 0 and self._link.heard_pong)
        self._note()
        self.run = RunDir.open(self._folder)

    def close(self) -> None:
        self._link.close()
        self._held.close()

    @property
    def problem(self) -> str:
        """Why nothing comes now; empty while it does."""
        return "" if self._link.opened else self._link.problem or "the connection is gone"

    def bring(self, host: Host, ranks: range) -> int:
        """Have these ranks of a host come too, from now on; what `has_come` is to be asked about."""
        assert self._twin is not None
        kept = self._kept if self._is_whole else with_part(self._kept, host, ranks)
        if kept != self._kept:
            self._kept = self._twin.kept = kept
            self._asked = self._link.follow_anew()
        return self._asked

    def has_come(self, number: int) -> bool:
        return self._link.synced >= number

    def _meant(self, ref: str) -> str:
        """The run's id. `ref` is as on that machine: an id, a beginning or end of one, `latest`."""
        if not ref:
            raise UsageError(
                f"no run of {self._host} is named",
                fix=f"llmtop ls {self._host}: lists them; {self._host}:latest is the newest",
            )
        # They become folders here.
        found = sorted((name for name in self._link.runs or () if RUN_ID.fullmatch(name)), reverse=True)
        empty = UsageError(
            f"there is no run '{ref}' on {self._host}",
            why=f"{self._link.about.get('runs_root', 'its folder of runs')} there is empty",
            fix="LLMTOP_RUNS_DIR is read there too: set it in the shell's start file there",
        )
        otherwise = f"see `llmtop ls {self._host}:`"
        return meant(ref, found, thing="run", things="runs", empty=empty, otherwise=otherwise)

    def _wait(self, ready: Callable[[], bool]) -> None:
        due = time.monotonic() + _TELL_SECONDS
        while not ready():
            if why := unanswered(self._link):
                raise LlmtopError(f"{self._host} cannot be asked", why=why, fix=how_to_try(self._host))
            if time.monotonic() >= due and (left := self._link.left_bytes) is not None:
                due = time.monotonic() + _TELL_SECONDS
                self._tell(
                    f"{self._host}: {format_bytes(self._link.came_bytes)} of {format_bytes(left)} have come"
                )
            time.sleep(_PAUSE_SECONDS)

    def _make_folder(self, run_id: str, place: Place) -> Path:
        """Kept for the next time, unless another viewer is using it."""
        base = cache_dir() / "remote"
        # Two spellings of a host are two folders, whatever they have in them.
        name = hashlib.sha256(self._host.encode()).hexdigest()[:12]
        folder = base / (f"{name}-parts" if place == "parts" else name) / run_id
        _forget_old(base)
        try:
            if not place:
                raise LlmtopError("nothing of it is kept")
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._held.enter_context(hold(folder, lambda: LlmtopError("it is in use")))
        except LlmtopError:
            made = self._held.enter_context(tempfile.TemporaryDirectory(prefix="llmtop-"))
            folder = Path(made) / run_id
            folder.mkdir(mode=0o700)
        control = folder / "control"
        control.mkdir(exist_ok=True, mode=0o700)
        for old in control.glob("*.json"):
            # One that did not get there then is not asked now.
            old.unlink()
        return folder

    def _note(self) -> None:
        """In the folder, for whoever reads it: whether the run's supervisor lives, and the connection."""
        link, before = self._link, self._remote
        if self._folder is None:
            return
        clock, lost_at = link.clock, None
        if not link.opened:
            lost_at = before.lost_at if before is not None and before.lost_at is not None else time.time()
        differs = clock is not None and abs(clock.offset_seconds) > max(1.0, clock.error_seconds)
        now = Remote(
            host=self._host,
            path=link.far_path,
            alive=link.alive is True,
            connected=link.opened,
            problem=self.problem,
            lost_at=lost_at,
            ahead_seconds=round(clock.offset_seconds, 1) if clock is not None and differs else 0.0,
        )
        if now != before:
            self._remote = now
            write_remote(self._folder, now)


def _forget_old(base: Path) -> None:
    """Remove copies that nobody has looked at for long, unless somebody does now."""
    for folder in base.glob("*/*"):
        try:
            # Whoever looks at one writes into it how the connection is.
            if time.time() - folder.stat().st_mtime > _KEPT_SECONDS:
                with hold(folder, lambda: LlmtopError("it is in use")):
                    shutil.rmtree(folder)
        except (OSError, LlmtopError):
            continue  # another one has removed it, uses it, or it is not ours


def _hosts(told: str) -> Hosts | None:
    """None for a run on one machine, and for a list that cannot be read: who opens the run says so."""
    try:
        return decode_json(told.encode(), Hosts) if told else None
    except msgspec.MsgspecError:
        return None
