"""Out of memory, from torch's own words to what would fit: pure parts on recorded messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llmtop.presets import resolve
from llmtop.presets.spec import Script, ValueSource
from llmtop.profiler.memory.allocator import DRIVER_RESERVE_BYTES
from llmtop.profiler.memory.changes import apply
from llmtop.profiler.memory.pool import MIB, segment_bytes
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.oom.allocations import identify, known_allocations
from llmtop.profiler.oom.diagnosis import fixes_after
from llmtop.profiler.oom.fixes import Room, fixes, host_fixes, room_of
from llmtop.profiler.oom.message import read_shortage
from llmtop.profiler.record.events import RankExited, RankFailed
from llmtop.profiler.record.failureevents import DeviceUse, MemoryShortage
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.contents import Report
from llmtop.profiler.report.text import render
from tests.recorded_spec import GIB, Kind, recorded_spec
from tests.tui.tuiruns import LiveRun

ALONE = (
    "CUDA out of memory. Tried to allocate 7.83 GiB. GPU 1 has a total capacity of 139.80 GiB of which 3.13"
    " GiB is free. Including non-PyTorch memory, this process has 136.67 GiB memory in use. Of the allocated"
    " memory 133.94 GiB is allocated by PyTorch, and 642.55 MiB is reserved by PyTorch but unallocated. If"
    " reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to"
    " avoid fragmentation.  See documentation for Memory Management"
    "  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)"
)
SHARED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which"
    " 512.00 MiB is free. Process 1234 has 20.00 GiB memory in use. Process 77 has 1.50 GiB memory in use."
    " Including non-PyTorch memory, this process has 57.10 GiB memory in use. 60.00 GiB allowed; Of the"
    " allocated memory 50.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g.,"
    " CUDA Graphs), and 5.25 GiB is reserved by PyTorch but unallocated."
)
CONTAINED = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 39.39 GiB of which"
    " 100.00 MiB is free. Process 2323 has 39.29 GiB memory in use. Of the allocated memory 36.00 GiB is"
    " allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)
OLD = (
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 14.50 GiB already"
    " allocated; 10.19 MiB free; 14.60 GiB reserved in total by PyTorch)"
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    " allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
)


def gib(number: float) -> int:
    return round(number * GIB)


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (
            ALONE,
            MemoryShortage(
                requested_bytes=gib(7.83),
                resolution_bytes=10737418,
                device=1,
                total_bytes=gib(139.80),
                free_bytes=gib(3.13),
                own_bytes=gib(136.67),
                allocated_bytes=gib(133.94),
                cached_bytes=round(642.55 * MIB),
            ),
        ),
        (
            SHARED,
            MemoryShortage(
                requested_bytes=gib(2),
                resolution_bytes=10737418,
                device=0,
                total_bytes=gib(79.15),
                free_bytes=gib(0.5),
                own_bytes=gib(57.10),
                allowed_bytes=gib(60),
                allocated_bytes=gib(50),
                cached_bytes=gib(5.25),
                processes=(
                    DeviceUse(pid=1234, used_bytes=gib(20)),
                    DeviceUse(pid=77, used_bytes=gib(1.5)),
                ),
            ),
        ),
        (
            OLD,
            MemoryShortage(
                requested_bytes=20 * MIB,
                resolution_bytes=10486,
                device=0,
                total_bytes=gib(15.78),
                free_bytes=round(10.19 * MIB),
                allocated_bytes=gib(14.50),
                cached_bytes=gib(14.60) - gib(14.50),
            ),
        ),
        (HOST, MemoryShortage(requested_bytes=8 * GIB, on_host=True)),
        ("CUDA error: out of memory", None),
        ("", None),
    ],
    ids=["alone", "shared", "old", "host", "bare", "empty"],
)
def test_torchs_words_are_read(message: str, read: MemoryShortage | None) -> None:
    assert read_shortage(message) == read


def printed(size_bytes: int) -> str:
    """As torch prints what it asks the driver for (`c10/cuda/CUDACachingAllocator.cpp:format_size`)."""
    asked = segment_bytes(size_bytes)
    if asked <= 1024 * MIB:
        return f"{asked / MIB:.2f} MiB"
    return f"{asked / GIB:.2f} GiB"


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 0},
        {"zero": 2, "attention": "eager"},
        {"zero": 3, "gradient_checkpointing": True},
        {"zero": 2, "liger": True},
        {"zero": 3, "lora_rank": 16},
    ],
    ids=str,
)
def test_every_large_tensor_is_named_by_the_size_that_torch_prints(options: dict[str, Any]) -> None:
    spec = recorded_spec("cuda", ranks=2, micro_batch=2, seq_len=4096, **options)
    stage = {"start": "partition", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
    named = 0
    for known in known_allocations(spec):
        if segment_bytes(known.size_bytes) <= 20 * MIB:
            continue
        for part in known.parts:
            shortage = read_shortage(f"CUDA out of memory. Tried to allocate {printed(known.size_bytes)}.")
            assert shortage is not None
            found = identify(spec, shortage, stage[part])
            alike = [one.size_bytes for one in found]
            assert known.name in [one.name for one in found] or len(alike) == 3, (known, found)
            assert all(printed(size) == printed(known.size_bytes) for size in alike)
            named += 1
    assert named > 8


@pytest.mark.parametrize(
    ("asked", "stage", "words"),
    [
        ("3.91 GiB", "backward", "the gradient of the logits in fp32 (8,192 tokens x 128,256 words)"),
        ("3.91 GiB", "forward", "the logits in fp32 for the loss"),
        ("1.96 GiB", "forward", "the logits (8,192 tokens x 128,256 words, 16-bit)"),
        ("14.96 GiB", "optimizer", "in fp32 of this rank's share (4,015,130,624 weights)"),
        ("14.96 GiB", "partition", "the flat copy of all 8,030,261,248 trained weights"),
        ("1002.00 MiB", "backward", "the gradient of the weights of the embedding or the head"),
        ("5.55 GiB", "backward", None),
        ("20.00 MiB", "backward", None),
    ],
)
def test_an_allocation_is_named_by_its_size_and_its_phase(asked: str, stage: str, words: str | None) -> None:
    spec = recorded_spec("cuda", ranks=2, micro_batch=2, seq_len=4096)
    shortage = read_shortage(f"CUDA out of memory. Tried to allocate {asked}.")
    assert shortage is not None
    found = [known.name for known in identify(spec, shortage, stage)]
    assert (words is None and not found) or any(words in name for name in found if words), found


def test_eager_attention_is_named() -> None:
    spec = recorded_spec("cuda", ranks=1, micro_batch=1, seq_len=8192, attention="eager")
    shortage = read_shortage("CUDA out of memory. Tried to allocate 8.00 GiB.")
    assert shortage is not None
    assert "attention scores in fp32 (1 x 32 heads" in identify(spec, shortage, "forward")[0].name


def test_the_device_is_shared_out() -> None:
    spec = recorded_spec("cuda", ranks=2)
    alone, shared, contained = map(read_shortage, (ALONE, SHARED, CONTAINED))
    room = room_of(spec, alone)
    assert room is not None and room.others_bytes == pytest.approx(0, abs=0.01 * GIB)
    assert room.shortfall_bytes == pytest.approx(gib(7.83 - 3.13), abs=0.02 * GIB)
    room = room_of(spec, shared)
    assert room is not None and room.others_bytes == pytest.approx(gib(21.55), abs=0.01 * GIB)
    assert room.available_bytes == pytest.approx(gib(57.6), abs=0.01 * GIB), "less than it was allowed"
    room = room_of(spec, contained)
    assert room is not None and room.others_bytes is not None
    assert 0 <= room.others_bytes < 2 * GIB, "its own process, by another number, is nobody else's"
    assert room_of(spec, read_shortage(HOST)) is None and room_of(spec, None) is None


def test_fixes_fit_what_there_was_and_not_what_was_predicted() -> None:
    """The prediction says that it fits; others hold half of the device."""
    spec = recorded_spec("cuda", ranks=4, zero=2, micro_batch=4, seq_len=2048)
    prediction = predict(spec)
    assert prediction.fits
    capacity = spec.gpu.memory_bytes or 0
    room = Room(available_bytes=capacity // 2, needed_bytes=capacity // 2 + GIB, others_bytes=capacity // 2)
    found = fixes(spec, prediction, room, "llmtop resume a-run")
    assert found and [fix.number for fix in found if fix.number] == list(
        range(1, 1 + sum(fix.number is not None for fix in found))
    )
    for fix in found:
        assert fix.peak_allocated_bytes < capacity // 2
        assert (fix.command == f"llmtop resume a-run --fix {fix.number}") == (fix.number is not None)
    assert any("lora_rank" in fix.change and fix.number is None for fix in found), "another training"


def test_a_prediction_that_was_too_low_is_raised_for_every_change() -> None:
    spec = recorded_spec("cuda", ranks=4, zero=2, micro_batch=4, seq_len=2048)
    prediction = predict(spec)
    assert prediction.fits and prediction.needed_bytes is not None
    capacity = spec.gpu.memory_bytes or 0
    near = Room(available_bytes=capacity, needed_bytes=capacity + GIB, others_bytes=DRIVER_RESERVE_BYTES)
    far = Room(available_bytes=capacity, needed_bytes=capacity + 30 * GIB, others_bytes=0)
    sizes = [fixes(spec, prediction, room, "r")[0].change for room in (near, far)]
    assert sizes[0] != sizes[1], "the larger the shortfall, the more has to change"
    for room in (near, far):
        excess = room.needed_bytes - prediction.needed_bytes - GIB
        for fix in fixes(spec, prediction, room, "r"):
            assert fix.peak_allocated_bytes + excess < capacity


def test_a_command_of_ones_own_is_not_gone_on_with() -> None:
    spec = recorded_spec("cuda", ranks=4, zero=2, micro_batch=4, seq_len=2048)
    own = replace(spec, script=Script(command=("python", "train.py"), folder="/", described=True))
    found = fixes(own, predict(spec), None, "r")
    assert found and all(fix.number is None and fix.command == "" for fix in found)


def test_host_memory_is_spared_by_less_offload(tmp_path: Path) -> None:
    offloaded: dict[str, Any] = {"zero": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
    none: dict[str, object] = {"offload_optimizer": "none", "offload_param": "none"}
    spec = recorded_spec("cuda", ranks=8, seq_len=1024, nvme_path=str(tmp_path), **offloaded)
    found = host_fixes(spec, "r")
    assert [fix.number for fix in found] == list(range(1, len(found) + 1))
    assert found[0].change == none
    # Of eight ranks each one's weights are few enough for DeepSpeed to keep them in memory all the same.
    assert {"offload_param": "nvme"} not in [fix.change for fix in found]
    fewer = recorded_spec("cuda", ranks=4, seq_len=1024, nvme_path=str(tmp_path), **offloaded)
    assert {"offload_param": "nvme"} in [fix.change for fix in host_fixes(fewer, "r")]
    for fix in found:
        assert predict(apply(spec, fix.change)).host_bytes < predict(spec).host_bytes
        assert "host memory" in fix.text
    # With this batch the states of eight billion weights do not fit on one device.
    alone = recorded_spec("cuda", ranks=1, micro_batch=4, seq_len=2048, **offloaded)
    assert none not in [fix.change for fix in host_fixes(alone, "r")]
    assert host_fixes(recorded_spec("cuda", ranks=2), "r") == ()


def test_without_figures_whatever_needs_less_is_offered() -> None:
    spec = recorded_spec("cuda", ranks=1, zero=2, micro_batch=4, seq_len=2048, liger=True)
    assert fixes(spec, predict(spec), None, "r")
    unknown = replace(spec, gpu=replace(spec.gpu, memory_bytes=None))
    assert fixes(unknown, predict(unknown), None, "r") == ()


def failed(root: Path, message: str, **told: Any) -> Report:
    """The report of a run on two H200s whose rank 1 told of this."""
    live = LiveRun(root, kind="cuda", micro_batch=2, seq_len=4096)
    live.start()
    live.steps(1, 4)
    told = {"stage": "backward", "step": 5, **told}
    live.recorder.ranks[1].write(
        RankFailed(
            error_type="OutOfMemoryError",
            message=message,
            out_of_memory=True,
            shortage=read_shortage(message),
            **told,
        )
    )
    live.recorder.supervisor.write(RankExited(rank=1, pid=live.recorder.pid(1), exit_code=5))
    live.end("out_of_memory", "rank 1 ran out of memory", "take less", rank=1)
    live.close()
    return build_report(live.run)


def test_the_report_tells_moment_allocation_room_prediction_and_fixes(tmp_path: Path) -> None:
    message = ALONE.replace("7.83 GiB", "3.91 GiB")
    report = failed(tmp_path, message, micro_batch=2, where="torch/autograd.py:9 in run_backward")
    found = report.out_of_memory
    assert found is not None and (found.rank, found.step, found.component) == (1, 5, "logits")
    assert found.room is not None and found.fixes
    text = render(report)
    words = " ".join(text.split())
    for told in (
        "rank 1 in backward of step 5, micro-batch 2 at torch/autograd.py:9 in run_backward",
        "asked for 3.91 GiB: the gradient of the logits in fp32 (8,192 tokens x 128,256 words)",
        "140 GiB on the device, 0 B (0.0%) held by other processes and the driver",
        "there were 134 GiB, and 138 GiB with what was asked for",
        "exited with 5 after step 4 (OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB)",
        f"llmtop resume {report.run_id} --fix 1",
    ):
        assert told in words, text
    (finding,) = [one for one in report.findings if one.key == "out_of_memory"]
    # Nothing was saved.
    assert finding.command == f"llmtop resume {report.run_id} --fix 1 --anew"
    assert "asked for 3.91 GiB" in finding.evidence


def test_pieces_that_did_not_fit_are_named(tmp_path: Path) -> None:
    report = failed(tmp_path, ALONE.replace("642.55 MiB is reserved", "12.00 GiB is reserved"))
    assert "expandable_segments" in render(report)


def test_host_memory_gets_no_advice_for_the_device(tmp_path: Path) -> None:
    report = failed(tmp_path, HOST, stage="optimizer")
    found = report.out_of_memory
    assert found is not None and found.on_host and found.fixes == ()
    assert "asked for 8.00 GiB of host memory" in " ".join(render(report).split())


@pytest.mark.parametrize(
    ("kind", "signal", "some"), [("cuda", "SIGKILL", False), ("cuda", None, True), ("cpu", "SIGKILL", True)]
)
def test_fixes_are_offered_where_the_rank_could_not_tell(
    tmp_path: Path, kind: Kind, signal: str | None, some: bool
) -> None:
    live = LiveRun(tmp_path, kind=kind, micro_batch=4, seq_len=2048)
    live.start()
    code = None if signal else 5
    live.recorder.supervisor.write(
        RankExited(rank=0, pid=live.recorder.pid(0), exit_code=code, signal=signal)
    )
    live.end("out_of_memory", "rank 0 is gone", rank=0)
    live.close()
    state = read_state(live.run)
    assert bool(fixes_after(state, live.spec, live.run.prediction())) == some
    assert fixes_after(replace(state, status="failed"), live.spec, live.run.prediction()) == ()


_MEASURED: tuple[tuple[dict[str, Any], str, str], ...] = (
    (
        {"zero": 2, "seq_len": 8192},
        "Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 6.36 GiB is free."
        " Including non-PyTorch memory, this process has 133.43 GiB memory in use. Of the allocated memory"
        " 122.36 GiB is allocated by PyTorch, and 9.49 GiB is reserved by PyTorch but unallocated.",
        "a block's attention scores in fp32 (1 x 32 heads x 8,192 x 8,192)",
    ),
    (
        {"zero": 0, "seq_len": 32768},
        "Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 50.07 GiB is free."
        " Including non-PyTorch memory, this process has 89.73 GiB memory in use. Of the allocated memory"
        " 83.22 GiB is allocated by PyTorch, and 4.93 GiB is reserved by PyTorch but unallocated.",
        "a block's attention scores (1 x 32 heads x 32,768 x 32,768, 16-bit)",
    ),
    (
        {"zero": 0, "seq_len": 16384, "precision": "fp32"},
        "Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3.49 GiB is free."
        " Including non-PyTorch memory, this process has 136.31 GiB memory in use. Of the allocated memory"
        " 108.96 GiB is allocated by PyTorch, and 25.76 GiB is reserved by PyTorch but unallocated.",
        "a block's attention scores (1 x 32 heads x 16,384 x 16,384, fp32)",
    ),
)
"""Of Llama-3.2-1B with eager attention on one H200 (torch 2.11), in the forward pass: options, torch's
message, and what it was."""


@pytest.mark.parametrize(("options", "message", "name"), _MEASURED, ids=("zero 2", "long", "fp32"))
def test_what_ran_out_on_an_h200_is_named_and_mended(
    options: dict[str, Any], message: str, name: str
) -> None:
    chosen = {"model": "llama-3.2-1b", "gpu": "h200", "attention": "eager", "micro_batch": 1, **options}
    layer = resolve.Layer(ValueSource.COMMAND_LINE, "a test", chosen)
    machine = resolve.Machine(gpu="h200", gpus=1, host_memory_bytes=None)
    spec = resolve.resolve([layer], name="h200", machine=machine)
    shortage = read_shortage(f"CUDA out of memory. {message}")
    assert shortage is not None
    assert [known.name for known in identify(spec, shortage, "forward")] == [name]
    cheapest = fixes(spec, predict(spec), room_of(spec, shortage), "llmtop resume a-run")[0]
    assert cheapest.change["attention"] == "sdpa"
