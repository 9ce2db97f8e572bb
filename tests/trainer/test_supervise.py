"""Real supervisors over fake ranks: how runs end, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from llmtop.presets.errors import JobFailedError, LlmtopError
from llmtop.profiler.record.bookmark import ended_summary
from llmtop.profiler.record.events import (
    Compiling,
    ControlAnswered,
    HangSuspected,
    HardwareSampled,
    RankExited,
    RankStarted,
    RunStarted,
)
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.processidentity import process_identity
from llmtop.trainer import control
from llmtop.trainer.launch import start_supervisor
from tests.trainer.supervised import (
    SHORT_GRACES,
    TIMEOUT_SECONDS,
    Supervised,
    cleaned_up,
    fake_ranks,
)

Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a run of a scenario of `fake_rank`; whatever is left at the end of the test is killed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)

    def begin(scenario: str, *, graces: str = "", **options: object) -> Supervised:
        fake_ranks(monkeypatch, scenario, graces)
        supervised = Supervised(tmp_path / "runs", **options)  # type: ignore[arg-type]
        started.append(supervised)
        supervised.start()
        return supervised

    with cleaned_up() as started:
        yield begin


def test_a_run_that_completes(start: Start) -> None:
    run = start("finishes")
    end = run.end()
    assert (end.state, end.reason, end.fix) == ("completed", "all 2 ranks finished step 3", "")
    kinds = [type(event) for event in run.events()]
    assert kinds[:3] == [RunStarted, RankStarted, RankStarted]
    assert {(e.rank, e.exit_code) for e in run.of(RankExited)} == {(0, 0), (1, 0)}
    samples = [event for event in run.events("hardware") if isinstance(event, HardwareSampled)]
    assert samples
    assert {p.rank for p in samples[0].processes} == {0, 1}
    assert read_state(run.run).status == "completed"
    assert run.log() == ""


def test_a_run_that_has_ended_is_known_without_its_logs(start: Start) -> None:
    run = start("finishes")
    end = run.end()
    summary = ended_summary(run.run)
    assert summary is not None
    assert (summary.status, summary.step) == (end.state, 3)
    with_bookmark = read_state(run.run)
    run.run.bookmark_path.unlink()
    assert read_state(run.run) == with_bookmark


def test_a_killed_rank_is_named_with_its_signal(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(2)
    victim = next(e.pid for e in run.of(RankStarted) if e.rank == 1)
    os.kill(victim, signal.SIGKILL)
    end = run.end()
    assert end.state == "failed"
    assert end.reason.startswith("rank 1 was killed by SIGKILL after step ")
    assert end.fix
    assert [e.signal for e in run.of(RankExited) if e.rank == 1] == ["SIGKILL"]


def test_an_exit_code_of_zero_alone_is_no_success(start: Start) -> None:
    end = start("leaves_early").end()
    assert end.state == "failed"
    assert "rank 1 left with exit code 0" in end.reason


def test_an_exit_code_is_named_with_the_last_line_of_the_log(start: Start) -> None:
    end = start("exits_seven").end()
    assert end.state == "failed"
    assert "rank 1 ended with exit code 7" in end.reason
    assert "all is lost" in end.reason


def test_the_rank_at_fault_is_named_not_the_one_that_lost_it(start: Start) -> None:
    run = start("out_of_memory")
    end = run.end()
    assert end.state == "out_of_memory"
    assert end.reason.startswith("rank 1 in forward of step 3: OutOfMemoryError: CUDA out of memory.")
    assert read_state(run.run).rank_at_fault == 1
    assert end.fix


def test_a_mistake_of_the_user_keeps_its_mend(start: Start) -> None:
    end = start("fails_by_mistake").end()
    assert end.state == "failed"
    assert "data x is empty" in end.reason
    assert end.fix == "give another file"


@pytest.mark.parametrize("save", [False, True])
def test_stop_ends_all_ranks_after_a_step(start: Start, save: bool) -> None:
    run = start("trains")
    run.wait_for_step(1)
    asked = control.stop(run.run, save=save)
    end = run.end()
    assert end.state == "stopped"
    assert ("saved in checkpoints/x" in end.reason) == save
    answers = [e for e in run.of(ControlAnswered) if e.request_id == asked]
    assert [e.answer for e in answers] == ["accepted", "done"]
    assert control.pending(run.run) == ()
    assert read_state(run.run).status == "stopped"
    with pytest.raises(LlmtopError, match="takes no requests"):
        control.stop(run.run, save=True)


def test_requests_that_cannot_be_carried_out_are_refused_with_a_reason(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(1)
    unknown = control.request(run.run, "dance", {"style": "tango"})
    (run.run.control_dir / "broken.json").write_text("{")
    first = control.stop(run.run, save=False)
    run.end()
    given = control.answers(run.run)
    assert [a.answer for a in given[unknown]] == ["refused"]
    assert "cannot dance" in given[unknown][0].reason
    assert [a.answer for a in given["broken"]] == ["refused"]
    assert [a.answer for a in given[first]] == ["accepted", "done"]


def test_a_second_stop_is_refused(start: Start) -> None:
    run = start("is_stubborn", graces="stop=60,kill=0.2")
    run.wait_for_files("ready")
    run.wait_for_step(1)
    first, second = control.stop(run.run, save=False), control.stop(run.run, save=True)
    run.wait_for(lambda: second in control.answers(run.run))
    assert "stopping already, without a checkpoint" in control.answers(run.run)[second][0].reason
    assert [asked.request_id for asked in control.pending(run.run)] == [first]
    os.kill(run.supervisor_pid, signal.SIGTERM)
    end = run.end()
    assert end.state == "stopped"
    assert "at a second SIGTERM and were killed" in end.reason


def test_ranks_that_do_not_stop_are_killed(start: Start) -> None:
    run = start("is_stubborn")
    run.wait_for_files("ready")
    run.wait_for_step(1)
    control.stop(run.run, save=False)
    end = run.end()
    assert end.state == "stopped"
    assert end.reason == "stopped on request after step 1; ranks 0, 1 did not stop in time and were killed"


def test_a_checkpoint_that_was_asked_for_and_not_made_is_a_failure(start: Start) -> None:
    run = start("is_stubborn")
    run.wait_for_step(1)
    control.stop(run.run, save=True)
    end = run.end()
    assert end.state == "failed"
    assert "did not stop in time" in end.reason


@pytest.mark.parametrize("save", [False, True])
def test_stop_before_the_first_step(start: Start, save: bool) -> None:
    run = start("is_deaf")
    run.wait_for_files("ready")
    control.stop(run.run, save=save)
    end = run.end()
    assert (end.state, end.reason) == ("stopped", "stopped on request before the first step")


def test_sigterm_to_the_supervisor_stops_with_a_checkpoint(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(1)
    os.kill(run.supervisor_pid, signal.SIGHUP)
    os.kill(run.supervisor_pid, signal.SIGTERM)
    end = run.end()
    assert end.state == "stopped"
    assert "saved in" in end.reason
    assert "received SIGTERM" in run.log()


def test_a_step_that_the_supervisor_has_not_seen_yet_is_worth_the_time_to_save_it(start: Start) -> None:
    run = start("steps_when_told", graces="stop=3600,save=0.3,kill=0.3")
    run.wait_for_files("ready")
    os.kill(run.supervisor_pid, signal.SIGSTOP)
    try:
        (run.run.path / "go").touch()
        run.wait_for_step(1)
        os.kill(run.supervisor_pid, signal.SIGTERM)
    finally:
        os.kill(run.supervisor_pid, signal.SIGCONT)
    end = run.end()
    assert end.state == "failed" and "did not stop in time" in end.reason


def test_a_killed_supervisor_takes_its_ranks_along(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(1)
    ranks = [psutil.Process(e.pid) for e in run.of(RankStarted)]
    os.kill(run.supervisor_pid, signal.SIGKILL)
    assert not psutil.wait_procs(ranks, timeout=TIMEOUT_SECONDS)[1]
    assert control.wait_for_end(run.run, TIMEOUT_SECONDS) is None
    assert read_state(run.run).status == "lost"


def test_what_ranks_leave_behind_is_swept(start: Start) -> None:
    run = start("leaves_children")
    run.wait_for_files("children")
    pids = [int(p) for r in (0, 1) for p in (run.run.path / f"children-{r}").read_text().split()]
    assert all(process_identity(pid) for pid in pids)
    (run.run.path / "go").touch()
    assert run.end().state == "completed"
    assert not any(process_identity(pid) for pid in pids)


def test_a_rank_that_never_finishes_is_not_waited_for_for_ever(start: Start) -> None:
    end = start("lingers", graces=SHORT_GRACES.replace("finish=60", "finish=0.5")).end()
    assert end.state == "failed"
    assert "rank 1 did not end with the others and was killed" in end.reason


def test_a_hang_is_suspected_once_and_forgotten_when_steps_go_on(start: Start) -> None:
    run = start("pauses", hang_floor_seconds=0.5, hang_factor=2.0)

    def suspected(last_step: int) -> list[HangSuspected]:
        # On a busy machine a rank may be late with earlier steps too.
        return [event for event in run.of(HangSuspected) if event.last_step == last_step]

    run.wait_for(lambda: bool(suspected(3)))
    assert suspected(3)[0].threshold_seconds == pytest.approx(0.5)
    samples = len(run.events("hardware"))
    run.wait_for(lambda: len(run.events("hardware")) > samples + 5)
    assert len(suspected(3)) == 1
    assert read_state(run.run).hang_seconds is not None
    (run.run.path / "go").touch()
    run.wait_for_step(4)
    run.wait_for(lambda: bool(suspected(4)))
    assert len(suspected(3)) == len(suspected(4)) == 1
    (run.run.path / "go-again").touch()
    assert run.end().state == "completed"


def test_a_compiler_at_work_is_named(start: Start) -> None:
    run = start("compiles", ranks=1, hang_floor_seconds=0.2)
    run.wait_for(lambda: bool(run.of(Compiling)))
    assert [e.what for e in run.of(Compiling)] == ["fused_adam"]
    (run.run.path / "go").touch()
    assert run.end().state == "completed"


def test_a_second_supervisor_is_refused(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(1)
    with pytest.raises(JobFailedError) as caught:
        start_supervisor(run.run)
    assert "already has a supervisor" in caught.value.why
    assert run.run.supervisor_alive()
    control.stop(run.run, save=False)
    run.end()


def test_the_environment_of_a_rank(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    run = start("shows_environment", threads_per_rank=3)
    run.end()
    first, second = (json.loads((run.run.path / f"environment-{r}").read_text()) for r in (0, 1))
    assert [env["RANK"] for env in (first, second)] == ["0", "1"]
    assert [env["LOCAL_RANK"] for env in (first, second)] == ["0", "1"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"] == "127.0.0.1"
    assert first["DS_ACCELERATOR"] == "cpu"
    assert first["OMP_NUM_THREADS"] == "3"
    assert first["HF_HUB_OFFLINE"] == "1"
    assert first["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert first["TOKENIZERS_PARALLELISM"] == "false"
    assert first["PYTHONUNBUFFERED"] == "1"
    assert first["TORCH_EXTENSIONS_DIR"].startswith(str(tmp_path / "cache" / "llmtop" / "torch_extensions"))


def test_stale_locks_are_gone_before_the_ranks_start(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))
    (tmp_path / "ext" / "cpu_adam").mkdir(parents=True)
    lock = tmp_path / "ext" / "cpu_adam" / "lock"
    lock.touch()
    run = start("finishes")
    run.end()
    assert not lock.exists()
    assert "removed" in run.log()


def test_a_lock_that_becomes_stale_while_ranks_wait_is_removed(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))
    run = start("meets_a_lock")
    assert run.end().state == "completed"
    assert "removed" in run.log()


def test_a_worker_that_cannot_be_started(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLMTOP_WORKER_COMMAND", "/nonexistent/python")
    run = Supervised(tmp_path / "runs")
    run.start()
    end = run.end()
    assert end.state == "failed"
    assert "rank 0 cannot be started: /nonexistent/python" in end.reason
    assert "Traceback" not in run.log()


_BUG = """
import pathlib, sys
if "llmtop.trainer.supervise" in sys.orig_argv:
    from llmtop.trainer.supervisor.progress import Progress
    poll = Progress.poll
    def breaks_when_told(self):
        if pathlib.Path(sys.orig_argv[-1], "go").exists():
            raise RuntimeError("never expected")
        poll(self)
    Progress.poll = breaks_when_told
"""


def test_a_bug_of_the_supervisor_leaves_no_rank_and_shows_a_traceback(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a module that Python itself loads at start-up: the supervisor is a process of its own.
    (tmp_path / "sitecustomize.py").write_text(_BUG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = start("trains")
    run.wait_for_step(1)
    (run.run.path / "go").touch()
    end = run.end()
    assert end.state == "failed"
    assert "the supervisor failed: " in end.reason
    assert "Traceback" in run.log()
    assert len(run.of(RankExited)) == 2


def test_a_supervisor_that_dies_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    run = Supervised(tmp_path)
    run.run.events_path("hardware").mkdir()
    with pytest.raises(JobFailedError, match="did not start") as caught:
        run.start()
    assert "IsADirectoryError" in caught.value.why


def limit_files(pid: int, size_bytes: int) -> None:
    """From now on the process cannot write beyond this size of a file, as on a disk that is full."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def test_training_goes_on_while_the_disk_is_full(start: Start) -> None:
    run = start("trains_until_told")
    run.wait_for_step(1)
    run.wait_for(lambda: len(run.events("hardware")) > 0)
    limit_files(run.supervisor_pid, 1)
    asked = control.stop(run.run, save=False)
    # It has been carried out, though its answer could not be written.
    run.wait_for_files("asked")
    assert asked not in control.answers(run.run)
    samples = len(run.events("hardware"))
    limit_files(run.supervisor_pid, resource.RLIM_INFINITY)
    run.wait_for(lambda: len(run.events("hardware")) > samples)
    run.wait_for(lambda: asked in control.answers(run.run))
    (run.run.path / "go").touch()
    end = run.end()
    assert end.state == "stopped"
    assert [a.answer for a in control.answers(run.run)[asked]] == ["accepted", "done"]
    assert "supervisor.jsonl is written again" in run.log()
    assert "Traceback" not in run.log()


def test_an_end_on_a_full_disk_is_written_once_there_is_room(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(1)
    ranks = [psutil.Process(e.pid) for e in run.of(RankStarted)]
    limit_files(run.supervisor_pid, 1)
    control.stop(run.run, save=False)
    assert not psutil.wait_procs(ranks, timeout=TIMEOUT_SECONDS)[1]
    assert run.run.supervisor_alive()
    assert not run.of(RankExited)
    limit_files(run.supervisor_pid, resource.RLIM_INFINITY)
    assert run.end().state == "stopped"
    assert len(run.of(RankExited)) == 2
