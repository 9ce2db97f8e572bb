"""Runs over hosts that are all this machine: in place of ssh, srun and pdsh stand programs of the test."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.hosts import HostDir, Hosts, Launcher, read_hosts
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer.hosts.hostfile import with_ranks
from llmtop.trainer.hosts.left import hosts_left_open
from llmtop.trainer.hosts.start import start_over_hosts
from tests.hosts.lab import wait_for
from tests.recorded_spec import recorded_prediction, recorded_spec
from tests.trainer import supervised
from tests.trainer.supervised import Supervised

GRACES = "peers=0.3,kill=5,stop=30,stop_kill=5,save=30,finish=30,host=60"
VARIABLES = ("LLMTOP_WORKER_COMMAND", "LLMTOP_GRACES")
_SSH = """#!/bin/sh
# The last word is what sshd would hand to a shell; the one before it is the host.
for word; do host=$last; last=$word; done
mkdir -p "{notes}" && echo "$host" >> "{notes}/reached"
if [ -e "{notes}/unreachable-$host" ]; then echo "ssh: $host: No route to host" >&2; exit 255; fi
{more}
exec sh -c "$last"
"""
_SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
command = words[len([word for word in words if word.startswith("--")]):]
passed = {{name: os.environ[name] for name in options["export"].split(",") if name in os.environ}}
nodes = options["nodelist"].split(",")
assert len(nodes) == int(options["nodes"]) == int(options["ntasks"])
own = {{"SLURM_JOB_ID": "77", "SLURM_NNODES": options["nodes"]}}
tasks = [
    subprocess.Popen(command, env={{**passed, **own, "SLURM_NODEID": str(at), "SLURMD_NODENAME": node}})
    for at, node in enumerate(nodes)
]
sys.exit(max(task.wait() for task in tasks))
"""
_PDSH = """#!{python}
import subprocess, sys
words = sys.argv[1:]
hosts, command = words[words.index("-w") + 1].split(","), words[-1]
tasks = [subprocess.Popen(["sh", "-c", command.replace("%h", host)]) for host in hosts]
sys.exit(max(task.wait() for task in tasks))
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, *, more: str = "") -> None:
    """Put programs called ssh, srun and pdsh ahead of all others; `more`: lines for every host."""
    programs = folder / "bin"
    programs.mkdir()
    texts = {
        "ssh": _SSH.format(notes=folder / "notes", more=more),
        "srun": _SRUN.format(python=sys.executable),
        "pdsh": _PDSH.format(python=sys.executable),
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin:/usr/sbin:/sbin")


class OnHosts(Supervised):
    """One run under a lead."""

    def nothing_is_left(self) -> None:
        """A lead that starts supervisors by ssh says of none that it left before it is gone. Of starters, and
        of hosts that do not answer, it promises no more than that they end by themselves."""
        hosts = read_hosts(self.run)
        if hosts is not None and hosts.launcher == "ssh" and not hosts_left_open(self.run):
            super().nothing_is_left()
            assert self.supervisors_left() == []
        else:
            self.comes_to_nothing()

    def supervisors_left(self) -> list[str]:
        """Hosts whose supervisors live, where that can be seen."""
        return []

    def comes_to_nothing(self) -> None:
        """Of supervisors whose lead is gone: they leave by themselves, after they have said so."""
        wait_for(
            lambda: self.processes() == [] and self.supervisors_left() == [],
            lambda: (self.processes(), self.supervisors_left(), self.log()),
        )


class OverHosts(OnHosts):
    """One run under a real lead and real supervisors of hosts, over fake ranks."""

    def __init__(
        self,
        root: Path,
        *,
        hosts: int = 2,
        slots: int = 1,
        launcher: Launcher = "ssh",
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        spec = recorded_spec("cpu", ranks=slots, nodes=hosts, **{"sample_seconds": 0.2, **options})
        self.run = RunDir.create(root, spec, recorded_prediction(spec), {"train_batch_size": 8})
        self.supervisor_pid = 0
        pool = {f"h{number}": tuple(range(slots)) for number in range(1, hosts + 1)}
        self.hosts = Hosts(hosts=with_ranks(pool), launcher=launcher, python=python, variables=VARIABLES)

    def start(self) -> None:
        self.supervisor_pid = start_over_hosts(self.run, self.hosts, {})

    def host(self, name: str) -> HostDir:
        host = self.hosts.host(name)
        assert host is not None
        return HostDir(self.run.path, host)

    def supervisors_left(self) -> list[str]:
        return [host.name for host in self.hosts.hosts if self.host(host.name).supervisor_alive()]

    def host_events(self, name: str) -> list[AnyEvent]:
        return EventTail(self.host(name).events_path(SUPERVISOR)).poll()

    def log(self) -> str:
        own = [self.host(host.name).log_path(SUPERVISOR) for host in self.hosts.hosts]
        return super().log() + "".join(path.read_text() for path in own if path.exists())


Start = Callable[..., OverHosts]
"""The fixture `start`: a scenario of `fake_rank` to a run that was started."""


def fake_ranks(monkeypatch: pytest.MonkeyPatch, scenario: str, graces: str = GRACES) -> None:
    supervised.fake_ranks(monkeypatch, scenario, graces)


def quoted(path: Path) -> str:
    return shlex.quote(str(path))
