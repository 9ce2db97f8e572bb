"""Requests that a supervisor was killed over, as the next one settles them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.profiler.fold.changestate import ChangeStatus
from llmtop.profiler.record.changeevents import ChangeApplied, ChangeAsked, RestageBegan
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import AnyEvent, ControlAnswered
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import SUPERVISOR, InForce, RunDir
from llmtop.trainer import control
from llmtop.trainer.supervisor.leftover import ENDED_BEFORE, settle_left
from llmtop.trainer.supervisor.lifeline import run_started
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
    written(made, SUPERVISOR, run_started(made, "test", 2))
    return made


def settled(run: RunDir, in_force: InForce) -> list[tuple[str, str]]:
    """Answers that the next supervisor gives."""
    with EventWriter(run.events_path(SUPERVISOR), SUPERVISOR) as writer:
        requests = Requests(run, writer.write)
        settle_left(run, requests.left, in_force, writer.write, requests.answer)
        left = [asked.request_id for asked in requests.left]
    assert control.pending(run) == ()
    return [
        (given[-1].answer, given[-1].reason) for name, given in control.answers(run).items() if name in left
    ]


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


def test_what_nobody_had_read_is_refused_and_recorded(run: RunDir) -> None:
    control.change(run, control.SetParams(words=("micro_batch=2",)))
    control.stop(run, save=True)
    assert settled(run, InForce()) == [("refused", ENDED_BEFORE)] * 2
    (record,) = read_state(run).changes.records
    assert record.refused is not None and record.refused.asked == ("micro_batch=2",)
    assert settled(run, InForce()) == [], "once"
