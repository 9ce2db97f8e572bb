"""Snapshots of real ranks on gloo: asked between two steps, written while the training goes on."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtop.profiler.record.events import RankFinished, StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotTaken
from llmtop.profiler.snapshots.modules import ModuleTable
from llmtop.profiler.snapshots.tracesummary import TraceSummary
from tests.worker.launching import events_of, log_end, make_run, start_ranks, tiny_spec, wait_for_ranks
from tests.worker.snapshot_ranks import ASKS, STEPS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    made = make_run(
        tmp_path_factory.mktemp("snapshots") / "run", tiny_spec(gpus=2, steps=STEPS, grad_accum=2)
    )
    script = Path(__file__).with_name("snapshot_ranks.py")
    codes = wait_for_ranks(start_ranks(made, [sys.executable, str(script), str(made.path)]))
    assert codes == [0, 0], log_end(made, 0) + log_end(made, 1)
    return made


def taken(run: RunDir, rank: int, what: str) -> SnapshotTaken:
    [event] = [event for event in events_of(run, rank, SnapshotTaken) if event.what == what]
    return event


def summary(run: RunDir, rank: int) -> TraceSummary:
    name = next(file.name for file in taken(run, rank, "trace").files if file.name.endswith(".summary.json"))
    return msgspec.json.decode((run.path / name).read_bytes(), type=TraceSummary)


def trace(run: RunDir, rank: int) -> dict[str, Any]:
    name = next(file.name for file in taken(run, rank, "trace").files if file.name.endswith(".json.gz"))
    loaded: dict[str, Any] = json.loads(gzip.decompress((run.path / name).read_bytes()))
    return loaded


def test_every_rank_writes_what_it_was_asked_for_and_trains_to_its_end(run: RunDir) -> None:
    for rank in (0, 1):
        assert [event.step for event in events_of(run, rank, StepFinished)] == list(range(1, STEPS + 1))
        assert events_of(run, rank, RankFinished)[0].reason == "completed"
        assert not taken(run, rank, "trace").problem, log_end(run, rank)
        for event in events_of(run, rank, SnapshotTaken):
            for file in event.files:
                assert (run.path / file.name).stat().st_size == file.size_bytes > 0
    assert not list(run.snapshots_dir.glob(".*")), "nothing half written is left"
    assert [event.what for event in events_of(run, 1, SnapshotTaken)] == ["trace"], "modules are of rank 0"


def test_all_ranks_trace_the_same_steps_and_mark_them(run: RunDir) -> None:
    first, second = taken(run, 0, "trace"), taken(run, 1, "trace")
    assert (first.step, first.steps) == (second.step, second.steps)
    assert first.steps == ASKS["trace"]["steps"]
    modules = taken(run, 0, "modules").step
    slow = {*range(first.step, first.step + first.steps), modules}
    for rank in (0, 1):
        told = {event.step for event in events_of(run, rank, StepFinished) if event.profiled}
        assert slow <= told, "also of a rank that only waits for the other"
        assert len(told - slow) <= 1, "but for the step of llmtop's own look at kernels"


def test_a_trace_opens_with_its_phases_and_parts(run: RunDir) -> None:
    events = trace(run, 0)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    steps, micro_batches = ASKS["trace"]["steps"], 2
    assert names.count("llmtop:phase:forward") == steps * micro_batches
    assert names.count("llmtop:attention") == steps * micro_batches * 2, "a range for each layer"
    assert names.count("llmtop:mlp") == steps * micro_batches * 2


def test_its_summary_says_what_the_time_went_into(run: RunDir) -> None:
    told = summary(run, 1)
    assert (told.rank, told.world_size, told.on_device) == (1, 2, False)
    parts = {part.name: part.share for part in told.parts}
    assert {"attention", "mlp", "norm", "head", "loss", "optimizer"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(1)
    assert all(share > 0 for share in parts.values())
    busy = told.compute_seconds + told.communication_seconds + told.memcpy_seconds
    assert busy - told.overlapped_seconds + told.idle_seconds == pytest.approx(told.wall_seconds)
    assert told.top[0].seconds >= told.top[-1].seconds > 0


def test_its_collectives_have_a_size_and_a_bandwidth(run: RunDir) -> None:
    told = summary(run, 0)
    reductions = [
        each for each in told.collectives if each.name == "all_reduce" and (each.size_bytes or 0) > 1e5
    ]
    assert reductions, told.collectives
    for each in reductions:
        assert each.size_bytes and each.bus_bytes_per_second
        # nccl-tests: with two ranks the bus carries each byte of an all-reduce once.
        assert each.bus_bytes_per_second == pytest.approx(each.size_bytes * each.calls / each.seconds)


def test_modules_are_timed_both_ways_and_their_memory_counted(run: RunDir) -> None:
    [file] = taken(run, 0, "modules").files
    table = msgspec.json.decode((run.path / file.name).read_bytes(), type=ModuleTable)
    rows = {row.name: row for row in table.rows}
    layer, attention = rows["model.layers.*"], rows["model.layers.*.self_attn"]
    assert (layer.modules, layer.calls) == (2, 4), "two layers, two micro-batches"
    assert 0 < attention.forward_seconds < layer.forward_seconds < table.step_seconds
    assert layer.backward_seconds and attention.backward_seconds
    assert 0 < attention.backward_seconds < layer.backward_seconds < table.step_seconds
    assert 0 < attention.saved_bytes < layer.saved_bytes <= rows["(model)"].saved_bytes
    mlp = 3 * 64 * 128 * 4
    assert rows["model.layers.*.mlp"].parameter_bytes == 2 * mlp


def test_no_hook_is_left_on_the_model(run: RunDir) -> None:
    told = json.loads((run.path / "hooks.json").read_text())
    assert told["after"] == told["before"]
