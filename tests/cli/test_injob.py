"""A command that waits for a run is told that its batch job ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.tui.commands.injob import ending_with_its_job
from tests.recorded import make_recorded_run

IN_JOB = {"SLURM_JOB_ID": "7"}


def requests(run: RunDir) -> list[bytes]:
    return [path.read_bytes() for path in run.control_dir.glob("*.json")]


def test_a_live_run_is_asked_to_save_and_stop(runs_root: Path) -> None:
    run = make_recorded_run(runs_root, steps=3, end=None)
    run.write_supervisor_pid()
    with ending_with_its_job(run, IN_JOB):
        os.kill(os.getpid(), signal.SIGTERM)
    (asked,) = requests(run)
    assert f'"action":"{control.STOP}","params":{{"save":true}}'.encode() in asked


def test_one_that_has_just_ended_is_still_told_of(
    runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_recorded_run(runs_root, steps=3)
    with ending_with_its_job(run, IN_JOB):
        os.kill(os.getpid(), signal.SIGTERM)
    assert requests(run) == [] and "its supervisor is gone" in capsys.readouterr().err


def test_outside_a_job_and_after_it_the_signal_is_as_before(runs_root: Path) -> None:
    run, before = make_recorded_run(runs_root, steps=3), signal.getsignal(signal.SIGTERM)
    with ending_with_its_job(run, {}):
        assert signal.getsignal(signal.SIGTERM) is before
    with ending_with_its_job(run, IN_JOB):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
