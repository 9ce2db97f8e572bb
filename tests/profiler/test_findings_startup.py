"""What is said of each stage of a start while it lasts, and of one that lasts too long."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmtop.profiler.findings.find import Finding, findings
from llmtop.profiler.findings.startup import USUAL_SECONDS, stage_hint
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.events import (
    AnyEvent,
    Compiling,
    HardwareSampled,
    NvmeMeasured,
    RankStarted,
    RunStarted,
    StageBegan,
    StageFinished,
    StepFinished,
    WeightsLoaded,
    WeightsRead,
)
from llmtop.tui.commands.follow import Narrator
from tests.recorded_spec import recorded_prediction, recorded_spec

GB = 10**9


def began(stage: Any, rank: int, t: float = 10.0) -> StageBegan:
    return StageBegan(stage=stage, t=t, src=f"rank{rank}")


def state_of(*events: AnyEvent, world_size: int = 2) -> RunState:
    started = RunStarted(
        run_id="a-run", name="n", pid=1, host="h", world_size=world_size, llmtop_version="1", t=1.0
    )
    ranks = [RankStarted(rank=rank, pid=2 + rank, t=1.0) for rank in range(world_size)]
    return fold(RunState(), [started, *ranks, *events])


def hint(stage: str, *events: AnyEvent, world_size: int = 2, **options: Any) -> str:
    spec = recorded_spec("cuda", **options)
    return stage_hint(state_of(*events, world_size=world_size), spec, recorded_prediction(spec), stage)


def found(*events: AnyEvent, **options: Any) -> dict[str, Finding]:
    spec = recorded_spec("cuda", **options)
    return {f.key: f for f in findings(state_of(*events), spec, recorded_prediction(spec))}


def test_ranks_that_are_late_are_named_with_what_keeps_them() -> None:
    assert hint("process_group", began("import", 1), began("process_group", 0)) == (
        "waiting for rank 1, which is still importing"
    )
    assert "rank 1, which is not this far yet" in hint("process_group", began("process_group", 0))
    assert "NCCL" in hint("process_group", began("process_group", 0), began("process_group", 1))
    events = [began("import", rank) for rank in range(1, 8)]
    told = hint("process_group", began("process_group", 0), *events, world_size=8)
    assert told == "waiting for rank 1, 2, 3, 4 and 3 more, which are still importing"


def test_only_stages_that_take_all_ranks_wait_for_others() -> None:
    events = [began("import", 1), began("data", 0)]
    assert "waiting" not in hint("data", *events)
    loading = [began("weights", 0), began("data", 1)]
    assert "waiting" not in hint("weights", *loading, zero=2)
    assert "waiting for rank 1" in hint("weights", *loading, zero=3)


def test_an_op_that_is_built_says_how_long_that_takes() -> None:
    events = [began("op_build", 0), began("op_build", 1)]
    told = hint("op_build", *events, Compiling(what="cpu_adam", t=12.0, src="supervisor"))
    assert told.startswith("building CPU Adam: over a minute the first time")
    assert "lock" in hint("op_build", *events)


def test_weights_tell_how_far_the_slowest_rank_is() -> None:
    events = [began("weights", 0), began("weights", 1)]
    assert hint("weights", *events) == "nothing has been read yet"
    read = [
        WeightsRead(read_bytes=3 * GB, total_bytes=8 * GB, t=20.0, src="rank0"),
        WeightsRead(read_bytes=4 * GB, total_bytes=8 * GB, t=20.0, src="rank1"),
    ]
    told = hint("weights", *events, *read)
    assert told.startswith("38%") and "by rank 0" in told
    assert "286 MiB/s" in told, told
    done = [WeightsRead(read_bytes=8 * GB, total_bytes=8 * GB, t=30.0, src=f"rank{r}") for r in (0, 1)]
    assert hint("weights", *events, *done) == ""


@pytest.mark.parametrize("stage", USUAL_SECONDS)
def test_a_stage_is_remarked_on_only_when_it_lasts(stage: str) -> None:
    usual = USUAL_SECONDS[stage]
    events = [began(stage, 0), began(stage, 1)]

    def later(seconds: float) -> HardwareSampled:
        return HardwareSampled(t=10.0 + seconds, src="hardware")

    assert "startup_slow" not in found(*events, later(0.9 * usual))
    told = found(*events, later(1.1 * usual))["startup_slow"]
    assert told.evidence and told.change and len(told.title) <= 36
    ended = [StageFinished(stage=stage, seconds=usual, t=10 + usual, src=f"rank{r}") for r in (0, 1)]  # type: ignore[arg-type]
    assert "startup_slow" not in found(*events, *ended, later(2 * usual))
    compiling = Compiling(what="fused_adam", t=11.0, src="supervisor")
    assert "startup_slow" not in found(*events, compiling, later(1.1 * usual)), "that is told on its own"


def test_weights_that_were_not_streamed() -> None:
    loaded = WeightsLoaded(way="transformers", reason="its tensors are merged", t=5.0, src="rank0")
    assert "its tensors are merged" in found(loaded)["weights_not_streamed"].evidence
    assert "weights_not_streamed" not in found(loaded, quantization="nf4", lora_rank=8)
    streamed = msgspec.structs.replace(loaded, way="streamed")
    assert "weights_not_streamed" not in found(streamed)


@pytest.mark.parametrize(("seconds", "bound"), [(0.9, True), (0.2, False), (None, False)])
def test_a_step_that_is_bound_by_the_drive(seconds: float | None, bound: bool) -> None:
    measured = NvmeMeasured(
        path="/nvme",
        read_bytes_per_second=3e9,
        write_bytes_per_second=1e9,
        step_read_bytes=GB,
        step_write_bytes=GB,
        step_seconds=seconds,
        t=2.0,
    )
    steps = [StepFinished(step=n, step_seconds=1.0, t=10.0 + n, src="rank0") for n in range(1, 9)]
    assert ("nvme_bound" in found(measured, *steps)) is bound


def test_whoever_follows_a_run_hears_what_a_long_stage_does() -> None:
    narrator = Narrator(recorded_spec("cuda", zero=2))
    state = state_of(began("weights", 0), began("weights", 1))
    assert list(narrator.lines(state, 0.0)) == ["starting: weights"]
    assert list(narrator.lines(state, 5.0)) == []
    read = [
        WeightsRead(read_bytes=GB, total_bytes=4 * GB, t=15.0, src="rank0"),
        WeightsRead(read_bytes=GB, total_bytes=4 * GB, t=15.0, src="rank1"),
    ]
    (line,) = narrator.lines(fold(state, read), 11.0)
    assert "25%" in line
    assert list(narrator.lines(fold(state, read), 12.0)) == []
    assert list(narrator.lines(fold(state, read), 60.0)) == [], "nothing new to say"


def test_whoever_follows_a_run_hears_of_the_memory_that_is_pinned() -> None:
    spec = recorded_spec("cuda", zero=2, offload_optimizer="cpu")
    narrator = Narrator(spec, msgspec.structs.replace(recorded_prediction(spec), pinned_bytes=16 * GB))
    state = state_of(began("partition", 0), began("partition", 1))
    assert list(narrator.lines(state, 0.0)) == ["starting: partition"]
    (line,) = narrator.lines(state, 11.0)
    assert "of host memory locked" in line
