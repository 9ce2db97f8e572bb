"""What the supervisor makes of steps that the ranks have healed, and of runs that it has to heal itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtop.profiler.changewords import details, outcome
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.spans import measured_spans
from llmtop.profiler.record.changeevents import ChangeAsked, Restaged
from llmtop.profiler.record.events import RankStarted
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import InForce
from llmtop.trainer import control
from tests.trainer.supervised import TIMEOUT_SECONDS, Supervised, cleaned_up, fake_ranks

Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def begin(scenario: str, **options: object) -> Supervised:
        fake_ranks(monkeypatch, scenario)
        run = Supervised(tmp_path / "runs", **options)  # type: ignore[arg-type]
        started.append(run)
        run.start()
        return run

    with cleaned_up() as started:
        yield begin


def test_a_step_that_the_ranks_have_healed_is_a_setting_of_the_run(start: Start) -> None:
    run = start("heals", micro_batch=4, grad_accum=2, heal=True)
    run.wait_for(lambda: run.run.in_force() == InForce(setting=1))
    run.wait_for(lambda: read_state(run.run).changes.setting == 1)
    options = run.run.spec().options
    assert (options.micro_batch, options.grad_accum) == (2, 4)
    state = read_state(run.run)
    (record,) = state.changes.records
    assert (record.status, record.step) == ("applied", 3) and outcome(
        record
    ) == "from step 3 on, without a pause"
    told = "rank 1 ran out of memory in backward of step 3: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert next(details(record, measured_spans(state))) == f"because {told}"
    assert {rank.setting for rank in state.ranks.values()} == {1}
    found = {one.key: one for one in findings(state, run.run.spec(), run.run.prediction())}
    assert told in found["healed"].evidence and "--micro-batch 2 --grad-accum 4" in found["healed"].change
    # A change by a person goes on from there.
    asked = control.change(run.run, control.SetParams(words=("zero=2",)))
    answer = control.wait_for_answer(run.run, asked, TIMEOUT_SECONDS)
    assert answer is not None and "nothing would change" in answer.reason
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"


def test_ranks_that_cannot_go_back_are_started_again_with_half_the_micro_batch(start: Start) -> None:
    run = start("fits_when_smaller", micro_batch=4, grad_accum=1, heal=True)
    end = run.end()
    assert end.state == "completed", end.reason
    assert run.run.in_force() == InForce(setting=1)
    options = run.run.spec().options
    assert (options.micro_batch, options.grad_accum) == (2, 2)
    assert [event.setting for event in run.of(RankStarted)] == [0, 0, 1, 1]
    (asked,) = run.of(ChangeAsked)
    assert asked.why.startswith("rank 1 ran out of memory in forward of step 3: CUDA out of memory")
    assert len(run.of(Restaged)) == 1
    assert [record.status for record in read_state(run.run).changes.records] == ["applied"]


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("fits_when_smaller", {"micro_batch": 1, "heal": True}),
        ("fits_when_smaller", {"micro_batch": 4}),
        ("host_memory", {"micro_batch": 4, "heal": True}),
    ],
    ids=["one sequence", "not asked", "host"],
)
def test_what_a_smaller_batch_does_not_heal_ends(
    start: Start, scenario: str, options: dict[str, object]
) -> None:
    run = start(scenario, **options)
    assert run.end().state == "out_of_memory"
    assert run.of(ChangeAsked) == [] and len(run.of(RankStarted)) == 2
