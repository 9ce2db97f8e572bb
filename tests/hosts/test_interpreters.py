"""Hosts whose interpreters are not alike: another torch, or another time."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from llmtop.profiler.record.changeevents import Restaged
from llmtop.profiler.record.events import RankStarted, StepFinished
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.hostevents import ClockMeasured
from llmtop.trainer import control
from tests.hosts.over_hosts import Start
from tests.trainer import supervised
from tests.trainer.supervised import TIMEOUT_SECONDS, worker_command


def interpreter_of_its_own(folder: Path, line: str = "pass") -> tuple[Path, Path]:
    """An interpreter that is another environment's on h2, which begins with a line of Python, and where that
    one has its packages."""
    other, python, ssh = folder / "other", folder / "python", folder / "bin" / "ssh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other)], check=True)
    (packages,) = other.glob("lib/python*/site-packages")
    (packages / "rest.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (packages / "sitecustomize.py").write_text(f"import time\n{line}\n")
    choice = f'[ "$ON_HOST" = h2 ] && exec {other}/bin/python "$@"'
    python.write_text(f'#!/bin/sh\n{choice}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    ssh.write_text(ssh.read_text().replace("exec sh", "export ON_HOST=$host\nexec sh"))
    return python, packages


def test_a_host_whose_interpreter_has_another_torch_is_named_before_anything_is_loaded(
    start: Start, tmp_path: Path
) -> None:
    python, packages = interpreter_of_its_own(tmp_path)
    (packages / "torch-1.2.3.dist-info").mkdir()
    (packages / "torch-1.2.3.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.2.3\n")
    run = start("trains", python=str(python))
    end = run.end()
    assert end.state == "failed" and f"torch 1.2.3 on h2, {version('torch')} on h1" in end.reason
    assert "--exclude" in end.fix and run.of(RankStarted) == []


def test_a_host_whose_clock_is_hours_off_is_shown_with_the_others(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 3 * 3600.0
    python, _ = interpreter_of_its_own(tmp_path, f"time.time = lambda now=time.time: now() + {ahead}")
    monkeypatch.setattr(
        supervised, "worker_command", lambda named: worker_command(named).replace(sys.executable, str(python))
    )
    run = start("changes", python=str(python))
    live = RunReader(run.run)
    run.wait_for(lambda: any(one.host == "h2" for one in run.of(ClockMeasured)))
    run.wait_for(lambda: any(isinstance(one, StepFinished) for one in run.events(1)))
    run.wait_for(lambda: 1 in live.poll().ranks and live.poll().ranks[1].steps_seen > 0)
    stamp = next(one.t for one in run.events(1) if isinstance(one, StepFinished))
    assert stamp > time.time() + ahead / 2, "as it has them itself"
    state = live.poll()
    assert state.now is not None and state.now < time.time() + ahead / 2
    assert set(state.clocks) == {"h2"}
    assert abs(state.clocks["h2"][0].ahead_seconds - ahead) <= state.clocks["h2"][0].error_seconds + 0.01
    asked = control.change(run.run, control.SetParams(words=("zero=1",)))
    answer = control.wait_until_settled(run.run, asked, TIMEOUT_SECONDS)
    assert answer is not None and answer.answer == "done", answer
    down = run.of(Restaged)[0].down_seconds
    assert down is not None and 0.0 <= down < ahead / 2, "between a step of one host and one of the other"
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"
