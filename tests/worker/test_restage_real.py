"""A run of real DeepSpeed on two ranks that is changed in every way, against plain torch."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec import Struct

from llmtop.presets.errors import ExitCode
from llmtop.profiler.fold.changestate import ChangeRecord
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.checkpointevents import CheckpointLoaded
from llmtop.profiler.record.events import ModelBuilt, StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from llmtop.trainer import control
from llmtop.trainer.change import restagefolder
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.launch import start_supervisor
from llmtop.trainer.worker.build import build_model
from llmtop.tui.cli import main
from tests.worker.failing_worker import FAILS_ON_THREADS
from tests.worker.launching import events_of, log_end, tiny_spec
from tests.worker.plain_training import plain_losses

pytestmark = pytest.mark.slow

STEPS, RANKS = 100_000, 2
TIMEOUT_SECONDS = 240.0


class Changed(Struct, frozen=True, kw_only=True):
    """The run after all that was done to it."""

    run: RunDir
    records: tuple[ChangeRecord, ...]
    codes: tuple[int, ...]
    """Of each `llmtop set`."""


CHANGES: tuple[tuple[str, ...], ...] = (
    ("micro_batch=2",),
    ("zero=2", "attention=eager"),
    (f"threads_per_rank={FAILS_ON_THREADS}",),
    ("zero=3", "seq_len=16", "learning_rate=5e-4"),
    ("zero=1", "gpus=1", "micro_batch=4"),
)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    folder = tmp_path_factory.mktemp("restage")
    weights = str(folder / "weights")
    build_model(tiny_spec(), {}, torch.device("cpu")).save_pretrained(weights)  # type: ignore[operator]
    spec = tiny_spec(
        gpus=RANKS,
        zero=1,
        micro_batch=4,
        steps=STEPS,
        lr_schedule="linear",
        weight_decay=0.1,
        threads_per_rank=1,
        weights_dir=weights,
    )
    run = RunDir.create(folder / "runs", spec, predict(spec), deepspeed_config(spec))
    worker = Path(__file__).with_name("failing_worker.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMTOP_WORKER_COMMAND", shlex.join([sys.executable, str(worker)]))
        patch.setenv("LLMTOP_RUNS_DIR", str(folder / "runs"))
        start_supervisor(run)
        try:
            wait_for(run, lambda: read_state(run).steps_finished >= 2)
            codes = []
            for words in CHANGES:
                codes.append(main(["set", "latest", *words]))
                step = read_state(run).steps_finished
                wait_for(run, lambda step=step: read_state(run).steps_finished > step + 2)  # type: ignore[misc]
        finally:
            if run.supervisor_alive():
                control.stop(run, save=False)
                control.wait_for_end(run, TIMEOUT_SECONDS)
    yield Changed(run=run, records=read_state(run).changes.records, codes=tuple(codes))


def wait_for(run: RunDir, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert run.supervisor_alive() and time.monotonic() < end, (read_state(run).ended, log_end(run, 0))
        time.sleep(0.05)


def test_each_change_ends_as_it_should(changed: Changed) -> None:
    assert changed.codes == (0, 0, ExitCode.JOB_FAILED, 0, 0), log_end(changed.run, 0)
    assert [record.status for record in changed.records] == [
        "applied",
        "applied",
        "failed",
        "applied",
        "applied",
    ]
    assert "exit code 9" in changed.records[2].reason
    assert [record.down_seconds for record in changed.records][:1] == [0.0]
    for record in changed.records:
        if record.restaged is not None:
            assert record.down_seconds is not None
            parts = record.restaged.stage_seconds
            assert {"save", "end", "partition", "first_step"} <= parts.keys() and min(parts.values()) >= 0
            assert sum(parts.values()) == pytest.approx(record.down_seconds, rel=0.01), record.restaged
    assert restagefolder.restage_folders(changed.run) == ()


def test_the_losses_are_those_of_plain_torch_with_the_same_schedule(changed: Changed) -> None:
    """Through a relaunch at another stage, one that failed, and one on another number of ranks."""
    run = changed.run
    steps = events_of(run, 0, StepFinished)
    assert [event.step for event in steps] == list(range(1, len(steps) + 1)), "no step twice, none left out"
    schedule = {record.step: record.setting for record in changed.records if record.status == "applied"}
    expected = plain_losses(
        run, {step: setting for step, setting in schedule.items() if step and setting}, len(steps)
    )
    assert [event.loss for event in steps] == pytest.approx(expected, rel=1e-3)
    rates = [event.learning_rate for event in steps]
    base = [1e-3 if event.step < (changed.records[3].step or 0) else 5e-4 for event in steps]
    linear = [rate * (1 - (event.step - 1) / STEPS) for rate, event in zip(base, steps, strict=True)]
    assert rates == pytest.approx(linear)


def test_what_was_built_is_what_was_asked_for(changed: Changed) -> None:
    built = events_of(changed.run, 0, ModelBuilt)
    assert [event.attention for event in built] == ["sdpa", "eager", "eager", "eager", "eager"]
    loaded = events_of(changed.run, 0, CheckpointLoaded)
    assert [event.zero for event in loaded] == [1, 2, 2, 3]
    assert [event.world_size for event in loaded] == [2, 2, 2, 2]


def test_the_report_tells_the_changes_and_no_checkpoint_that_is_gone(changed: Changed) -> None:
    report = build_report(changed.run)
    assert [change.status for change in report.changes] == [record.status for record in changed.records]
    assert report.world_size == 1 and report.zero == 1 and report.checkpoints == ()
    shown = " ".join(render(report).split())
    assert "zero 1 -> 2, attention sdpa -> eager: from step" in shown
    assert "this setting was planted to fail" in shown
