"""A sweep in runs that are changed live: what goes into one run, and one real run through its settings."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from benchmarks import tune_live, tune_sweep
from benchmarks.rows import read_rows
from benchmarks.tune_bench import Bench
from benchmarks.tune_sweep import swept_settings
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.processidentity import ProcessIdentity
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.tune.trial import Start, end_run, start_trial


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    out = tmp_path / "rows.jsonl"
    return Bench(
        argparse.Namespace(out=out, minutes=5.0, gpus=1, fresh=True, built=True, cpu=True, live=True)
    )


def test_what_takes_a_relaunch_has_a_run_of_its_own(bench: Bench) -> None:
    spec = bench.spec("cpu")
    space = bench.space(spec, ["attention"], ["zero=1,2", "micro_batch=1,2,4", "checkpointing=none,all"])
    runs = tune_live.in_runs(space.candidates)
    assert [len(group) for group in runs] == [6, 6]
    for group in runs:
        assert len({one.choice["zero"] for one in group}) == 1
        assert [one for one in space.candidates if one in group] == group, "in the order of the whole"


class Kept:
    """Starts runs as a trial is started, and keeps what each has recorded by its end."""

    def __init__(self) -> None:
        self.steps: list[list[StepFinished]] = []
        self.runs: list[RunDir] = []

    def start(self, spec: RunSpec, root: Path) -> RunDir:
        self.runs.append(start_trial(spec, root))
        return self.runs[-1]

    def end(self, run: RunDir, supervisor: ProcessIdentity | None) -> None:
        end_run(run, supervisor)
        events = EventTail(run.events_path(0)).poll()
        self.steps.append([event for event in events if isinstance(event, StepFinished)])


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    kept = Kept()
    monkeypatch.setattr(tune_live, "end_run", kept.end)
    return kept


def _end(step: StepFinished) -> float:
    return step.ended if step.ended is not None else step.t


def test_one_run_measures_all_its_settings_by_their_own_steps(
    bench: Bench, tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By what is seen alone, on a machine that may be busy: neither by the clock nor by how far one is behind.
    monkeypatch.setattr(tune_live.Steps, "must_be_made", lambda steps, first: len(steps.intervals(first)))
    monkeypatch.setattr(tune_live, "BEHIND", math.inf)
    spec = bench.spec("cpu")
    settings = list(swept_settings(bench, "cpu", spec))[:4]
    root = tmp_path / "runs"
    came = list(tune_live.sweep_run(spec, settings, kept.start, root, None))
    assert [one.key for one, _ in came] == [one.key for one in settings]
    assert [got.outcome for _, got in came] == ["measured"] * len(settings), came
    assert [got.at_start for _, got in came] == [True] + [False] * (len(settings) - 1)
    (steps,) = kept.steps
    assert {(step.micro_batch or 0) * (step.grad_accum or 0) for step in steps} == {4}
    # Neighbours of the sweep differ in their micro-batch.
    spans = [list(span) for _, span in groupby(steps, lambda step: step.micro_batch)]
    assert [span[0].micro_batch for span in spans] == [one.choice["micro_batch"] for one in settings]
    for (_, got), span in list(zip(came, spans, strict=True))[:-1]:
        # The last before a change is reported at once, on a GPU a step earlier than the others.
        own = (span[1:] if got.at_start else span)[:-1]
        took = [_end(after) - _end(before) for before, after in pairwise(own)]
        assert len(took) == got.steps_measured >= 2
        assert got.step_seconds == pytest.approx(statistics.fmean(took))
    assert not root.exists() and not kept.runs[0].supervisor_alive()


def test_a_run_that_ends_by_itself_costs_one_setting_and_the_rest_goes_on_in_another(
    bench: Bench, tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_live, "_STEPS", 2)

    @contextmanager
    def starts(_spec: RunSpec, _root: Path) -> Iterator[Start]:
        yield kept.start

    monkeypatch.setattr(bench, "starts", starts)
    monkeypatch.setattr(tune_sweep, "swept_settings", lambda *given: list(swept_settings(*given))[:2])
    tune_sweep.sweep(bench, "cpu", tmp_path)
    rows = read_rows(bench.options.out)
    assert [row["outcome"] for row in rows] == ["failed", "failed"] and all(row["reason"] for row in rows)
    assert len(kept.runs) == 2
    tune_sweep.sweep(bench, "cpu", tmp_path)
    assert len(kept.runs) == 2, "what has a row is not measured again"
