"""Changes between two steps: real DeepSpeed on two ranks against plain torch with the same schedule."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from llmtop.profiler.record.changeevents import ChangeApplied
from llmtop.profiler.record.events import MemoryClassified, RankFinished, StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.worker.build import build_model
from tests.recorded_spec import recorded_prediction
from tests.worker.changing_ranks import SCRIPT
from tests.worker.launching import (
    deepspeed_config,
    events_of,
    log_end,
    make_run,
    start_ranks,
    tiny_spec,
    wait_for_ranks,
)
from tests.worker.plain_training import plain_losses

pytestmark = pytest.mark.slow

STEPS, RANKS = 20, 2
CHANGES: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"micro_batch": 2, "grad_accum": 2}),
    # Three micro-batches a step after an even number of them: DeepSpeed's own count would end a step early.
    (6, {"micro_batch": 1, "grad_accum": 3, "gradient_checkpointing": True}),
    (10, {"learning_rate": 3e-3, "max_grad_norm": 0.1}),
    (14, {"seq_len": 16, "micro_batch": 4, "grad_accum": 1, "gradient_checkpointing": False}),
)
"""After which step what is asked for."""


def changing_run(folder: Path, **options: Any) -> RunDir:
    spec = tiny_spec(
        gpus=RANKS, micro_batch=4, grad_accum=1, steps=STEPS, lr_schedule="cosine", warmup_steps=3, **options
    )
    run = make_run(folder, spec)
    script = {}
    for step, change in CHANGES:
        spec = replace(spec, options=replace(spec.options, **change))
        script[step] = run.add_setting(spec, recorded_prediction(spec), deepspeed_config(spec))
    (run.path / SCRIPT).write_text(json.dumps(script))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RunDir]:
    """One run for each ZeRO stage, all in one pair of processes."""
    folder = tmp_path_factory.mktemp("changing")
    # Weights made in shards would be others than those that plain torch makes from the same seed.
    weights = str(folder / "weights")
    build_model(tiny_spec(), {}, torch.device("cpu")).save_pretrained(weights)  # type: ignore[operator]
    made = {
        zero: changing_run(
            folder / str(zero), zero=zero, weight_decay=0.1 if zero else 0.0, weights_dir=weights
        )
        for zero in range(4)
    }
    script = Path(__file__).with_name("changing_ranks.py")
    command = [sys.executable, str(script), *(str(run.path) for run in made.values())]
    assert wait_for_ranks(start_ranks(made[0], command)) == [0] * RANKS, log_end(made[0], 0)
    return made


def applied_steps(run: RunDir, rank: int) -> dict[int, int]:
    """First step with a setting to its number."""
    applied = events_of(run, rank, ChangeApplied)
    assert all(event.problem == "" for event in applied)
    return {event.step: event.setting for event in applied}


@pytest.mark.parametrize("zero", range(4))
def test_a_run_changed_on_the_way_equals_plain_torch_with_that_schedule(
    runs: dict[int, RunDir], zero: int
) -> None:
    run = runs[zero]
    schedule = applied_steps(run, 0)
    assert schedule == applied_steps(run, 1), "all ranks change at the same step"
    assert sorted(schedule.values()) == [1, 2, 3, 4]
    assert all(asked < step <= asked + 3 for (asked, _), step in zip(CHANGES, schedule, strict=True))
    seen = [event.loss for event in events_of(run, 0, StepFinished)]
    assert seen == pytest.approx(plain_losses(run, schedule, STEPS), rel=2e-4)


def test_every_step_tells_the_sizes_that_it_was_made_with(runs: dict[int, RunDir]) -> None:
    for zero, run in runs.items():
        schedule, sizes = applied_steps(run, 0), run.spec(0).options
        for event in events_of(run, 0, StepFinished):
            sizes = run.spec(schedule[event.step]).options if event.step in schedule else sizes
            assert (event.micro_batch, event.grad_accum) == (sizes.micro_batch, sizes.grad_accum), zero
            assert event.tokens == sizes.micro_batch * sizes.grad_accum * RANKS * sizes.seq_len
        assert [event.last_step for event in events_of(run, 1, RankFinished)] == [STEPS]


def test_the_step_after_a_change_is_classified(runs: dict[int, RunDir]) -> None:
    run = runs[2]
    classified = {event.step for event in events_of(run, 0, MemoryClassified)}
    assert classified == {1, 2, *applied_steps(run, 0)}
