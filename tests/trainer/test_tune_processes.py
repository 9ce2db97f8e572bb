"""`llmtop tune` as a process over trials without torch: signals, kills, two at a time, lost folders."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir, list_runs
from llmtop.trainer.launch import start_supervisor
from llmtop.trainer.supervisor.rankenv import RUN_ID
from llmtop.trainer.tune.edgefolder import edge_folder
from llmtop.trainer.tune.journal import Line, TuneDir, list_tunes
from llmtop.trainer.tune.trial import end_run
from tests.faults.test_folder_gone import remove_at_once
from tests.recorded_spec import recorded_prediction, recorded_spec
from tests.trainer.supervised import GRACES, TIMEOUT_SECONDS
from tests.trainer.trial_rank import HOLDS, worker_command

SMALL = ("cpu-demo", "--gpus", "1", "--micro-batch", "1", "--grad-accum", "2", "--fix", "zero",
         "--fix", "attention", "--fix", "checkpointing")  # fmt: skip
"""Two settings: micro-batch 1 and 2."""


class Tuning:
    """A runs folder, and calls of `llmtop tune` in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.called: list[subprocess.Popen[str]] = []
        self._environment = {
            **os.environ,
            "LLMTOP_RUNS_DIR": str(root / "runs"),
            "XDG_CONFIG_HOME": str(root / "config"),
            "XDG_CACHE_HOME": str(root / "cache"),
            "LLMTOP_WORKER_COMMAND": worker_command(),
            "LLMTOP_GRACES": GRACES,
        }

    def call(self, *words: str, holds: int = 0) -> subprocess.Popen[str]:
        environment = {**self._environment, HOLDS: str(holds)}
        process = subprocess.Popen(
            [sys.executable, "-m", "llmtop.tui.cli", "tune", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self.root,
        )
        self.called.append(process)
        return process

    @property
    def tune(self) -> TuneDir:
        (found,) = list_tunes(self.root / "runs" / "tunes")
        return found

    def events(self) -> list[tuple[str, int]]:
        return [(line.event, line.number) for line in self.lines()]

    def lines(self) -> list[Line]:
        tunes = list_tunes(self.root / "runs" / "tunes")
        return tunes[0].lines() if tunes else []

    def runs(self) -> tuple[RunDir, ...]:
        tunes = list_tunes(self.root / "runs" / "tunes")
        return list_runs(tunes[0].trials_root) if tunes else ()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < end, self.lines()
            time.sleep(0.01)

    def _is_going(self) -> bool:
        """Whether the newest search is; what it said, where it has ended by itself."""
        process = self.called[-1]
        assert process.poll() is None, process.communicate()
        return True

    def wait_for_step(self) -> RunDir:
        """Until a trial has made its first step; that trial's run."""
        self.wait_for(
            lambda: self._is_going() and any(r.rank_events() and r.supervisor_alive() for r in self.runs())
        )
        run = self.runs()[0]
        self.wait_for(
            lambda: (
                self._is_going()
                and run.events_path(0).exists()
                and b"step_finished" in _content(run.events_path(0))
            )
        )
        return run

    def processes(self) -> list[int]:
        """Living processes of any run in this folder."""
        ids = {run.run_id for run in self.runs()}
        found = []
        for process in psutil.process_iter():
            try:
                of_a_run = process.environ().get(RUN_ID) in ids
                if (
                    of_a_run or str(self.root) in " ".join(process.cmdline())
                ) and process.status() != "zombie":
                    found.append(process.pid)
            except psutil.Error:
                continue
        return [pid for pid in found if pid != os.getpid()]


def _content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.fixture
def tuning(tmp_path: Path) -> Iterator[Tuning]:
    made = Tuning(tmp_path)
    try:
        yield made
    finally:
        for process in made.called:
            process.kill()
            process.communicate()
        for run in made.runs():
            end_run(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_trial_and_leaves_nothing_running(number: signal.Signals, tuning: Tuning) -> None:
    process = tuning.call(*SMALL, holds=1)
    run = tuning.wait_for_step()
    process.send_signal(number)
    _, told = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130 and "every trial so far is kept" in told, told
    assert tuning.events() == [("began", 1), ("interrupted", 1)]
    assert not run.supervisor_alive() and tuning.processes() == []


def test_a_hang_up_that_is_ignored_stays_so(tuning: Tuning) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
    try:
        process = tuning.call(*SMALL, holds=1)
    finally:
        signal.signal(signal.SIGHUP, before)
    tuning.wait_for_step()
    process.send_signal(signal.SIGHUP)
    for count in (1, 2):
        tuning.wait_for(lambda count=count: len(tuning.runs()) == count)  # type: ignore[misc]
        tuning.runs()[0].path.joinpath("go").touch()
    _, told = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, told


def test_the_trial_of_a_killed_search_that_finished_counts_by_its_own_record(tuning: Tuning) -> None:
    process = tuning.call(*SMALL, holds=1)
    run = tuning.wait_for_step()
    process.kill()
    process.communicate()
    (run.path / "go").touch()
    tuning.wait_for(lambda: not run.supervisor_alive())
    resumed = tuning.call("--resume", "latest")
    out, told = resumed.communicate(timeout=TIMEOUT_SECONDS)
    assert resumed.returncode == 0, told
    first, second = tuning.tune.ended()
    assert (first.run, first.outcome) == (run.run_id, "measured")
    assert first.step_seconds == pytest.approx(1.0)
    assert second.choice["micro_batch"] == 2 and "lost" not in out
    assert len(tuning.runs()) == 2


def test_the_trial_of_a_killed_search_that_goes_on_is_ended_and_tried_again(tuning: Tuning) -> None:
    process = tuning.call(*SMALL, holds=1)
    run = tuning.wait_for_step()
    process.kill()
    process.communicate()
    assert run.supervisor_alive()
    resumed = tuning.call("--resume", "latest")
    _, told = resumed.communicate(timeout=TIMEOUT_SECONDS)
    assert resumed.returncode == 0, told
    assert tuning.events()[:3] == [("began", 1), ("interrupted", 1), ("began", 1)]
    assert all(line.outcome == "measured" for line in tuning.tune.ended())
    assert not run.supervisor_alive() and len(tuning.runs()) == 3


def test_a_second_search_in_a_folder_is_refused_and_disturbs_nothing(tuning: Tuning) -> None:
    process = tuning.call(*SMALL, holds=1)
    run = tuning.wait_for_step()
    other = tuning.call("--resume", "latest")
    _, told = other.communicate(timeout=TIMEOUT_SECONDS)
    assert other.returncode == 2 and "is going on already" in told and "Traceback" not in told
    assert run.supervisor_alive() and process.poll() is None
    assert tuning.events() == [("began", 1)]


def test_a_folder_that_goes_away_ends_in_words_and_in_no_process(tuning: Tuning) -> None:
    process = tuning.call(*SMALL, holds=1)
    tuning.wait_for_step()
    remove_at_once(tuning.tune.path)
    _, told = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 2 and "its folder is gone" in told and "Traceback" not in told, told
    assert tuning.processes() == []


def test_a_full_disk_ends_in_words_and_keeps_the_search(tuning: Tuning) -> None:
    process = tuning.call(*SMALL, holds=1)
    run = tuning.wait_for_step()
    size = tuning.tune.journal_path.stat().st_size
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    (run.path / "go").touch()
    _, told = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 2 and "cannot write to its folder" in told and "Traceback" not in told, told
    assert tuning.processes() == []
    resumed = tuning.call("--resume", "latest")
    _, told = resumed.communicate(timeout=TIMEOUT_SECONDS)
    assert resumed.returncode == 0, told
    assert [line.outcome for line in tuning.tune.ended()] == ["measured", "measured"]


def test_a_trial_that_is_ended_early_is_not_measured_by_the_step_that_it_was_stopped_in(
    tuning: Tuning,
) -> None:
    process = tuning.call(*SMALL, holds=5)
    _, told = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, told
    for line in tuning.tune.ended():
        assert line.reason == "ended early: its rate was known" and line.steps_measured == 3
        assert line.step_seconds == pytest.approx(1.0 / line.choice["micro_batch"])
        assert line.error_seconds == pytest.approx(0.0, abs=1e-9)


def test_resume_with_dry_run_starts_nothing(tuning: Tuning) -> None:
    process = tuning.call(*SMALL, holds=1)
    tuning.wait_for_step()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_SECONDS)
    before = tuning.events()
    shown = tuning.call("--resume", "latest", "--dry-run", holds=1)
    out, told = shown.communicate(timeout=TIMEOUT_SECONDS)
    assert shown.returncode == 0, told
    assert "0 of 12 trials made; nothing is started" in out
    assert tuning.events() == before and len(tuning.runs()) == 1


def test_a_question_for_the_largest_clears_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTOP_WORKER_COMMAND", worker_command())
    monkeypatch.setenv("LLMTOP_GRACES", GRACES)
    monkeypatch.setenv(HOLDS, "1")
    root = tmp_path / "edges"
    spec = recorded_spec("cpu", ranks=1, steps=3)
    left = RunDir.create(root, spec, recorded_prediction(spec), {"train_batch_size": 8})
    (root / "nest.log").write_text("of before")
    start_supervisor(left)
    try:
        supervisor = left.supervisor_identity()
        with edge_folder(root) as folder:
            assert list(folder.iterdir()) == []
            assert supervisor is not None and process_identity(supervisor.pid) != supervisor
            with pytest.raises(UsageError, match="going on"), edge_folder(root):
                pass
    finally:
        end_run(left)
