"""Out of memory in real ranks under a real supervisor: a report, and a run that goes on to the right end."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtop.presets.errors import ExitCode
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.changeevents import ChangeAsked
from llmtop.profiler.record.checkpointevents import CheckpointLoaded
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import RunEnded, StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from llmtop.trainer import control
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.launch import start_supervisor
from llmtop.trainer.worker.build import build_model
from llmtop.tui.cli import main
from tests.worker.healing_ranks import PLANTS
from tests.worker.launching import events_of, log_end, tiny_spec
from tests.worker.plain_training import plain_losses

pytestmark = pytest.mark.slow

STEPS, RANKS = 7, 2
TIMEOUT_SECONDS = 240.0
Launch = Callable[..., RunDir]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Starts a run whose rank 1 runs out of memory in the fifth step, unless its micro-batch is below 4."""
    weights = str(tmp_path / "weights")
    build_model(tiny_spec(), {}, torch.device("cpu")).save_pretrained(weights)  # type: ignore[operator]
    worker = shlex.join([sys.executable, "-m", "tests.worker.oom_worker"])
    monkeypatch.setenv("LLMTOP_WORKER_COMMAND", worker)
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))
    started: list[RunDir] = []

    def begin(place: str, **options: Any) -> RunDir:
        spec = tiny_spec(
            gpus=RANKS,
            micro_batch=4,
            steps=STEPS,
            checkpoint_every=3,
            threads_per_rank=1,
            weights_dir=weights,
            **options,
        )
        run = RunDir.create(tmp_path / "runs", spec, predict(spec), deepspeed_config(spec))
        plants = [{"ranks": [1], "step": 5, "place": place, "from": 4}]
        (run.path / PLANTS).write_text(json.dumps(plants))
        started.append(run)
        start_supervisor(run)
        return run

    yield begin
    for run in started:
        if run.supervisor_alive():
            control.stop(run, save=False)
            control.wait_for_end(run, TIMEOUT_SECONDS)


def end_of(run: RunDir) -> RunEnded:
    end = control.wait_for_end(run, TIMEOUT_SECONDS)
    assert end is not None, log_end(run, 0) + log_end(run, 1)
    return end


def losses_by_step(run: RunDir) -> list[float | None]:
    """Of each step as it was made last."""
    return list({event.step: event.loss for event in events_of(run, 0, StepFinished)}.values())


def test_a_report_in_place_of_a_traceback_and_a_run_that_goes_on(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launch("late", zero=2)
    end = end_of(run)
    assert (end.state, end.rank) == ("out_of_memory", 1)
    assert end.reason.startswith("rank 1 in backward of step 5: OutOfMemoryError: CUDA out of memory.")
    log = run.log_path(1).read_text()
    assert "Traceback" not in log and f"llmtop report {run.run_id}" in log
    report = build_report(run)
    found = report.out_of_memory
    assert found is not None and (found.rank, found.step, found.stage) == (1, 5, "backward")
    assert found.shortage is not None and found.shortage.requested_bytes == 2 << 30
    assert found.where.startswith("worker/healing_ranks.py:")
    text = " ".join(render(report).split())
    assert "rank 1 in backward of step 5 at worker/healing_ranks.py" in text and "asked for 2.00 GiB" in text
    assert main(["resume", run.run_id, "micro_batch=2", "--headless"]) == ExitCode.DONE
    assert "goes on after step 3" in capsys.readouterr().err
    assert [event.step for event in events_of(run, 1, CheckpointLoaded)] == [3]
    assert losses_by_step(run) == pytest.approx(plain_losses(run, {}, STEPS), rel=2e-4)
    state = read_state(run)
    assert state.status == "completed" and [r.status for r in state.changes.records] == ["applied"]
    assert build_report(run).out_of_memory is None, "it is of a process that is gone"


def test_a_step_that_cannot_be_taken_back_is_healed_from_the_checkpoint(launch: Launch) -> None:
    run = launch("late", zero=3, heal=True)
    end = end_of(run)
    assert end.state == "completed", (end.reason, log_end(run, 0), log_end(run, 1))
    assert losses_by_step(run) == pytest.approx(plain_losses(run, {}, STEPS), rel=2e-4)
    events = EventTail(run.events_path(SUPERVISOR)).poll()
    (asked,) = [event for event in events if isinstance(event, ChangeAsked)]
    assert asked.restage and "rank 1 ran out of memory" in asked.why
    options = run.spec().options
    assert (options.micro_batch, options.grad_accum) == (2, 2)
