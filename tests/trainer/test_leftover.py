"""Requests that a supervisor was killed over, as the next one settles them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmtop.profiler.changewords import outcome
from llmtop.profiler.fold.changestate import ChangeRecord, ChangeStatus
from llmtop.profiler.record.changeevents import (
    ChangeApplied,
    ChangeAsked,
    ChangeRefused,
    RestageBegan,
    Restaged,
    RestageFailed,
)
from llmtop.profiler.record.eventlog import EventTail, EventWriter
from llmtop.profiler.record.events import AnyEvent, ControlAnswered
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import SUPERVISOR, InForce, RunDir
from llmtop.trainer import control
from llmtop.trainer.supervisor.changes import Changes
from llmtop.trainer.supervisor.leftover import ENDED_BEFORE, NO_STEP_YET
from llmtop.trainer.supervisor.lifeline import run_started
from llmtop.trainer.supervisor.ranks import Ranks
from llmtop.trainer.supervisor.requests import Requests
from tests.trainer.supervised import Supervised


def written(run: RunDir, src: str, *events: AnyEvent) -> None:
    with EventWriter(run.events_path(src), src) as writer:
        for event in events:
            writer.write(event)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(RunDir, "supervisor_alive", lambda _: True)
    made = Supervised(tmp_path / "runs").run
    for _ in range(2):
        made.add_setting(made.spec(), made.prediction(), {})
    written(made, SUPERVISOR, run_started(made, "test", 2))
    return made


def settled(run: RunDir, in_force: InForce) -> list[tuple[str, str]]:
    """Answers that the next supervisor gives, after one that left this in force."""
    run.put_in_force(in_force.setting, fall_back=in_force.fall_back, ended_on=in_force.ended_on)
    left = [asked.request_id for asked in control.pending(run)]
    recovered(run)
    assert control.pending(run) == ()
    return [
        (given[-1].answer, given[-1].reason) for name, given in control.answers(run).items() if name in left
    ]


def recovered(run: RunDir) -> None:
    """As the next supervisor begins."""
    with EventWriter(run.events_path(SUPERVISOR), SUPERVISOR) as writer:
        requests = Requests(run, writer.write)
        changes = Changes(run, Ranks(), nothing, writer.write, requests.answer, nothing)
        changes.recover(requests.earlier)


def nothing(_: object) -> None:
    pass


MADE, BEGAN = (
    ChangeApplied(setting=1, step=7),
    RestageBegan(setting=1, from_setting=0, last_step=6, world_size=2),
)


@pytest.mark.parametrize(
    ("restage", "happened", "in_force", "answer", "status", "setting", "step"),
    [
        (False, None, InForce(), "refused", "failed", 0, None),
        (False, MADE, InForce(), "refused", "failed", 0, 7),
        (False, MADE, InForce(setting=1), "done", "applied", 1, 7),
        (True, None, InForce(), "refused", "refused", 0, None),
        (True, BEGAN, InForce(setting=1), "done", "applied", 1, 7),
    ],
)
def test_a_change_that_was_begun_has_an_end_that_is_true(
    run: RunDir,
    restage: bool,
    happened: AnyEvent | None,
    in_force: InForce,
    answer: str,
    status: ChangeStatus,
    setting: int,
    step: int | None,
) -> None:
    asked = control.change(run, control.SetParams(words=("micro_batch=2",)))
    began: list[AnyEvent] = [
        ChangeAsked(setting=1, request_id=asked, restage=restage),
        ControlAnswered(request_id=asked, action=control.SET, answer="accepted"),
    ]
    written(run, SUPERVISOR, *began, *([happened] if isinstance(happened, RestageBegan) else []))
    if isinstance(happened, ChangeApplied):
        written(run, "rank0", happened)
        written(run, "rank1", happened)
    assert settled(run, in_force) == [(answer, "" if answer == "done" else ENDED_BEFORE)]
    changes = read_state(run).changes
    (record,) = changes.records
    assert (record.status, changes.setting, record.step) == (status, setting, step)
    assert changes.under_way is None


OUT_OF_MEMORY = "rank 0 ran out of device memory"
FAILED = RestageFailed(setting=1, back_to=0, reason=OUT_OF_MEMORY, world_size=2)
RESTAGED = Restaged(setting=1, step=7, down_seconds=12.5, stage_seconds={"save": 1.0}, notes=("packed anew",))


def ended_change(
    run: RunDir, happened: tuple[AnyEvent, ...], in_force: InForce, *, restage: bool = True
) -> tuple[ChangeRecord, tuple[str, str]]:
    """A change that a supervisor was killed over after all that `happened`, and what it is answered.

    One between two steps the ranks had made.
    """
    asked = control.change(run, control.SetParams(words=("zero=3",)))
    taken_up = ChangeAsked(setting=1, request_id=asked, restage=restage)
    accepted = ControlAnswered(request_id=asked, action=control.SET, answer="accepted")
    written(run, SUPERVISOR, taken_up, accepted, *happened)
    for rank in range(0 if restage else 2):
        written(run, f"rank{rank}", MADE)
    (answer,) = settled(run, in_force)
    return read_state(run).changes.records[0], answer


@pytest.mark.parametrize("in_force", [InForce(), InForce(setting=2, ended_on=0)])
@pytest.mark.parametrize(
    ("happened", "status"),
    [((BEGAN, FAILED), "failed"), ((ChangeRefused(setting=1, reason=OUT_OF_MEMORY),), "refused")],
)
def test_the_end_that_the_record_has_is_kept(
    run: RunDir, happened: tuple[AnyEvent, ...], status: ChangeStatus, in_force: InForce
) -> None:
    record, answer = ended_change(run, happened, in_force)
    assert (record.status, record.reason) == (status, OUT_OF_MEMORY)
    assert answer == ("refused", OUT_OF_MEMORY)
    assert read_state(run).changes.setting == in_force.setting


def test_one_that_was_refused_at_once_is_in_the_record_once(run: RunDir) -> None:
    asked = control.change(run, control.SetParams(words=("zero=3",)))
    written(run, SUPERVISOR, ChangeRefused(request_id=asked, asked=("zero=3",), reason=OUT_OF_MEMORY))
    assert settled(run, InForce()) == [("refused", OUT_OF_MEMORY)]
    assert [record.reason for record in read_state(run).changes.records] == [OUT_OF_MEMORY]


@pytest.mark.parametrize("in_force", [InForce(setting=1), InForce(setting=2, ended_on=1)])
def test_a_relaunch_that_was_told_as_made_keeps_what_is_known_of_it(run: RunDir, in_force: InForce) -> None:
    record, answer = ended_change(run, (BEGAN, RESTAGED), in_force)
    assert (record.status, record.down_seconds) == ("applied", 12.5)
    assert record.restaged is not None
    assert (record.restaged.stage_seconds, record.restaged.notes) == ({"save": 1.0}, ("packed anew",))
    assert answer == ("done", "")


@pytest.mark.parametrize(
    ("in_force", "back_to"),
    [
        (InForce(), 0),  # put in force again, and not told
        (InForce(setting=1, fall_back=0), 0),
        (InForce(setting=2, ended_on=1), 1),  # on trial, and then gone on with on a change of it
        (InForce(setting=2, ended_on=0), 0),
    ],
)
def test_a_relaunch_that_was_begun_has_failed(run: RunDir, in_force: InForce, back_to: int) -> None:
    record, (answer, reason) = ended_change(run, (BEGAN,), in_force)
    assert (record.status, record.back_to) == ("failed", back_to)
    assert answer == "refused" and reason == record.reason and "the supervisor ended before" in reason
    changes = read_state(run).changes
    assert changes.setting == (0 if in_force.ended_on is None else 2)
    assert ("back on the old setting" in outcome(record)) == (back_to == 0)


@pytest.mark.parametrize(("ended_on", "status"), [(0, "failed"), (1, "applied")])
def test_a_run_that_goes_on_with_another_setting_is_not_back_on_it(
    run: RunDir, ended_on: int, status: ChangeStatus
) -> None:
    """A change between two steps, and then one of the run that had ended."""
    record, (answer, _) = ended_change(run, (), InForce(setting=2, ended_on=ended_on), restage=False)
    assert (record.status, answer) == (status, "done" if ended_on else "refused")
    assert record.back_to == (None if ended_on else 0)
    assert read_state(run).changes.setting == 2


def test_what_nobody_had_read_is_refused_and_recorded(run: RunDir) -> None:
    control.change(run, control.SetParams(words=("micro_batch=2",)))
    control.stop(run, save=True)
    assert settled(run, InForce()) == [("refused", ENDED_BEFORE)] * 2
    (record,) = read_state(run).changes.records
    assert record.refused is not None and record.refused.asked == ("micro_batch=2",)
    assert settled(run, InForce()) == [], "once"


def resumed_with(run: RunDir, setting: int, ended_on: int) -> None:
    """A supervisor begins to go on with a change of a run that had ended."""
    run.put_in_force(setting, ended_on=ended_on)
    recovered(run)


@pytest.mark.parametrize("goes_on", ["as it is", "with another change", "with none, as it did not start"])
def test_a_change_of_an_ended_run_whose_supervisor_was_killed_before_a_step_has_an_end(
    run: RunDir, goes_on: str
) -> None:
    resumed_with(run, 1, 0)
    (record,) = read_state(run).changes.records
    assert (record.status, record.setting) == ("under way", 1)
    if goes_on == "with another change":
        resumed_with(run, 2, 1)
    else:
        run.put_in_force(1 if goes_on == "as it is" else 0)
        recovered(run)
    changes = read_state(run).changes
    back_to = 0 if "none" in goes_on else 1
    assert (changes.records[0].status, changes.records[0].back_to) == ("failed", back_to)
    assert changes.records[0].reason == NO_STEP_YET
    assert changes.setting == run.in_force().setting
    assert [one.status for one in changes.records[1:]] == ["under way"] * ("another" in goes_on)
    before = read_state(run).changes
    if goes_on == "as it is":
        recovered(run)
        assert read_state(run).changes == before, "once"


@pytest.mark.parametrize("asks", [0, 2])
def test_the_log_is_read_once_and_only_where_something_was_asked_or_changed(
    run: RunDir, asks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(run.settings_dir)
    for _ in range(asks):
        control.change(run, control.SetParams(words=("micro_batch=2",)))
    read: list[Path] = []
    poll = EventTail.poll

    def watched(tail: EventTail) -> list[AnyEvent]:
        read.append(tail.path)
        return poll(tail)

    monkeypatch.setattr(EventTail, "poll", watched)
    recovered(run)
    assert read == [run.events_path(SUPERVISOR)] * (1 if asks else 0)
