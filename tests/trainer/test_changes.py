"""Changes under a real supervisor over fake ranks: made, refused, taken by a relaunch, and taken back."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.changeevents import (
    ChangeApplied,
    ChangeAsked,
    ChangeRefused,
    RestageBegan,
    Restaged,
    RestageFailed,
)
from llmtop.profiler.record.events import AnyEvent, ControlAnswered, HardwareSampled, RankStarted, RunEnded
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import HARDWARE, InForce
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from llmtop.trainer import control
from llmtop.trainer.change import restagefolder
from llmtop.trainer.change.restagefolder import memory_folder
from llmtop.trainer.supervisor import leftover
from llmtop.trainer.supervisor.changes import Changes
from llmtop.trainer.supervisor.progress import Progress
from llmtop.trainer.supervisor.ranks import Ranks
from llmtop.trainer.supervisor.underway import Phase, UnderWay
from tests.hosts.lab import wait_for
from tests.trainer.supervised import GRACES, SHORT_GRACES, TIMEOUT_SECONDS, Supervised, fake_ranks

Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a run whose ranks do what is asked of them; whatever is left at the end is killed."""
    started: list[Supervised] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def begin(*, graces: str = "", **files: int) -> Supervised:
        fake_ranks(monkeypatch, "changes", graces or (SHORT_GRACES if "hangs_on" in files else ""))
        run = Supervised(tmp_path / "runs", micro_batch=4, grad_accum=2)
        started.append(run)
        for name, setting in files.items():
            (run.run.path / name.replace("_", "-")).write_text(str(setting))
        run.start()
        run.wait_for_step(1)
        return run

    yield begin
    for run in started:
        run.clean_up()
        for folder in restagefolder.restage_folders(run.run):
            assert folder == restagefolder.disk_folder(run.run), "nothing stays in memory"


def ask(run: Supervised, *words: str, force: bool = False, keep_global_batch: bool = True) -> ControlAnswered:
    """What became of a change."""
    params = control.SetParams(words=words, force=force, keep_global_batch=keep_global_batch)
    asked = control.change(run.run, params)
    answer = control.wait_until_settled(run.run, asked, TIMEOUT_SECONDS)
    assert answer is not None, run.log()
    return answer


def stop(run: Supervised) -> None:
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"


def test_a_change_between_two_steps_is_in_force_when_all_ranks_have_made_it(start: Start) -> None:
    run = start()
    before = run.run.spec()
    assert ask(run, "micro_batch=2").answer == "done"
    asked = run.of(ChangeAsked)[0]
    assert [(c.key, c.old, c.new, c.adapted) for c in asked.changes] == [
        ("micro_batch", 4, 2, False),
        ("grad_accum", 2, 4, True),
    ]
    assert not asked.restage and asked.new_peak_bytes is not None
    assert run.run.in_force() == InForce(setting=1)
    assert (run.run.spec().options.micro_batch, run.run.spec().options.grad_accum) == (2, 4)
    assert run.run.spec(0) == before, "what it was launched with stays"
    assert run.run.deepspeed_config()["gradient_accumulation_steps"] == 4
    state = read_state(run.run)
    record = state.changes.records[0]
    assert (record.status, record.down_seconds, state.changes.setting) == ("applied", 0.0, 1)
    assert state.changes.spans[-1].first_step == record.step
    assert {rank.setting for rank in state.ranks.values()} == {1}
    stop(run)


def test_the_rate_of_samples_is_the_supervisors_to_change(start: Start) -> None:
    run = start()
    assert ask(run, "sample_seconds=0.02").answer == "done"
    count = len(run.events(HARDWARE))
    run.wait_for(lambda: len(run.events(HARDWARE)) > count + 3)
    assert all(isinstance(event, HardwareSampled) for event in run.events(HARDWARE))
    stop(run)


REFUSALS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("micro_batch=3",), "micro_batch=3 does not divide the 8 sequences", "micro_batch=2 with grad_accum=4"),
    (("micro_btch=2",), "unknown key 'micro_btch'", "did you mean 'micro_batch'?"),
    (("model=other",), "model of a live run cannot be changed", ""),
    (("zero=2", "offload_param=cpu"), "offload_param = cpu with zero = 2", "zero=3"),
    (("micro_batch=4",), "nothing would change", ""),
    (("gpus=3",), "3 ranks do not divide the global batch of 16", "gpus=2"),
    (("micro_batch=20000", "grad_accum=1"), "predicted not to fit", "--force"),
)


def test_what_cannot_be_is_refused_and_recorded(start: Start) -> None:
    run = start()
    for words, reason, _ in REFUSALS:
        answer = ask(run, *words)
        assert answer.answer == "refused" and reason in answer.reason
    refused = run.of(ChangeRefused)
    assert [event.asked for event in refused] == [words for words, _, _ in REFUSALS]
    for event, (_, reason, fix) in zip(refused, REFUSALS, strict=True):
        assert reason in event.reason and fix in event.fix
    assert run.of(ChangeAsked) == [] and run.run.in_force() == InForce()
    assert {record.status for record in read_state(run.run).changes.records} == {"refused"}
    assert ask(run, "micro_batch=20000", "grad_accum=1", force=True).answer == "done"
    stop(run)


def test_what_the_ranks_cannot_do_leaves_everything_as_it_was(start: Start) -> None:
    run = start(refuses=1)
    answer = ask(run, "seq_len=128")
    assert (answer.answer, answer.reason) == ("refused", "no room for a state")
    assert run.run.in_force() == InForce()
    state = read_state(run.run)
    assert [record.status for record in state.changes.records] == ["refused"]
    assert state.changes.setting == 0
    assert ask(run, "seq_len=64").answer == "done", "the next one has a number of its own"
    assert run.run.in_force() == InForce(setting=2)
    stop(run)


def test_a_relaunch_goes_on_after_the_step_that_was_saved(start: Start) -> None:
    run = start()
    assert ask(run, "zero=3", "gpus=1").answer == "done"
    began, restaged = run.of(RestageBegan)[0], run.of(Restaged)[0]
    assert (began.setting, began.from_setting, began.world_size, began.saved_bytes) == (1, 0, 1, 7)
    assert restaged.step == began.last_step + 1
    assert restaged.down_seconds is not None and restaged.down_seconds > 0
    assert {"save", "end"} <= set(restaged.stage_seconds)
    assert [event.setting for event in run.of(RankStarted)] == [0, 0, 1]
    assert run.run.in_force() == InForce(setting=1)
    assert restagefolder.restage_folders(run.run) == (), "a state in memory is removed after the first step"
    state = read_state(run.run)
    assert list(state.ranks) == [0] and state.world_size == 1 and state.status == "running"
    assert [span.setting for span in state.changes.spans] == [0, 1]
    assert state.changes.records[0].down_seconds == restaged.down_seconds
    stop(run)


def test_a_state_that_cannot_be_saved_leaves_the_run_training(start: Start) -> None:
    run = start(refuses=1)
    answer = ask(run, "zero=1")
    assert (answer.answer, answer.reason) == ("refused", "no room for a state")
    assert len(run.of(RankStarted)) == 2, "nobody was started again"
    assert restagefolder.restage_folders(run.run) == ()
    stop(run)


@pytest.mark.parametrize("how", ["fails_on", "hangs_on"])
def test_a_setting_that_fails_brings_the_old_one_back(start: Start, how: str) -> None:
    run = start(**{how: 1})
    asked = control.change(run.run, control.SetParams(words=("attention=eager",)))
    if how == "hangs_on":
        run.wait_for_files("hangs")
        run.wait_for(lambda: len(run.of(RankStarted)) == 4)
        # The other one is ended for it, maybe before a second signal would come.
        os.kill(run.of(RankStarted)[2].pid, signal.SIGKILL)
    answer = control.wait_until_settled(run.run, asked, TIMEOUT_SECONDS)
    assert answer is not None and answer.answer == "refused"
    assert "the run is back on its old setting" in answer.reason
    failed = run.of(RestageFailed)[0]
    assert (failed.setting, failed.back_to) == (1, 0)
    assert ("this setting cannot be built" if how == "fails_on" else "SIGKILL") in failed.reason
    assert run.run.in_force() == InForce() and run.run.spec().options.attention == "sdpa"
    last = run.of(RestageBegan)[0].last_step
    run.wait_for(lambda: read_state(run.run).steps_finished > last)
    state = read_state(run.run)
    assert [record.status for record in state.changes.records] == ["failed"]
    assert [span.setting for span in state.changes.spans] == [0]
    assert state.status == "running"
    stop(run)


def test_a_supervisor_killed_in_a_relaunch_leaves_the_truth_and_a_state(start: Start) -> None:
    run = start(hangs_on=1)
    asked = control.change(run.run, control.SetParams(words=("zero=3",)))
    run.wait_for_files("hangs")
    last = run.of(RestageBegan)[0].last_step
    os.kill(run.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not run.run.supervisor_alive() and run.processes() == [])
    state = read_state(run.run)
    assert state.status == "lost"
    under_way = state.changes.under_way
    assert under_way is not None and under_way.setting == 1
    report = build_report(run.run)
    assert "between two settings" in report.reason
    assert f"{memory_folder(run.run)}/step-{last}, in memory, until" in report.fix
    assert f"llmtop resume {run.run.run_id}" in report.fix and report.fix in " ".join(render(report).split())
    assert run.run.in_force() == InForce(setting=1, fall_back=0)

    run.start()
    run.wait_for(lambda: read_state(run.run).steps_finished > last)
    assert run.run.in_force() == InForce()
    (failed,) = run.of(RestageFailed)
    assert "the supervisor ended before" in failed.reason
    assert [answer.answer for answer in control.answers(run.run)[asked]] == ["accepted", "refused"]
    assert [path.name for path in run.run.checkpoints_dir.iterdir()] == [f"step-{last}"]
    assert not memory_folder(run.run).exists()
    state = read_state(run.run)
    assert [record.status for record in state.changes.records] == ["failed"]
    assert (state.status, state.changes.setting) == ("running", 0)
    stop(run)


def test_a_supervisor_killed_while_ranks_are_made_ready_leaves_no_change_under_way(start: Start) -> None:
    run = start(hangs_early=1)
    asked = control.change(run.run, control.SetParams(words=("zero=3",)))
    run.wait_for(lambda: asked in control.answers(run.run))
    os.kill(run.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not run.run.supervisor_alive() and run.processes() == [])
    run.start()
    run.wait_for(lambda: len(control.answers(run.run)[asked]) == 2)
    answer = control.answers(run.run)[asked][-1]
    assert (answer.answer, answer.reason) == ("refused", leftover.ENDED_BEFORE)
    (record,) = read_state(run.run).changes.records
    assert (record.status, record.reason) == ("refused", leftover.ENDED_BEFORE)
    assert ask(run, "micro_batch=2").answer == "done"
    stop(run)


def test_a_stop_during_a_relaunch_keeps_the_state_and_answers(start: Start) -> None:
    run = start(hangs_on=1)
    asked = control.change(run.run, control.SetParams(words=("zero=3",)))
    run.wait_for_files("hangs")
    last = run.of(RestageBegan)[0].last_step
    second = ask(run, "micro_batch=2")
    assert second.answer == "refused" and "another change is under way" in second.reason
    stop(run)
    answer = control.answers(run.run)[asked][-1]
    assert answer.answer == "refused" and "the run has ended before it was made" in answer.reason
    assert [path.name for path in run.run.checkpoints_dir.iterdir()] == [f"step-{last}"]


def test_a_stop_while_ranks_are_made_ready_is_what_ended_the_change(start: Start) -> None:
    run = start(hangs_early=1)
    asked = control.change(run.run, control.SetParams(words=("zero=3",)))
    answer = control.wait_for_answer(run.run, asked, TIMEOUT_SECONDS)
    assert answer is not None and answer.answer == "accepted"
    stop(run)
    answer = control.answers(run.run)[asked][-1]
    assert answer.answer == "refused"
    assert "the run has ended before it was made: stopped" in answer.reason
    (record,) = read_state(run.run).changes.records
    assert (record.status, record.reason) == ("refused", answer.reason)
    assert run.of(RestageBegan) == [] and run.processes() == []


def test_a_request_without_a_change_in_it_is_refused(start: Start) -> None:
    run = start()
    broken = control.request(run.run, control.SET, {"word": "micro_batch=2"})
    answer = control.wait_until_settled(run.run, broken, TIMEOUT_SECONDS)
    assert answer is not None and "the request holds no change" in answer.reason
    assert all(not isinstance(event, ChangeApplied) for event in run.events(0))
    stop(run)


def test_ranks_that_fail_while_they_are_made_ready_leave_the_run_untouched(start: Start) -> None:
    run = start(fails_early=1)
    answer = ask(run, "zero=3")
    assert answer.answer == "refused" and "the run was not touched" in answer.reason
    assert len(run.of(RankStarted)) == 2 and run.of(RestageBegan) == []
    assert [record.status for record in read_state(run.run).changes.records] == ["refused"]
    assert ask(run, "zero=1").answer == "done"
    stop(run)


def test_ranks_that_never_get_ready_leave_the_run_untouched(start: Start) -> None:
    # Long enough for one of them to load what it needs, however busy the machine is.
    run = start(graces=f"{GRACES},ready=8", hangs_early=1)
    before = {event.pid for event in run.of(RankStarted)}
    answer = ask(run, "zero=3")
    assert answer.answer == "refused" and "the run was not touched" in answer.reason
    assert "1 of 2 ranks of the new setting had loaded" in answer.reason
    run.wait_for(lambda: set(run.processes()) == before)
    assert run.of(RestageBegan) == [] and run.run.in_force() == InForce()
    stop(run)


def test_a_run_that_fails_on_its_way_back_says_where_its_state_is(start: Start) -> None:
    run = start(fails_on=1, fails_back=0)
    control.change(run.run, control.SetParams(words=("attention=eager",)))
    end = run.end()
    last = run.of(RestageBegan)[0].last_step
    assert end.state == "failed" and run.of(RestageFailed)
    kept = run.run.checkpoints_dir / f"step-{last}"
    assert kept.is_dir() and f"the state saved for the change is kept as {kept}" in end.fix


def test_a_folder_that_takes_no_setting_refuses_the_change_and_the_run_goes_on(start: Start) -> None:
    run = start()
    (run.run.path / "settings").write_text("in the way")
    answer = ask(run, "micro_batch=2")
    assert answer.answer == "refused" and "cannot be written" in answer.reason
    assert "free some space" in run.of(ChangeRefused)[0].fix
    (run.run.path / "settings").unlink()
    assert ask(run, "micro_batch=2").answer == "done"
    stop(run)


@pytest.mark.parametrize("word", ["micro_batch=2", "zero=1"])
def test_ranks_that_cannot_be_asked_go_on_and_the_change_is_refused(start: Start, word: str) -> None:
    run = start()
    run.run.live_path.mkdir()
    answer = ask(run, word)
    assert answer.answer == "refused" and "cannot be written" in answer.reason
    assert run.of(RestageBegan) == [] and len(run.of(RankStarted)) == 2
    assert [record.status for record in read_state(run.run).changes.records] == ["refused"]
    run.run.live_path.rmdir()
    assert ask(run, word).answer == "done"
    stop(run)


@pytest.mark.parametrize("attempts", [3, None])
def test_the_way_back_waits_for_room_and_says_what_to_do_where_none_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: int | None
) -> None:
    run = Supervised(tmp_path / "runs").run
    events: list[AnyEvent] = []
    changes = Changes(
        run, Ranks(), lambda setting: None, events.append, lambda *told: None, lambda line: None
    )
    asked = control.Request(request_id="1", action=control.SET, params={"words": ["zero=3"]})
    changes._now = UnderWay(request=asked, setting=1, from_setting=0, phase=Phase.TRIAL)
    tries: list[int] = []

    def full(setting: int) -> None:
        tries.append(setting)
        if attempts is None or len(tries) < attempts:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "put_in_force", full)
    monkeypatch.setattr("llmtop.trainer.supervisor.changes._ROOM_PAUSE_SECONDS", 0.0)
    end = RunEnded(state="failed", reason="rank 1 fell over")
    if attempts is None:
        monkeypatch.setattr("llmtop.trainer.supervisor.changes._ROOM_SECONDS", 0.0)
        with pytest.raises(LlmtopError, match="No space left") as told:
            changes.goes_on(Progress(run, 2), end)
        assert str(run.path) in told.value.fix and "rank 1 fell over" in told.value.what
    else:
        assert changes.goes_on(Progress(run, 2), end)
        assert tries == [0] * attempts and isinstance(events[-1], RestageFailed)
