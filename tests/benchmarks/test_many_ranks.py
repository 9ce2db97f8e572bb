"""Four and eight real ranks on the CPU: bytes that they move at ZeRO-3, and memory that each one holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct

from benchmarks.admission import Gate, Room
from benchmarks.cells import Planned, Runner
from benchmarks.forkserver import ForkServer
from benchmarks.rows import Cell, Row
from benchmarks.zero3_links import ENTRY, moved, read_carried
from benchmarks.zygote import WORKER
from llmtop.presets.resolve import Machine
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import MemoryClassified
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from tests.worker.launching import TINY_LLAMA

pytestmark = pytest.mark.slow
SECONDS = 200.0
BARE: dict[str, Any] = {
    "stage3_param_persistence_threshold": 64,
    "stage3_max_live_parameters": 60_000,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 10_000,
}
"""Only norms stay whole, and layers come and go."""
CASES: dict[str, Cell] = {
    "four": {"gpus": 4, "grad_accum": 2, "deepspeed": {"zero_optimization": BARE}},
    "four_in_pairs": {
        "gpus": 4,
        "gradient_checkpointing": True,
        "lora_rank": 4,
        "precision": "bf16",
        "deepspeed": {"zero_optimization": {**BARE, "zero_hpz_partition_size": 2}},
    },
    "eight": {"gpus": 8, "gradient_checkpointing": True, "deepspeed": {"zero_optimization": BARE}},
    "eight_at_two": {"gpus": 8, "zero": 2},
}
AT_THREE = [name for name, options in CASES.items() if "zero" not in options]


class Done(Struct, frozen=True, kw_only=True):
    """A run that has ended, and what its ranks say that they moved."""

    planned: Planned
    run: RunDir
    ranks: list[Row]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Done]]:
    root = tmp_path_factory.mktemp("many")
    config = root / "config.json"
    config.write_text(json.dumps({**TINY_LLAMA, "architectures": ["LlamaForCausalLM"]}))
    machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)
    found: dict[str, Done] = {}
    with ForkServer(on_cpu=True) as server:
        everywhere = Room(device_bytes=None, host_bytes=None)
        runner = Runner(root / "runs", machine, Gate(everywhere), server)
        for name, options in CASES.items():
            cell: Cell = {
                "model": str(config),
                "zero": 3,
                "seq_len": 16,
                "micro_batch": 1,
                "steps": 6,
                "threads_per_rank": 1,
                **options,
            }
            planned = runner.plan(cell, name=name)
            carried = runner.forked(planned, SECONDS, entry=ENTRY if name in AT_THREE else WORKER)
            state = read_state(carried.run)
            assert state.status == "completed", (state.ended, carried.run.log_path(0).read_text()[-2000:])
            numbers = range(planned.spec.world_size) if name in AT_THREE else ()
            ranks = [read_carried(carried.run, rank) for rank in numbers]
            found[name] = Done(planned=planned, run=carried.run, ranks=ranks)
    yield found


@pytest.mark.parametrize("name", AT_THREE)
def test_collectives_carry_what_the_arithmetic_says_to_the_byte(done: dict[str, Done], name: str) -> None:
    row = moved(done[name].planned, done[name].ranks)
    assert row["order_is_known"]
    assert row["same_in_every_rank_and_step"], (row["expected"], row["counted"])
    assert any(f"of {CASES[name]['gpus']}" in words for words in row["expected"])


def test_second_shards_are_gathered_within_their_pairs(done: dict[str, Done]) -> None:
    expected = moved(done["four_in_pairs"].planned, done["four_in_pairs"].ranks)["expected"]
    assert expected["all_gather backward of 2"] > 0


@pytest.mark.parametrize("name", ["four", "eight", "eight_at_two"])
def test_every_rank_holds_the_share_that_is_predicted(done: dict[str, Done], name: str) -> None:
    """Between steps, by component; the model is padded for so many ranks tensor by tensor."""
    predicted = predict(done[name].planned.spec)
    steady = next(moment for moment in predicted.moments if moment.name is Moment.STEADY).components
    for rank in range(done[name].planned.spec.world_size):
        events = EventTail(done[name].run.events_path(rank)).poll()
        held = [e for e in events if isinstance(e, MemoryClassified) and e.moment == "between_steps"]
        components = held[-1].components
        for component in (
            Component.PARAMETERS,
            Component.GRADIENTS,
            Component.MASTER_PARAMETERS,
            Component.OPTIMIZER_STATE,
        ):
            told = steady.get(component, 0)  # below stage 3 gradients are gone between steps
            assert components.get(str(component), 0) == pytest.approx(told, rel=0.01), (rank, component)
