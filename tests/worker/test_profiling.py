"""Snapshots in a rank without its model: when they are taken, and what goes wrong without harm."""

from __future__ import annotations

import errno
import pickle
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz
from torch.cuda import memory as cuda_memory
from torch.utils.checkpoint import checkpoint

from llmtop.profiler.probes import snapshotmemory, snapshotting
from llmtop.profiler.probes.stepreading import StepReading
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotTaken
from llmtop.profiler.record.snapshotrequest import SnapshotRequest, ask_for_snapshot
from llmtop.trainer.worker.profiling import Profiling
from tests.worker.launching import make_run, tiny_spec


class Recorder:
    """Says what is asked of it; fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[str] = []

    def __call__(self, *_: Any) -> Recorder:
        return self

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")

    def start(self, step: int) -> None:
        self._note(f"start {step}")

    def phase(self, phase: str) -> Any:
        return nullcontext()

    def phase_ended(self, phase: str) -> None:
        self._note(f"{phase} ended")

    def finish(self, reading: StepReading) -> Any:
        self._note("finish")
        return SimpleNamespace(paths=(), poll=lambda: "it was too large", wait=lambda seconds: None)

    def abandon(self) -> None:
        self.calls.append("abandon")


class Probes:
    def begin_step(self, step: int) -> None:
        """Nothing may end its phases but `phase`."""

    def phase(self, phase: str, *, last: bool) -> Any:
        return nullcontext()

    def finish_step(self) -> StepReading:
        return StepReading(times=None, phase_memory={})


class Rank:
    """Rank 0 of two, which makes steps."""

    def __init__(self, run: RunDir, kernel_step: int | None = None) -> None:
        self.run = run
        self.told: list[SnapshotTaken] = []
        probes: Any = Probes()
        engine = SimpleNamespace(module=torch.nn.Linear(2, 2))
        self.profiling = Profiling(
            run,
            probes,
            engine,
            rank=0,
            device=torch.device("cpu"),
            kernel_step=kernel_step,
            emit=self.told.append,  # type: ignore[arg-type]
        )

    def ask(self, **asked: Any) -> None:
        ask_for_snapshot(self.run, SnapshotRequest(**{"number": 1, "what": "trace", "ranks": (0,), **asked}))

    def step(self, number: int) -> bool:
        """Whether it is marked as not of the usual pace."""
        if seen := self.profiling.seen():
            self.profiling.take(seen, number)
        self.profiling.begin_step(number)
        with self.profiling.phase("forward", last=True):
            pass
        return self.profiling.finish_step().profiled


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", tiny_spec(steps=100, classify_every=10))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(snapshotting.MAKERS, "trace", made)
    return made


@pytest.mark.parametrize(
    ("asked", "kernel_step", "marked"),
    [
        ({}, None, {3}),
        ({"step": 5}, None, {5}),
        ({"step": 5, "steps": 2}, 6, {7, 8}),
        ({"step": 9, "steps": 3}, None, {11, 12, 13}),
        ({"ranks": (1,)}, None, {3}),
    ],
    ids=["the next", "a later one", "not with the kernels", "not a classified one", "of another rank"],
)
def test_steps_are_those_that_no_probe_uses_and_all_ranks_mark_them(
    run: RunDir, recorder: Recorder, asked: dict[str, Any], kernel_step: int | None, marked: set[int]
) -> None:
    rank = Rank(run, kernel_step)
    rank.ask(**asked)
    assert {number for number in range(3, 16) if rank.step(number)} == marked
    own = 0 in asked.get("ranks", (0,))
    assert len(rank.told) == own and ("finish" in recorder.calls) == own
    late = bool(rank.told) and "instead of" in " ".join(rank.told[0].notes)
    assert late == (asked.get("step", 0) not in {0, *marked})


@pytest.mark.parametrize("fails", ["start 3", "forward ended", "finish"])
def test_a_full_disk_is_told_and_the_training_goes_on(run: RunDir, recorder: Recorder, fails: str) -> None:
    recorder.fails = fails
    rank = Rank(run)
    rank.ask()
    for number in range(3, 6):
        rank.step(number)
    [told] = rank.told
    assert told.problem == "it cannot be written: No space left on device"
    assert recorder.calls[-1] == "abandon" or fails == "start 3", "nothing goes on"
    recorder.fails = ""
    rank.ask(number=2)
    rank.step(6)
    assert rank.told[-1].number == 2, "the next one is taken"
    assert rank.told[-1].problem == "it was too large"


def test_a_run_that_ends_before_the_step_says_so(run: RunDir, recorder: Recorder) -> None:
    rank = Rank(run)
    rank.ask(step=50)
    rank.step(3)
    rank.profiling.close()
    [told] = rank.told
    assert "ended before" in told.problem


# --- memory ----------------------------------------------------------------------------------------


def segments_in_words(path: Path) -> str:
    """As memory_viz tells them."""
    loaded = pickle.loads(path.read_bytes())  # noqa: S301 - the test's own
    words: str = _memory_viz.segsum(loaded)  # type: ignore[no-untyped-call]
    return words


def allocator_state(blocks: int = 3) -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot` returns of a small process, as torch 2.13 has it."""
    frames = [{"filename": "model.py", "line": 3, "name": "forward"}]
    found = [
        {
            "address": 0x1000 + at * 512,
            "size": 512,
            "requested_size": 500,
            "state": "active_allocated",
            "frames": frames,
        }
        for at in range(blocks)
    ]
    segment = {
        "device": 0,
        "address": 0x1000,
        "total_size": 512 * blocks,
        "allocated_size": 512 * blocks,
        "active_size": 512 * blocks,
        "requested_size": 500 * blocks,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": found,
    }
    return {"segments": [segment], "device_traces": [[]], "allocator_settings": {}}


def test_memory_viz_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    snapshotmemory.write_pickle(allocator_state(), path)
    assert path.stat().st_mode & 0o077 == 0
    assert "1.5KiB" in segments_in_words(path)


def test_a_memory_snapshot_that_is_too_large_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotmemory, "MOST_BYTES", 2000)
    with pytest.raises(snapshotmemory.SnapshotTooLarge):
        snapshotmemory.write_pickle(allocator_state(100), tmp_path / "a.pickle")
    assert list(tmp_path.iterdir()) == []


def train_recomputed(model: torch.nn.Module, rows: torch.Tensor) -> list[str]:
    """What ran of a block whose last saved tensor is not its last operation."""
    ran: list[str] = []

    def block(given: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = model(given).relu()
        ran.append("after what is kept")
        return kept + 1

    checkpoint(block, rows.requires_grad_(), use_reentrant=False).sum().backward()
    return ran


def test_recomputations_of_a_step_with_stacks_end_by_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 loses it while it gathers the stack of a tensor that goes away."""
    recorded: list[object] = []
    monkeypatch.setattr(cuda_memory, "_record_memory_history", lambda on, **more: recorded.append(more))
    model = torch.nn.Linear(4, 4)
    assert len(train_recomputed(model, torch.ones(2, 4))) == 1
    with snapshotmemory.stacks_recorded():
        assert len(train_recomputed(model, torch.ones(2, 4))) == 2
    assert len(train_recomputed(model, torch.ones(2, 4))) == 1
    assert len(recorded) == 2 and recorded[1] == {}


@pytest.mark.parametrize(
    ("stage", "recomputes", "reentrant", "refused"),
    [
        (3, True, False, True),
        (3, True, None, True),
        (3, True, True, False),
        (3, False, None, False),
        (2, True, False, False),
    ],
)
def test_a_rank_refuses_stacks_that_would_end_the_training(
    tmp_path: Path, stage: int, recomputes: bool, reentrant: bool | None, refused: bool
) -> None:
    """One whose kind of recomputation is not told counts as one that stops early, as torch's default does."""
    block = torch.nn.Linear(2, 2)
    block.gradient_checkpointing = recomputes  # type: ignore[assignment]
    if reentrant is not None:
        function = partial(checkpoint, use_reentrant=reentrant)
        block._gradient_checkpointing_func = function  # type: ignore[assignment]
    engine = SimpleNamespace(module=torch.nn.Sequential(block), zero_optimization_stage=lambda: stage)
    request = SnapshotRequest(number=1, what="state", ranks=(0,), with_stacks=True)
    device = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="take it without stacks") if refused else nullcontext():
        snapshotting.StateRecording(engine, device, 0, request, tmp_path / "a")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("stacks", [False, True])
def test_a_real_allocator_is_written_and_reduced(tmp_path: Path, stacks: bool) -> None:
    device = torch.device("cuda", 0)
    with snapshotmemory.stacks_recorded() if stacks else nullcontext():
        model = torch.nn.Linear(1024, 1024, bias=False, device=device)
        engine = SimpleNamespace(module=model, optimizer=None, basic_optimizer=None)
        kept = model(torch.ones(1024, 1024, device=device))
        # Stacks are gathered in a recomputation too.
        train_recomputed(model, torch.ones(1024, 1024, device=device))
        found = snapshotmemory.snapshot()
        told = snapshotmemory.reduced(engine, found, device=device, rank=0, step=1)
        snapshotmemory.write_pickle(found, tmp_path / "a.pickle")
    assert told.components["parameters"] >= model.weight.numel() * 4
    assert told.components["unnamed"] >= kept.numel() * 4
    assert told.allocated_bytes == torch.cuda.memory_allocated(device)
    assert told.reserved_bytes == torch.cuda.memory_reserved(device)
    assert any("test_profiling.py" in site.where for site in told.sites) == stacks
    assert segments_in_words(tmp_path / "a.pickle")
