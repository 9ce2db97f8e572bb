"""Steps in which memory runs out, on two ranks of real DeepSpeed, are made again to the same end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from llmtop.profiler.memory.halving import doubled, halved
from llmtop.profiler.record.events import AnyEvent, RankFinished, StepFinished
from llmtop.profiler.record.failureevents import StepHealed
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.statefile import Position
from llmtop.trainer.worker.build import build_model
from llmtop.trainer.worker.heal import Healing
from llmtop.trainer.worker.vote import Vote
from tests.worker.healing_ranks import PLANTS
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

STEPS, RANKS = 8, 2
PLANTED: tuple[dict[str, Any], ...] = (
    {"ranks": [1], "step": 1, "place": "forward", "from": 8},
    {"ranks": [0], "step": 3, "place": "late", "from": 4},
    {"ranks": [0, 1], "step": 6, "place": "early", "from": 2},
)
"""One after the other halves the micro-batch of 8, to 1 in the end."""
CASES: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 1, accumulated": {"zero": 1, "micro_batch": 4, "grad_accum": 2, "weight_decay": 0.1},
    "zero 2, recomputed": {"zero": 2, "gradient_checkpointing": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize(
    ("sizes", "smaller"),
    [((8, 1), (4, 2)), ((1, 8), None), ((3, 1), (1, 3)), ((6, 2), (3, 4)), ((5, 4), (2, 10))],
)
def test_half_a_micro_batch_keeps_the_sequences_of_a_step(
    sizes: tuple[int, int], smaller: tuple[int, int] | None
) -> None:
    assert halved(*sizes) == smaller


@pytest.mark.parametrize(
    ("sizes", "larger"),
    [
        ((4, 2), (8, 1)),
        ((8, 1), None),
        ((4, 3), (12, 1)),
        ((3, 4), (6, 2)),
        ((2, 10), (4, 5)),
        ((2, 5), (5, 2)),
    ],
)
def test_twice_a_micro_batch_keeps_the_sequences_of_a_step(
    sizes: tuple[int, int], larger: tuple[int, int] | None
) -> None:
    assert doubled(*sizes) == larger


def healing_run(folder: Path, plants: tuple[dict[str, Any], ...], **options: Any) -> RunDir:
    chosen = {"micro_batch": 8, "grad_accum": 1, **options}
    spec = tiny_spec(gpus=RANKS, steps=STEPS, lr_schedule="cosine", warmup_steps=3, heal=True, **chosen)
    run = make_run(folder, spec)
    config = deepspeed_config(spec)
    # Several buckets, so that gradients are reduced while others are still to come.
    config["zero_optimization"]["reduce_bucket_size"] = 30_000
    (run.path / "deepspeed.json").write_bytes(msgspec.json.encode(config))
    (run.path / PLANTS).write_text(json.dumps(plants))
    return run


def start(runs: list[RunDir]) -> list[int]:
    script = Path(__file__).with_name("healing_ranks.py")
    return wait_for_ranks(start_ranks(runs[0], [sys.executable, str(script), *(str(r.path) for r in runs)]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """One run for each case, all in one pair of processes."""
    folder = tmp_path_factory.mktemp("healing")
    weights = str(folder / "weights")
    build_model(tiny_spec(), {}, torch.device("cpu")).save_pretrained(weights)  # type: ignore[operator]
    made = {
        name: healing_run(folder / f"run-{number}", PLANTED, weights_dir=weights, **options)
        for number, (name, options) in enumerate(CASES.items())
    }
    codes = start(list(made.values()))
    first = next(iter(made.values()))
    assert codes == [0] * RANKS, log_end(first, 0) + log_end(first, 1)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_a_healed_run_equals_plain_torch_that_never_ran_out(runs: dict[str, RunDir], case: str) -> None:
    run = runs[case]
    losses = [event.loss for event in events_of(run, 0, StepFinished)]
    assert losses == pytest.approx(plain_losses(run, {}, STEPS), rel=2e-4)
    assert [event.last_step for event in events_of(run, 1, RankFinished)] == [STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_every_healed_step_is_told_by_all_ranks_and_by_the_one_that_ran_out_in_full(
    runs: dict[str, RunDir], case: str
) -> None:
    run, options = runs[case], runs[case].spec().options
    plants = [plant for plant in PLANTED if plant["from"] <= options.micro_batch]
    told = {rank: events_of(run, rank, StepHealed) for rank in range(RANKS)}
    for rank, events in told.items():
        assert [event.step for event in events] == [plant["step"] for plant in plants]
        for event, plant in zip(events, plants, strict=True):
            assert event.micro_batch * event.grad_accum == options.micro_batch * options.grad_accum
            assert event.micro_batch == plant["from"] // 2
            phase = "forward" if plant["place"] == "forward" else "backward"
            assert event.stage == (phase if rank in plant["ranks"] else None)
            assert (event.shortage is not None) == (rank in plant["ranks"])
    sizes = [(event.micro_batch, event.grad_accum) for event in events_of(run, 0, StepFinished)]
    assert sizes[-1] == (1, options.micro_batch * options.grad_accum)


class Alone:
    """An engine of one rank, as far as healing looks at it."""

    device = torch.device("cpu")


@pytest.mark.parametrize(
    ("micro_batch", "updates", "error"),
    [
        (4, True, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        (1, False, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        (4, False, RuntimeError("CUDA error: out of memory")),
    ],
    ids=["an update that has begun", "one sequence", "another error"],
)
def test_what_is_not_healed_ends_the_rank(micro_batch: int, updates: bool, error: Exception) -> None:
    sizes = SimpleNamespace(options=tiny_spec(micro_batch=micro_batch).options)
    batches = SimpleNamespace(position=Position(), micro_batch=micro_batch)
    stages = SimpleNamespace(current="forward", step=1, micro_batch=None)
    told: list[AnyEvent] = []
    probes: Any = None
    healing = Healing(Alone(), batches, sizes, probes, stages, Vote(1), told.append)  # type: ignore[arg-type]
    tries: list[int] = []

    def train(step: int, grad_accum: int) -> None:
        tries.append(grad_accum)
        if updates:
            healing.before_update()
        raise error

    with pytest.raises(type(error)):
        healing.attempt(1, 2, train)
    assert tries == [2] and told == [] and sizes.options.micro_batch == micro_batch
