"""A run in the lab, launched from its launching machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.rundir import list_runs
from tests.hosts.lab import Lab, wait_for, why_not
from tests.hosts.over_hosts import OnHosts
from tests.trainer.supervised import worker_command

IN_LAB = pytest.mark.skipif(bool(why_not()), reason=why_not() or "a lab can be made")
GRACES = "peers=0.3,kill=5,stop=5,stop_kill=3,save=60,finish=30,host=40"


@contextmanager
def tidy_lab(root: Path, hosts: int = 2, *, shared: bool = False) -> Iterator[Lab]:
    """A lab on whose hosts nothing but their sshd may be left."""
    with Lab(root, hosts, shared=shared) as made:
        yield made
        # A session that has just ended may still be on its way out.
        wait_for(
            lambda: all(len(made.processes(name)) <= 1 for name in made.names),
            lambda: {name: made.processes(name) for name in made.names},
        )


class InLab(OnHosts):
    """A run that was launched in the lab, as its launching machine sees it."""

    def __init__(self, lab: Lab) -> None:
        self.run = list_runs(lab.lead_runs)[0]
        self.supervisor_pid = 0
        self._lab = lab

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, lambda: (self.events(), self.log()))

    def log(self) -> str:
        logs = [*self.run.path.glob("hosts/*/supervisor.log"), *self.run.path.glob("rank-*.log")]
        return super().log() + "".join(path.read_text(errors="replace")[-2000:] for path in logs)

    def lines_of(self, rank: int) -> int:
        """Events of a rank that have come here."""
        return len(EventTail(self.run.events_path(rank)).poll())

    def far_path(self, host: str, name: str) -> Path:
        """Where the host itself has a file of the run."""
        return self._lab.runs_of(host) / self.run.run_id / name

    def far_bytes(self, host: str, name: str) -> bytes:
        """A file as the host itself has it."""
        return self.far_path(host, name).read_bytes()


def launch(lab: Lab, *words: str, hostfile: Path | None = None, **variables: str) -> InLab:
    """A run of the demo's recipe, for as long as it is wanted."""
    over = ("--hostfile", str(hostfile or lab.hostfile()))
    lab.llmtop(
        *("run", "cpu-demo", "--gpu", "cpu", *over, "--detach", "--force"),
        *("--sample-seconds", "0.5", "--steps", "100000", *words),
        *(word for name in variables for word in ("--env", name)),
        variables=variables,
    )
    return InLab(lab)


def fake(lab: Lab, scenario: str, *words: str, hostfile: Path | None = None, graces: str = GRACES) -> InLab:
    """The same over fake ranks."""
    variables = {"LLMTOP_WORKER_COMMAND": worker_command(scenario), "LLMTOP_GRACES": graces}
    return launch(lab, *words, hostfile=hostfile, **variables)
