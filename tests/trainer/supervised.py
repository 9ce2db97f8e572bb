"""Starts real supervisors over fake ranks, and looks at what they did."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent, RankStarted, RunEnded
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer import control
from llmtop.trainer.launch import start_supervisor
from llmtop.trainer.supervisor.rankenv import RUN_ID
from tests.recorded_spec import recorded_prediction, recorded_spec

FAKE_RANK = Path(__file__).with_name("fake_rank.py")
TIMEOUT_SECONDS = 180.0
GRACES = "peers=0.3,kill=0.3,stop=60,stop_kill=0.3,script=60,save=60,finish=60,folder=0.5"
"""For ranks that do what they are asked to: however busy the machine is, nobody loses patience with them."""
SHORT_GRACES = "peers=0.3,kill=0.3,stop=0.5,stop_kill=0.3,script=0.5,save=0.7,finish=60,folder=0.5"
"""For ranks that do not."""
_DEAF = ("is_stubborn", "is_deaf", "holds")


def graces_for(scenario: str) -> str:
    return SHORT_GRACES if scenario in _DEAF else GRACES


def worker_command(scenario: str) -> str:
    """What LLMTOP_WORKER_COMMAND has to be for a scenario of `fake_rank`."""
    return shlex.join([sys.executable, str(FAKE_RANK), scenario])


def fake_ranks(monkeypatch: pytest.MonkeyPatch, scenario: str, graces: str = "") -> None:
    """From now on runs that are started have ranks of this scenario; by default with its graces."""
    monkeypatch.setenv("LLMTOP_WORKER_COMMAND", worker_command(scenario))
    monkeypatch.setenv("LLMTOP_GRACES", graces or graces_for(scenario))


_Kind = TypeVar("_Kind")


class Supervised:
    """One run under a real supervisor."""

    def __init__(self, root: Path, ranks: int = 2, **options: Any) -> None:
        options = {"sample_seconds": 0.1, **options}
        spec = recorded_spec("cpu", ranks=ranks, **options)
        self.run = RunDir.create(root, spec, recorded_prediction(spec), {"train_batch_size": 8})
        self.supervisor_pid = 0

    def start(self) -> None:
        self.supervisor_pid = start_supervisor(self.run)

    def events(self, src: str | int = SUPERVISOR) -> list[AnyEvent]:
        return EventTail(self.run.events_path(src)).poll()

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        return [event for event in self.events() if isinstance(event, kind)]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < end, (self.events(), self.log())
            assert self.run.supervisor_alive() or condition(), (self.events(), self.log())
            time.sleep(0.01)

    def wait_for_step(self, number: int) -> None:
        """Of all ranks, which the supervisor has told of by then: the logs of both are written apart."""
        ranks = range(self.run.spec().world_size)
        self.wait_for(
            lambda: (
                all(any(getattr(event, "step", 0) >= number for event in self.events(rank)) for rank in ranks)
                and {event.rank for event in self.of(RankStarted)} >= set(ranks)
            )
        )

    def wait_for_files(self, name: str) -> None:
        self.wait_for(
            lambda: all((self.run.path / f"{name}-{r}").exists() for r in range(self.run.spec().world_size))
        )

    def end(self) -> RunEnded:
        """How the run ended. Its last event is the last, and nothing of it is left."""
        end = control.wait_for_end(self.run, TIMEOUT_SECONDS)
        assert end is not None, (self.events(), self.log())
        assert self.events()[-1] == end
        assert not self.run.supervisor_alive()
        self.nothing_is_left()
        return end

    def nothing_is_left(self) -> None:
        assert self.processes() == []

    def processes(self) -> list[int]:
        """Living processes that carry the run's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(RUN_ID) == self.run.run_id and process.status() != "zombie":
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def log(self) -> str:
        path = self.run.log_path(SUPERVISOR)
        return path.read_text() if path.exists() else ""

    def clean_up(self) -> None:
        for pid in (*self.processes(), self.supervisor_pid):
            if pid and psutil.pid_exists(pid) and str(self.run.path) in " ".join(_command_line(pid)):
                # Ranks end with their supervisor.
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)


def _command_line(pid: int) -> list[str]:
    try:
        command: list[str] = psutil.Process(pid).cmdline()
    except psutil.Error:
        return []
    return command


@contextmanager
def cleaned_up() -> Iterator[list[Supervised]]:
    """A list to put runs in; whatever is left of them at the end is killed."""
    started: list[Supervised] = []
    try:
        yield started
    finally:
        for supervised in started:
            supervised.clean_up()
