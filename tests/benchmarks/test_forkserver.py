"""Forked runs against supervised ones: the same record, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import cells
from benchmarks.admission import Gate, Room
from benchmarks.cells import Planned, Runner, make_run, plan, row_of
from benchmarks.forkserver import ForkServer
from benchmarks.rows import Cell
from llmtop.presets.resolve import Machine
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer.ops import FUSED_ADAM

pytestmark = pytest.mark.slow
MACHINE = Machine(gpu="cpu", gpus=1, host_memory_bytes=None)
CELL: Cell = {
    "model": "tiny-llama-cpu",
    "gpus": 1,
    "zero": 2,
    "seq_len": 32,
    "micro_batch": 2,
    "threads_per_rank": 1,
}
EVERYWHERE = Room(device_bytes=None, host_bytes=None)
CHANGING = {
    "v", "t", "m", "src", "pid", "run_id", "phase_memory", "memory_every", "total_bytes", "rss_bytes",
    "pss_bytes", "peak_rss_bytes", "top",
}  # fmt: skip
"""Fields that differ from run to run, besides all that are times."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(on_cpu=True) as server:
        yield server


def planned(**options: Any) -> Planned:
    return plan({**CELL, **options}, MACHINE, name="test")


def record(run: RunDir, src: str | int) -> list[dict[str, Any]]:
    """A log without what differs from run to run, nor what depends on the heap's state."""
    kept = []
    for event in EventTail(run.events_path(src)).poll():
        fields = msgspec.to_builtins(event).items()
        whole = {key: value for key, value in fields if key not in CHANGING and "seconds" not in key}
        whole.get("components", {}).pop("fragmentation", None)
        kept.append(whole)
    return kept


def test_a_forked_run_leaves_the_record_of_a_supervised_one(server: ForkServer, tmp_path: Path) -> None:
    forked = Runner(tmp_path / "forked", MACHINE, Gate(EVERYWHERE), server).run(planned(), 120).run
    supervised = Runner(tmp_path / "supervised", MACHINE, Gate(EVERYWHERE), None).run(planned(), 240).run
    assert read_state(forked).status == read_state(supervised).status == "completed"
    assert record(forked, 0) == record(supervised, 0)
    kinds = [event["kind"] for event in record(forked, SUPERVISOR)]
    assert kinds == ["run_started", "rank_started", "rank_exited", "run_ended"]
    assert record(forked, SUPERVISOR)[-1] == record(supervised, SUPERVISOR)[-1]


def test_it_says_what_loading_took(server: ForkServer) -> None:
    assert server.ready.startswith("ready to fork after ") and "torch" in server.ready


def test_an_op_is_built_once_and_before_the_runs_that_need_it(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extensions = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    monkeypatch.setattr("benchmarks.cells.ops_of", lambda config: (FUSED_ADAM,))
    monkeypatch.setattr("benchmarks.cells.BUILDER", "tests.benchmarks.entries:build")
    runner = Runner(tmp_path / "runs", MACHINE, Gate(EVERYWHERE), server)
    (extensions / "fused_adam").mkdir(parents=True)
    for _ in range(2):
        run = runner.forked(planned(), 60, entry="tests.benchmarks.entries:crash").run
        assert read_state(run).status == "failed"
    told = capsys.readouterr().out
    assert told.count("to build fused_adam") == 1
    assert told.count("RuntimeError: the compiler is missing") == 1


def test_a_row_holds_both_sides(server: ForkServer, tmp_path: Path) -> None:
    row = Runner(tmp_path, MACHINE, Gate(EVERYWHERE), server).row({**CELL, "gpus": 2, "zero": 3}, 120)
    assert (row["status"], row["gpus"], row["alone"]) == ("completed", 2, True)
    assert len(row["measured"]["ranks"]) == 2
    events = row["measured"]["ranks"][1]["events"]
    assert events["memory_classified.between_steps"]["step"] == 4
    assert events["baseline_measured"]["rss_bytes"] > 0
    assert row["predicted"]["moments"]["between_steps"]["parameters"] > 0
    assert row["breakdown"]["rows"] and row["versions"]["torch"]
    assert msgspec.json.decode(msgspec.json.encode(row))["cell"] == row["cell"]


def test_a_rank_that_takes_too_long_is_killed_with_all_that_it_started(
    server: ForkServer, tmp_path: Path
) -> None:
    run = make_run(planned(), tmp_path)
    seen: dict[int, int] = {}
    ended = server.run(run, seconds=8, entry="tests.benchmarks.entries:hang", while_running=seen.update)
    assert ended.detail == "failed" and ended.cut_after_seconds == 8
    assert "did not finish within 8 s" in str(read_state(run).ended)
    for pid in (seen[0], int((run.path / "left.pid").read_text())):
        assert process_identity(pid) is None


def test_a_run_that_takes_too_long_says_where_its_ranks_stood(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "_LOOK_SECONDS", 4.0)
    runner = Runner(tmp_path, MACHINE, Gate(EVERYWHERE), server)
    entry = "tests.benchmarks.entries:hang_where_it_can_be_asked"
    carried = runner.forked(planned(gpus=2, optimizer="adamw_torch"), 9, entry=entry)
    assert carried.cut_after_seconds == 9
    assert carried.stacks.count("in hang_where_it_can_be_asked") == 2, carried.stacks
    row = row_of(planned(), carried, alone=True, wall_seconds=1.0)
    assert "hang_where_it_can_be_asked" in row["measured"]["stacks"]


def test_a_rank_that_fails_ends_the_run_with_its_reason(server: ForkServer, tmp_path: Path) -> None:
    run = make_run(planned(), tmp_path)
    ended = server.run(run, seconds=60, entry="tests.benchmarks.entries:crash")
    assert ended.detail == "failed" and ended.cut_after_seconds is None
    assert "RuntimeError: no training in" in run.log_path(0).read_text()


def test_what_is_refused_is_a_row(tmp_path: Path) -> None:
    row = Runner(tmp_path, MACHINE, Gate(EVERYWHERE), None).row({**CELL, "precision": "fp16"}, 120)
    assert row["status"] == "refused" and "fp16" in row["reason"]
