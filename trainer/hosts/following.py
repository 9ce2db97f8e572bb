"""A run on another machine, `[USER@]HOST:RUN`, as a folder here that is kept alike over SSH."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.record.holding import hold
from llmtop.profiler.record.naming import meant
from llmtop.profiler.record.remote import Remote, write_remote
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.hosts.hostfile import require_host_name
from llmtop.trainer.hosts.link import Link
from llmtop.trainer.hosts.ssh import link_command
from llmtop.trainer.hosts.twin import Kept, Twin

PYTHON = "LLMTOP_REMOTE_PYTHON"
"""The interpreter there, if it is not `python3`; any of 3.8 or newer does, without llmtop."""
_FORM = re.compile(r"(?P<host>[^:/\s]+):(?P<run>[^:]*)")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SILENT_SECONDS = 30.0
_PAUSE_SECONDS = 0.02
_KEPT = Kept(
    grow=("*.jsonl", "*.log", "hosts/*/*.jsonl", "hosts/*/*.log", "stacks/*.txt"),
    last=("supervisor*.jsonl",),
    whole=("*.json", "*.pid", "settings/*/*.json", "hosts/*/*.json", "hosts/*/*.pid", "snapshots/*"),
    # Requests are files of the run like any other: its supervisor there sees them as if they were made there.
    sent=("control/*.json",),
)


def remote_name(ref: str) -> tuple[str, str] | None:
    """Host and run of `[USER@]HOST:RUN`; None for a run of this machine."""
    match = _FORM.fullmatch(ref)
    return (match["host"], match["run"]) if match else None


class Following:
    """Keeps the folder alike until it is closed. Raises LlmtopError where host or run are not there."""

    def __init__(self, host: str, ref: str) -> None:
        require_host_name(host, ref)
        self._host = host
        self._command = link_command(host, os.environ.get(PYTHON, "python3"))
        self._held = ExitStack()
        self._remote: Remote | None = None
        run_id = self._find(ref)
        self._folder = self._make_folder(run_id)
        self._link = Link(
            self._command,
            {"do": "open", "id": run_id, "pid": "supervisor.pid"},
            Twin(self._folder, _KEPT),
            on_change=self._note,
        )
        self._link.start()
        self._wait(self._link, lambda: self._link.synced > 0 and self._link.heard_pong)
        self._note()
        self.run = RunDir.open(self._folder)

    def close(self) -> None:
        self._link.close()
        self._held.close()

    @property
    def problem(self) -> str:
        """Why nothing comes now; empty while it does."""
        return "" if self._link.opened else self._link.problem or "the connection is gone"

    def _find(self, ref: str) -> str:
        """The run's id. `ref` is as on that machine: an id, a beginning or end of one, `latest`."""
        link = Link(self._command, {"do": "runs"}, None)
        link.start()
        try:
            self._wait(link, lambda: link.runs is not None)
        finally:
            link.close()
        # They become folders here.
        found = sorted((name for name in link.runs or () if _RUN_ID.fullmatch(name)), reverse=True)
        empty = UsageError(
            f"there is no run '{ref}' on {self._host}",
            why=f"{link.about.get('runs_root', 'its folder of runs')} there is empty",
            fix="LLMTOP_RUNS_DIR is read there too: set it in the shell's start file there",
        )
        return meant(ref, found, thing="run", things="runs", empty=empty, otherwise="see `llmtop ls` there")

    def _wait(self, link: Link, ready: Callable[[], bool]) -> None:
        while not ready():
            if link.refused or link.quiet_seconds > _SILENT_SECONDS:
                raise LlmtopError(
                    f"{self._host} cannot be asked",
                    why=link.problem or "it does not answer",
                    fix=f"try: ssh {self._host} {os.environ.get(PYTHON, 'python3')} --version"
                    f" (it must ask nothing); {PYTHON} names another interpreter there",
                )
            time.sleep(_PAUSE_SECONDS)

    def _make_folder(self, run_id: str) -> Path:
        """Kept for the next time, unless another viewer is using it."""
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmtop" / "remote"
        # Two spellings of a host are two folders, whatever they have in them.
        folder = base / hashlib.sha256(self._host.encode()).hexdigest()[:12] / run_id
        try:
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
        """In the folder, for whoever reads it: whether the run's supervisor lives."""
        link = self._link
        now = Remote(host=self._host, path=link.far_path, alive=link.alive is True, connected=link.opened)
        if now != self._remote:
            self._remote = now
            write_remote(self._folder, now)
