"""The runs of other machines, as much of each as a list shows: small folders here, read as any run's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from llmtop.profiler.record.remote import Remote, write_remote
from llmtop.trainer.hosts.following import RUN_ID, python_there, unanswered
from llmtop.trainer.hosts.hostfile import require_host_name
from llmtop.trainer.hosts.link import Link
from llmtop.trainer.hosts.ssh import link_command
from llmtop.trainer.hosts.twin import Kept, Twin

_DOCUMENTS = (
    "spec.json",
    "in-force.json",
    "settings/*/spec.json",
    "hosts.json",
    "imported.json",
    "supervisor.pid",
)
_LOGS = (("supervisor.jsonl", 32 * 1024), ("rank-0.jsonl", 16 * 1024))
"""With how much of their end: the newest step and how the run ended are there."""
_OF_HOSTS = (("hosts/*/supervisor.pid", 0), ("hosts/*/supervisor.jsonl", 0), ("rank-*.jsonl", 16 * 1024))
"""Of a run that another machine has launched: how it is with the part that is there, by its first rank."""
_KEPT = Kept(whole=(*_DOCUMENTS, *(name for name, _ in (*_LOGS, *_OF_HOSTS))))
_PAUSE_SECONDS = 0.02


class HostRuns(Struct, frozen=True, kw_only=True):
    """What one machine has told."""

    host: str
    root: str = ""
    """Its folder of runs."""
    runs: tuple[Path, ...] = ()
    """Folders here, the newest run first."""
    problem: str = ""
    """Why it has told nothing; empty where it has told all."""


def list_elsewhere(hosts: Sequence[str], folder: Path) -> list[HostRuns]:
    """Ask all of them at the same time, each for as long as it answers; in the order of `hosts`.

    `folder` takes what they tell. Raises UsageError for a name that is none of a host, and without ssh.
    """
    for host in hosts:
        require_host_name(host, f"{host}:")
    asked = [_Asked(host, folder / str(number)) for number, host in enumerate(hosts)]
    try:
        while not all(one.is_over for one in asked):
            time.sleep(_PAUSE_SECONDS)
        return [one.told for one in asked]
    finally:
        for one in asked:
            one.link.close()


class _Asked:
    """One host, and what it has told so far."""

    def __init__(self, host: str, folder: Path) -> None:
        self._host, self._folder = host, folder
        self._runs: list[Path] = []
        self._root, self._all_told = "", False
        files = [*([name, 0] for name in _DOCUMENTS), *([name, most] for name, most in _LOGS)]
        command = link_command(host, python_there())
        self.link = Link(
            command,
            {"do": "list", "files": files, "of_hosts": [[name, most] for name, most in _OF_HOSTS]},
            None,
            take=self._take,
        )
        self.link.start()

    @property
    def is_over(self) -> bool:
        return self._all_told or bool(unanswered(self.link))

    @property
    def told(self) -> HostRuns:
        if self._all_told:
            return HostRuns(host=self._host, root=self._root, runs=tuple(self._runs))
        return HostRuns(host=self._host, problem=unanswered(self.link))

    def _take(self, message: dict[str, Any], body: bytes) -> None:
        """In the link's thread. Raises ValueError for what is no run's."""
        if message["say"] == "listing":
            # Also after a connection that broke in the middle.
            self._root, self._runs = message["root"], []
        elif message["say"] == "listed":
            self._all_told = True
        elif message["say"] == "run" and RUN_ID.fullmatch(message["id"]):
            self._keep(message, body)

    def _keep(self, message: dict[str, Any], body: bytes) -> None:
        path = self._folder / message["id"]
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        twin, at = Twin(path, _KEPT), 0
        for name, size in message["parts"]:
            twin.take({"say": "whole", "path": name, "mtime_ns": 0}, body[at : at + size])
            at += size
        write_remote(path, Remote(host=self._host, path=message["path"], alive=message["alive"] is True))
        spec = path / "spec.json"
        if spec.exists():
            # A run without a supervisor is told by its age.
            written = time.time() - float(message["age_seconds"])
            os.utime(spec, (written, written))
            self._runs.append(path)
