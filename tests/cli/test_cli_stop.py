"""`llmtop stop` on real supervisors over fake ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.events import ControlAnswered, RunEnd
from llmtop.profiler.record.feed import read_state
from llmtop.trainer import control
from llmtop.tui.commands import stop
from tests.cli.conftest import Llmtop, Start
from tests.hosts.lab import wait_for
from tests.recorded import make_recorded_run
from tests.trainer.supervised import TIMEOUT_SECONDS, Supervised


@contextmanager
def let_go_once_refused(run: Supervised) -> Iterator[None]:
    """The ranks, which stop when they are told to: until something was refused the run goes on."""

    def refused() -> bool:
        return any(answer.answer == "refused" for answer in run.of(ControlAnswered))

    def let_go() -> None:
        wait_for(lambda: refused() or not run.run.supervisor_alive())
        (run.run.path / "go").touch()

    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        yield
    finally:
        thread.join(TIMEOUT_SECONDS)


def test_stop_with_a_checkpoint_names_it(start: Start, llmtop: Llmtop) -> None:
    run = start("trains")
    run.wait_for_step(1)
    answer = llmtop("stop", "--save", "latest")
    assert (answer.code, answer.out.splitlines()[-1]) == (ExitCode.DONE, "checkpoint: checkpoints/x")


def test_a_refused_checkpoint_is_a_failure(start: Start, llmtop: Llmtop) -> None:
    run = start("trains_until_told")
    run.wait_for_step(1)
    control.stop(run.run, save=False)
    with let_go_once_refused(run):
        answer = llmtop("stop", "--save", "latest")
    assert answer.code == ExitCode.JOB_FAILED
    assert "refused: the run is stopping already, without a checkpoint" in answer.err
    assert "has ended without the checkpoint that was asked for" in answer.err
    assert "checkpoint: " not in answer.out


def test_a_second_stop_without_a_checkpoint_waits_for_the_first(start: Start, llmtop: Llmtop) -> None:
    run = start("trains_until_told")
    run.wait_for_step(1)
    control.stop(run.run, save=False)
    with let_go_once_refused(run):
        answer = llmtop("stop", "latest")
    assert answer.code == ExitCode.DONE
    assert "refused: the run is stopping already" in answer.err


def test_a_checkpoint_during_start_up_is_said_not_to_be_there(start: Start, llmtop: Llmtop) -> None:
    run = start("is_deaf")
    run.wait_for_files("ready")
    answer = llmtop("stop", "--save", "latest")
    assert answer.code == ExitCode.DONE
    assert "nothing was saved: the run had not finished a step" in answer.out


def test_a_checkpoint_that_was_not_made_is_a_failure(start: Start, llmtop: Llmtop) -> None:
    run = start("is_stubborn")
    run.wait_for_step(1)
    answer = llmtop("stop", "--save", "latest")
    assert answer.code == ExitCode.JOB_FAILED
    assert "did not stop in time" in answer.err


def test_no_room_for_the_checkpoint_is_a_failure_and_its_true_reason(start: Start, llmtop: Llmtop) -> None:
    run = start("has_no_room")
    run.wait_for_step(4)
    answer = llmtop("stop", "--save", "latest")
    assert answer.code == ExitCode.JOB_FAILED
    assert "has ended without the checkpoint that was asked for" in answer.err
    assert "could not be saved, there is none: it takes 20.0 MiB, and /runs has 9.0 MiB free" in answer.err
    assert "nothing was saved" not in answer.out and "resumed" not in answer.err
    (line,) = llmtop("ls", "--json").json()["runs"]
    assert (line["status"], line["unsaved"]) == ("stopped", True)
    assert "stopped, not saved" in llmtop("ls").out


def test_a_stop_without_a_checkpoint_warns_of_one_that_was_refused(start: Start, llmtop: Llmtop) -> None:
    run = start("has_no_room")
    run.wait_for_step(4)
    answer = llmtop("stop", "latest")
    assert answer.code == ExitCode.DONE
    assert "warning: the checkpoint of step 3 could not be saved, there is none: it takes" in answer.err
    attached = llmtop("attach", "--headless", "latest")
    assert attached.code == ExitCode.DONE
    assert "step 3: the checkpoint is refused: it takes 20.0 MiB" in attached.err
    assert "warning: the checkpoint of step 3 could not be saved" in attached.err
    report = " ".join(llmtop("report", "latest").out.split())
    assert "checkpoints none saved; 1 refused, the last at step 3: it takes 20.0 MiB" in report
    assert "!! the training is not saved" in report
    assert [one["step"] for one in llmtop("report", "latest", "--json").json()["checkpoints_refused"]] == [3]


def test_a_run_that_was_not_to_be_saved_says_so_at_its_end(start: Start, llmtop: Llmtop) -> None:
    run = start("finishes", steps=3)
    run.end()
    words = "nothing was saved: checkpoint_every is 0 and save_at_end false"
    attached = llmtop("attach", "--headless", "latest")
    assert attached.code == ExitCode.DONE and words in attached.err
    assert f"checkpoints {words}" in " ".join(llmtop("report", "latest").out.split())
    assert llmtop("report", "latest", "--json").json()["not_saved"] == words


@pytest.mark.parametrize("end", ["stopped", "failed"])
@pytest.mark.parametrize(
    ("every", "words"),
    [
        (5, "the newest checkpoint is of step 10, and the 2 steps since are lost"),
        (11, "the newest checkpoint is of step 11, and the 1 step since is lost"),
        (0, "nothing was saved: checkpoint_every is 0 and save_at_end false; all 12 steps are lost"),
    ],
)
def test_every_end_says_what_is_lost(
    end: RunEnd, every: int, words: str, llmtop: Llmtop, runs_root: Path
) -> None:
    make_recorded_run(runs_root, steps=12, end=end, checkpoint_every=every)
    for command in ("stop", "attach --headless", "attach --plain"):
        assert words in llmtop(*command.split(), "latest").err, command
    assert words in " ".join(llmtop("report", "latest").out.split())


def test_whose_last_step_is_saved_says_nothing_of_it(llmtop: Llmtop, runs_root: Path) -> None:
    make_recorded_run(runs_root, steps=12, end="stopped", checkpoint_every=6)
    for command in ("stop", "attach --headless", "report"):
        answer = llmtop(*command.split(), "latest")
        assert "the newest checkpoint" not in answer.err + answer.out, command


def test_a_stop_says_how_many_steps_are_lost(start: Start, llmtop: Llmtop) -> None:
    run = start("trains")
    run.wait_for_step(2)
    answer = llmtop("stop", "latest")
    made = read_state(run.run).steps_finished
    assert answer.code == ExitCode.DONE
    assert f"nothing was saved: checkpoint_every is 0 and save_at_end false; all {made} steps" in answer.err


def test_a_run_that_ends_without_its_checkpoint_is_a_failure(start: Start, llmtop: Llmtop) -> None:
    run = start("ends_without_room")
    attached = llmtop("attach", "--headless", "latest")
    assert attached.code == ExitCode.JOB_FAILED
    assert f"run {run.run.run_id} has trained to its end and is not saved" in attached.err
    assert "why: the checkpoint of step 3 could not be saved, there is none" in attached.err
    assert "fix: make room, then run it again" in attached.err
    # There is nothing to go on from; with an earlier checkpoint there would be.
    resumed = llmtop("resume", "latest")
    assert resumed.code == ExitCode.USAGE and "has no checkpoint to go on from" in resumed.err


def test_steps_that_were_not_saved_for_no_known_reason_are_a_failure(start: Start, llmtop: Llmtop) -> None:
    run = start("trains_until_told")
    run.wait_for_step(1)
    (run.run.path / "go").touch()
    answer = llmtop("stop", "--save", "latest")
    assert answer.code == ExitCode.JOB_FAILED
    assert "has ended without the checkpoint that was asked for" in answer.err


def test_without_waiting_a_run_is_still_stopping(start: Start, llmtop: Llmtop) -> None:
    run = start("trains_until_told")
    run.wait_for_step(1)
    answer = llmtop("stop", "latest", "--wait", "0")
    assert answer.code == ExitCode.DONE
    assert f"run {run.run.run_id} is still stopping" in answer.out
    refused = llmtop("stop", "latest", "--wait", "0", "--save")
    assert refused.code == ExitCode.JOB_FAILED
    assert "stopping already, without a checkpoint" in refused.err
    (run.run.path / "go").touch()
    assert run.end().state == "stopped"


def test_the_help_tells_how_long_it_waits(llmtop: Llmtop) -> None:
    told = " ".join(llmtop("stop", "--help").out.split())
    assert "(default: 600)" in told and "by force 7 s after it was asked" in told


def test_nothing_is_no_run(start: Start, llmtop: Llmtop) -> None:
    run = start("trains")
    run.wait_for_step(1)
    answer = llmtop("stop", "")
    assert answer.code == ExitCode.USAGE
    assert "no run is named" in answer.err
    assert control.answers(run.run) == {}


def test_a_driver_that_hangs_does_not_hold_up_the_end_of_a_lost_run(
    llmtop: Llmtop, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_recorded_run(runs_root, kind="cuda", steps=3, end=None)
    gone = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    run.write_supervisor_pid(gone.pid)
    gone.communicate()
    answers = threading.Event()
    monkeypatch.setattr(stop, "_DRIVER_SECONDS", 0.1)
    monkeypatch.setattr(stop, "NvmlReader", answers.wait)
    answer = llmtop("stop", "latest")
    answers.set()
    assert answer.code == ExitCode.DONE
    assert answer.out.splitlines()[-2:] == [stop._DRIVER_SILENT, "no process is left"]
