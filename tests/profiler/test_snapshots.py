"""The reductions of traces and memory snapshots, and what is said and refused before one is taken."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotFile, SnapshotParams, SnapshotTaken
from llmtop.profiler.snapshots import reduce
from llmtop.profiler.snapshots.blocks import FREE, PENDING, UNNAMED, summarise_blocks
from llmtop.profiler.snapshots.collectives import bus_factor
from llmtop.profiler.snapshots.estimate import check_snapshot, estimate_snapshot
from llmtop.profiler.snapshots.intervals import intersection, length, union
from llmtop.profiler.snapshots.reading import snapshot_lines
from llmtop.profiler.snapshots.text import trace_lines
from llmtop.profiler.snapshots.tracefile import TraceFile
from llmtop.profiler.snapshots.tracesummary import TraceSummary, summarise
from tests.recorded_spec import recorded_prediction, recorded_spec

MIB = 1024**2
MAIN, AUTOGRAD, STREAM = 10, 11, 7


def span(name: str, cat: str, begin: float, end: float, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": begin, "dur": end - begin, "args": args}


def operator(
    name: str, begin: float, end: float, number: int, tid: int = MAIN, **args: Any
) -> dict[str, Any]:
    return span(name, "cpu_op", begin, end, tid, **{"External id": number, **args})


def kernel(name: str, begin: float, end: float, number: int, **args: Any) -> dict[str, Any]:
    return span(name, "kernel", begin, end, STREAM, **{"External id": number, **args})


GPU_STEP: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    span("llmtop:phase:forward", "user_annotation", 0, 40),
    span("llmtop:attention", "user_annotation", 1, 10),
    operator("aten::mm", 2, 4, 1, **{"Sequence number": 5}),
    span("llmtop:mlp", "user_annotation", 11, 20),
    operator("aten::mm", 12, 14, 2, **{"Sequence number": 6}),
    operator("aten::cross_entropy_loss", 25, 30, 3, **{"Sequence number": 7}),
    span("llmtop:phase:backward", "user_annotation", 40, 80),
    operator("autograd::engine::evaluate_function: NllLossBackward0", 41, 44, 4, AUTOGRAD),
    operator("aten::nll_loss_backward", 42, 43, 5, AUTOGRAD),
    operator(
        "autograd::engine::evaluate_function: MmBackward0", 45, 50, 6, AUTOGRAD, **{"Sequence number": 6}
    ),
    operator("aten::mm", 46, 48, 7, AUTOGRAD),
    operator(
        "autograd::engine::evaluate_function: MmBackward0", 51, 56, 8, AUTOGRAD, **{"Sequence number": 5}
    ),
    operator("aten::mm", 52, 54, 9, AUTOGRAD),
    span("llmtop:phase:optimizer", "user_annotation", 80, 100),
    operator("aten::_fused_adamw_", 81, 84, 10),
    kernel("gemm", 5, 15, 1),
    kernel("gemm", 15, 25, 2),
    kernel("softmax", 30, 35, 3),
    kernel("nll", 44, 46, 5),
    kernel("gemm", 47, 57, 7),
    kernel("gemm", 57, 65, 9),
    kernel("adam", 85, 95, 10),
    kernel(
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        60,
        70,
        99,
        **{
            "Collective name": "allreduce",
            "In msg nelems": 1000,
            "Out msg nelems": 1000,
            "dtype": "BFloat16",
            "Group size": 4,
        },
    ),
    span("Memcpy HtoD", "gpu_memcpy", 72, 74, STREAM),
]
"""A step of a GPU in microseconds: a layer, its loss, its backward pass on a thread of its own."""


def trace_of(events: list[dict[str, Any]]) -> TraceFile:
    document = {"traceEvents": events, "distributedInfo": {"rank": 1, "world_size": 4}}
    return msgspec.json.decode(json.dumps(document), type=TraceFile)


def test_kernels_count_for_the_part_whose_operator_launched_them_backwards_too() -> None:
    told = summarise(trace_of(GPU_STEP), step=7)
    microseconds = {part.name: round(part.seconds * 1e6) for part in told.parts}
    assert microseconds == {"attention": 18, "mlp": 20, "loss": 7, "optimizer": 10}
    assert (told.on_device, told.rank, told.step) == (True, 1, 7)
    assert [(one.name, one.part, one.calls) for one in told.top[:2]] == [
        ("gemm", "mlp", 2),
        ("gemm", "attention", 2),
    ]


def test_what_runs_side_by_side_is_told_and_counts_once_in_the_whole() -> None:
    told = summarise(trace_of(GPU_STEP))
    found = {
        name: round(getattr(told, f"{name}_seconds") * 1e6)
        for name in ("wall", "compute", "communication", "memcpy", "overlapped", "idle")
    }
    assert found == {
        "wall": 100, "compute": 55, "communication": 10, "memcpy": 2, "overlapped": 5, "idle": 38,
    }  # fmt: skip
    assert told.overlap_share == pytest.approx(0.5)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md there: an all-reduce of S bytes in t on n ranks is S/t x 2(n-1)/n."""
    [found] = summarise(trace_of(GPU_STEP)).collectives
    assert (found.name, found.size_bytes, found.group_size, found.calls) == ("all_reduce", 2000, 4, 1)
    assert found.bus_bytes_per_second == pytest.approx(2000 / 10e-6 * 2 * 3 / 4)
    assert [bus_factor(name, 8) for name in ("all_gather", "reduce_scatter", "broadcast")] == [
        7 / 8,
        7 / 8,
        1,
    ]


def test_a_gathered_tensor_counts_whole_and_a_number_has_a_size() -> None:
    gloo: list[dict[str, Any]] = [
        span(
            "gloo:all_gather",
            "user_annotation",
            0,
            10,
            12,
            **{"Input Dims": [[500]], "Input type": ["float"]},
        ),
        span(
            "gloo:all_reduce", "user_annotation", 10, 12, 12, **{"Input Dims": [[]], "Input type": ["double"]}
        ),
        span("gloo:barrier", "user_annotation", 12, 13, 12),
    ]
    told = {each.name: each.size_bytes for each in summarise(trace_of(gloo)).collectives}
    assert told == {"all_gather": 4 * 500 * 4, "all_reduce": 8, "barrier": None}


def test_a_trace_without_events_is_a_summary_of_nothing() -> None:
    told = summarise(trace_of([]))
    assert (told.wall_seconds, told.parts, told.overlap_share) == (0, (), None)


def test_spans_are_put_together_and_cut() -> None:
    first, second = union([(5, 7), (0, 2), (1, 4)]), union([(3, 6)])
    assert first == [(0, 4), (5, 7)]
    assert intersection(first, second) == [(3, 4), (5, 6)]
    assert length(first) == 6


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / ".trace.raw.json"
    path.write_text(json.dumps({"traceEvents": GPU_STEP}))
    return path


def test_a_trace_is_kept_compressed_beside_its_summary(raw: Path, tmp_path: Path) -> None:
    before = raw.read_bytes()
    assert reduce.reduce(raw, tmp_path / "a", step=3, steps=1) == ""
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == before
    assert msgspec.json.decode((tmp_path / "a.summary.json").read_bytes(), type=TraceSummary).step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.gz", "a.summary.json"]
    assert (tmp_path / "a.json.gz").stat().st_mode & 0o077 == 0


def test_a_trace_that_was_cut_short_leaves_nothing_and_is_told(raw: Path, tmp_path: Path) -> None:
    raw.write_bytes(raw.read_bytes()[:-40])
    assert "cut short, as on a full disk" in reduce.reduce(raw, tmp_path / "a", step=3, steps=1)
    assert list(tmp_path.iterdir()) == []


def test_too_large_a_trace_keeps_its_summary_alone(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduce, "MOST_KEPT_BYTES", 100)
    assert "only its summary is kept; ask for fewer steps" in reduce.reduce(
        raw, tmp_path / "a", step=3, steps=1
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.summary.json"]
    raw.write_text("x" * 200)
    monkeypatch.setattr(reduce, "MOST_RAW_BYTES", 100)
    assert "ask for fewer steps" in reduce.reduce(raw, tmp_path / "b", step=3, steps=1)


def test_a_full_disk_is_told(raw: Path) -> None:
    assert "cannot be written" in reduce.reduce(raw, raw.parent / "gone" / "a", step=3, steps=1)
    assert not raw.exists()


# --- memory --------------------------------------------------------------------------------------


def block(size: int, state: str, *frames: tuple[str, int, str]) -> dict[str, Any]:
    told = [{"filename": name, "line": line, "name": function} for name, line, function in frames]
    return {"size": size, "requested_size": size, "state": state, "frames": told}


TORCH = ("/site-packages/torch/nn/modules/linear.py", 134, "forward")
MODEL = ("/home/somebody/model.py", 20, "forward")
SNAPSHOT = {
    "segments": [
        {
            "device": 0,
            "address": 0x1000_0000,
            "total_size": 20 * MIB,
            "blocks": [
                block(8 * MIB, "active_allocated", TORCH, MODEL),
                block(2 * MIB, "inactive"),
                block(6 * MIB, "active_allocated", TORCH, MODEL),
                block(4 * MIB, "active_pending_free"),
            ],
        },
        {
            "device": 0,
            "address": 0x2000_0000,
            "total_size": 2 * MIB,
            "blocks": [block(1 * MIB, "active_allocated", TORCH), block(1 * MIB, "inactive")],
        },
        {"device": 1, "address": 0x1, "total_size": MIB, "blocks": [block(MIB, "active_allocated")]},
    ]
}
"""As torch/cuda/_memory_viz.py describes it; blocks of one segment lie one behind the other."""


def test_blocks_are_named_by_the_storages_in_them_and_add_up_to_what_is_reserved() -> None:
    named = [
        (0x1000_0000, 7 * MIB, "parameters"),
        (0x2000_0000, MIB, "gradients"),
        (0x5, 5, "optimizer_state"),
    ]
    told = summarise_blocks(SNAPSHOT, named, device=0, rank=0, step=4)
    assert told.components == {
        "parameters": 8 * MIB, UNNAMED: 6 * MIB, "gradients": MIB, PENDING: 4 * MIB, FREE: 3 * MIB,
    }  # fmt: skip
    assert sum(told.components.values()) == told.reserved_bytes == 22 * MIB
    assert (told.allocated_bytes, told.blocks, told.largest_free_bytes) == (15 * MIB, 3, 2 * MIB)


def test_sites_are_the_lines_outside_of_torch_the_largest_first() -> None:
    told = summarise_blocks(SNAPSHOT, [], device=0, rank=0, step=4)
    assert [(site.where, site.size_bytes, site.blocks) for site in told.sites] == [
        ("/home/somebody/model.py:20 forward", 14 * MIB, 2),
        ("/site-packages/torch/nn/modules/linear.py:134 forward", MIB, 1),
    ]


def test_a_state_that_is_not_known_is_no_guess() -> None:
    other = {"segments": [{"device": 0, "address": 1, "total_size": 1, "blocks": [block(1, "haunted")]}]}
    with pytest.raises(ValueError, match="haunted"):
        summarise_blocks(other, [], device=0, rank=0, step=1)


# --- before --------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = recorded_spec("cpu", ranks=2, steps=100)
    return RunDir.create(tmp_path, spec, recorded_prediction(spec), {})


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"what": "state"}, "no memory snapshot"),
        ({"ranks": (0, 2)}, "there is no rank 2"),
        ({"ranks": (1, 1)}, "or one twice"),
        ({"ranks": ()}, "no rank is named"),
        ({"step": -1}, "there is no step -1"),
        ({"steps": 0}, "0 steps cannot"),
        ({"steps": 51}, "use 1 to 50"),
        ({"what": "modules", "steps": 2}, "of one step"),
        ({"with_stacks": True}, "stacks belong to a memory snapshot"),
        ({"step": 9}, "step 9 is over"),
        ({"step": 100, "steps": 2}, "no step 101"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_words(run: RunDir, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(LlmtopError, match=told):
        check_snapshot(run, run.spec(), SnapshotParams(**{"what": "trace", **asked}), last_step=9)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"zero": 3, "gradient_checkpointing": True}, True),
        ({"zero": 3, "gradient_checkpointing": True, "checkpointing_reentrant": True}, False),
        ({"zero": 3}, False),
        ({"zero": 2, "gradient_checkpointing": True}, False),
    ],
)
def test_stacks_are_refused_where_they_would_end_the_training(
    tmp_path: Path, options: dict[str, Any], refused: bool
) -> None:
    spec = recorded_spec("cuda", ranks=2, steps=100)
    spec = msgspec.structs.replace(spec, options=msgspec.structs.replace(spec.options, **options))
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    asked = SnapshotParams(what="state", with_stacks=True)
    with pytest.raises(UsageError, match="would end this training") if refused else nullcontext():
        check_snapshot(run, spec, asked, last_step=9)
    check_snapshot(run, spec, SnapshotParams(what="state"), last_step=9)


def test_a_disk_without_room_is_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    check_snapshot(run, run.spec(), SnapshotParams(what="trace"), last_step=9)
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as shutil has it
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2, 1, 1))
    with pytest.raises(LlmtopError, match="no room"):
        check_snapshot(run, run.spec(), SnapshotParams(what="trace"), last_step=9)


def test_the_cost_grows_with_what_is_asked_for() -> None:
    spec = recorded_spec("cpu", ranks=2)
    one = estimate_snapshot(spec, SnapshotParams(what="trace"))
    more = estimate_snapshot(spec, SnapshotParams(what="trace", ranks=(0, 1), steps=3))
    assert more.kept_bytes == 6 * one.kept_bytes and more.stall_seconds > one.stall_seconds
    bare = estimate_snapshot(spec, SnapshotParams(what="state"))
    stacks = estimate_snapshot(spec, SnapshotParams(what="state", with_stacks=True))
    assert stacks.kept_bytes > bare.kept_bytes


@pytest.mark.parametrize(
    "name", ["../outside.summary.json", "snapshots/../spec.summary.json", "/etc/x.summary.json"]
)
def test_a_record_that_names_a_file_outside_of_its_snapshots_reads_none(run: RunDir, name: str) -> None:
    (run.path.parent / "outside.summary.json").write_bytes(msgspec.json.encode(summarise(trace_of(GPU_STEP))))
    taken = SnapshotTaken(
        number=1, what="trace", step=3, src="rank0", files=(SnapshotFile(name=name, size_bytes=1),)
    )
    assert "its table cannot be read" in next(snapshot_lines(run, taken))


def test_a_memory_snapshot_and_its_cost_read_as_a_table(run: RunDir) -> None:
    run.snapshots_dir.mkdir()
    table = summarise_blocks(SNAPSHOT, [(0x1000_0000, 8 * MIB, "parameters")], device=0, rank=0, step=4)
    name = "snapshots/a.summary.json"
    (run.path / name).write_bytes(msgspec.json.encode(table))
    file = SnapshotFile(name=name, size_bytes=2048)
    taken = SnapshotTaken(number=1, what="state", step=4, src="rank0", files=(file,), stall_seconds=0.25)
    text = "\n".join(snapshot_lines(run, taken))
    assert "15.0 MiB allocated of 22.0 MiB reserved, 3 blocks" in text
    for row in (r"parameters +8.00 MiB +36.4%", r"14.0 MiB +2 x  /home/somebody/model.py:20", r"2.00 KiB  /"):
        assert re.search(row, text), text
    assert "stood still for 250 ms" in text


def test_a_table_of_a_trace_is_no_wider_than_a_terminal() -> None:
    long = [
        *GPU_STEP,
        kernel("void at::native::elementwise_kernel<128, 4, std::array<char*>>" * 9, 96, 99, 1),
    ]
    rows = list(trace_lines(summarise(trace_of(long), step=7)))
    assert max(map(len, rows)) <= 100, rows
    text = "\n".join(rows)
    for words in ("Trace of rank 1, 1 step from step 7", "50.0% of it while", "loss 12.1%", "all_reduce"):
        assert words in text
