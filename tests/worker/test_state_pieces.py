"""The parts of a saved state that need no ranks: files, pieces found in any cut, scalers, room, markers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig, LossScaler
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from llmtop.presets.errors import LlmtopError
from llmtop.trainer import room
from llmtop.trainer.statefile import (
    INDEX,
    MARKER,
    Piece,
    Position,
    Progress,
    Source,
    StateIndex,
    StoredFile,
    StoredParameter,
    StoredSlab,
    newest,
    read_index,
)
from llmtop.trainer.worker.checkpoint import index_of, prune
from llmtop.trainer.worker.state import extras, moments, shardfile
from llmtop.trainer.worker.state.finding import Stored, same_layout
from llmtop.trainer.worker.state.layout import Slab, StateRefused, _cut, _row, layout_of
from llmtop.trainer.worker.state.names import Named, frozen_check, named_parameters, persistent_buffers

TENSORS = {
    "a.master": torch.randn(1001),
    "b.codes": torch.arange(7, dtype=torch.uint8),
    "c.value": torch.randn(33).bfloat16(),
    "d.flag": torch.tensor([True, False, True]),
    "e.count": torch.arange(5),
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> int:
    return shardfile.write_shard(path, tensors, {"of": "a test"}, durable=True)


def test_a_shard_is_plain_safetensors(tmp_path: Path) -> None:
    size = write(tmp_path / "x", TENSORS)
    assert size == (tmp_path / "x").stat().st_size
    with safe_open(str(tmp_path / "x"), "pt") as file:
        assert file.metadata() == {"of": "a test"}
        assert set(file.keys()) == set(TENSORS)
        assert all(torch.equal(file.get_tensor(name), one) for name, one in TENSORS.items())


def test_ranges_are_read_across_chunks_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardfile, "_CHUNK_BYTES", 64)
    write(tmp_path / "x", TENSORS)
    reader = shardfile.ShardReader(tmp_path / "x")
    same, wider = torch.zeros(500), torch.zeros(30)
    read = reader.read_all([("a.master", 300, same), ("c.value", 2, wider)])
    assert read == 4 * 500 + 2 * 30
    assert torch.equal(same, TENSORS["a.master"][300:800])
    assert torch.equal(wider, TENSORS["c.value"][2:32].float())
    with pytest.raises(LlmtopError, match="damaged"):
        reader.read_all([("a.master", 600, same)])
    with pytest.raises(LlmtopError, match="damaged"):
        reader.read_all([("z.master", 0, same)])
    reader.close()


@pytest.mark.parametrize("kept", [4, 40, -3])
def test_a_shard_that_is_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    write(tmp_path / "x", TENSORS)
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:kept])
    with pytest.raises(LlmtopError, match="damaged"):
        reader = shardfile.ShardReader(tmp_path / "x")
        reader.read_all([(name, 0, torch.empty_like(one)) for name, one in TENSORS.items()])


CUTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(sizes=CUTS, old=st.integers(1, 5), new=st.integers(1, 5), per_parameter=st.booleans())
def test_what_one_cut_wrote_another_finds(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], old: int, new: int, per_parameter: bool
) -> None:
    """Flat over all parameters, as at stages 1 and 2, or each parameter for itself, as at stage 3."""
    folder = tmp_path_factory.mktemp("cut")
    named = [
        Named(number=number, name=f"p{number}", aliases=(), parameter=torch.empty(size))
        for number, size in enumerate(sizes)
    ]
    values = [torch.randn(size) for size in sizes]
    files = []
    for rank in range(old):
        pieces, count = cut(named, rank, old, per_parameter)
        flat = fill(pieces, count, values)
        slab = StoredSlab(key="0", elements=count, pieces=pieces, tensors={"master": "F32"}, step=4.0)
        size = write(folder / f"{rank}", {"0.master": flat})
        files.append(StoredFile(name=f"{rank}", size_bytes=size, slabs=(slab,)))
    stored = Stored(folder, index(named, tuple(files)), named)
    for rank in range(new):
        pieces, count = cut(named, rank, new, not per_parameter)
        target = torch.zeros(count)
        for one in stored.find(pieces, str):
            part = target[one.target : one.target + one.count]
            stored.reader(one.file).read_all([(f"{one.slab.key}.master", one.source, part)])
        assert torch.equal(target, fill(pieces, count, values))
        assert stored.steps(pieces) == ({4.0} if pieces else set())
        pieces, count = cut(named, rank, old, per_parameter) if rank < old else ((), 0)
        found = stored.find(pieces, str)
        assert same_layout(pieces, count, found) == bool(found)
    stored.close()


def cut(named: list[Named], rank: int, ranks: int, per_parameter: bool) -> tuple[tuple[Piece, ...], int]:
    if not per_parameter:
        size = -(-sum(one.parameter.numel() for one in named) // ranks)
        return _cut(named, _row(named), rank * size, size), size
    pieces, at = [], 0
    for one in named:
        size = -(-one.parameter.numel() // ranks)
        count = min(size, one.parameter.numel() - rank * size)
        if count > 0:
            pieces.append(Piece(one.number, rank * size, count, at))
        at += size
    return tuple(pieces), at


def fill(pieces: tuple[Piece, ...], count: int, values: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.zeros(count)
    for piece in pieces:
        part = values[piece.parameter][piece.start : piece.start + piece.count]
        flat[piece.offset : piece.offset + piece.count] = part
    return flat


def index(named: list[Named], files: tuple[StoredFile, ...]) -> StateIndex:
    return StateIndex(
        step=4,
        source=Source(zero=2, world_size=1, engine_optimizer="x", optimizer="y"),
        parameters=tuple(
            StoredParameter(name=one.name, shape=one.shape, dtype="F32", trainable=True, saved=True)
            for one in named
        ),
        files=files,
    )


def test_a_parameter_that_is_not_covered_is_named(tmp_path: Path) -> None:
    named = [Named(number=0, name="gone", aliases=(), parameter=torch.empty(10))]
    slab = StoredSlab(key="0", elements=4, pieces=(Piece(0, 0, 4, 0),), tensors={"master": "F32"})
    stored = Stored(tmp_path, index(named, (StoredFile(name="0", size_bytes=0, slabs=(slab,)),)), named)
    with pytest.raises(LlmtopError, match="does not have all of gone"):
        stored.find([Piece(0, 0, 10, 0)], lambda number: named[number].name)


@given(first=st.integers(0, 900), count=st.integers(1, 100))
def test_codes_are_unpacked_from_any_place(first: int, count: int) -> None:
    codes = torch.arange(1000).remainder(256).to(torch.uint8)
    absmax, qmap = torch.arange(1, 5).float(), torch.linspace(-1, 1, 256)
    whole = moments.unpack(codes, absmax, qmap, 0)
    block = first // 256
    last = -(-(first + count) // 256)
    part = moments.unpack(codes[first : first + count], absmax[block:last], qmap, first)
    assert torch.equal(part, whole[first : first + count])


class FusedAdam(torch.optim.AdamW):
    """Keeps its step as DeepSpeed's does: an int, counted for the last tensor of a group."""


class DeepSpeedCPUAdam(torch.optim.AdamW):
    fp32_optimizer_states = True


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam])
def test_fresh_state_is_what_the_optimizer_would_make(kind: Any) -> None:
    master = torch.nn.Parameter(torch.randn(8))
    optimizer = kind([master])
    slab = Slab(master=master, group=0, owner=optimizer, pieces=(Piece(0, 0, 8, 0),), replicated=True)
    assert moments.held(slab) == ({}, None)
    made = moments.make(slab, 3.0)
    assert set(made) == {"exp_avg", "exp_avg_sq"}
    state = optimizer.state[master]
    assert float(state["step"]) == 3 and isinstance(state["step"], torch.Tensor) == (
        kind is torch.optim.AdamW
    )
    made["exp_avg"].fill_(2)
    assert torch.equal(state["exp_avg"], torch.full((8,), 2.0))
    assert moments.held(slab)[1] == 3


def test_fused_adam_counts_for_the_last_tensor_of_a_group() -> None:
    tensors = [torch.nn.Parameter(torch.randn(2)) for _ in range(3)]
    optimizer = FusedAdam([{"params": tensors[:2]}, {"params": tensors[2:]}])
    slabs = [
        Slab(master=one, group=group, owner=optimizer, pieces=(), replicated=True)
        for one, group in zip(tensors, (0, 0, 1), strict=True)
    ]
    steps = {id(tensors[0]): 0.0, id(tensors[1]): 5.0, id(tensors[2]): 4.0}
    assert [moments.common_step(slab, steps) for slab in slabs] == [5, 5, 4]


def test_other_optimizers_are_refused_with_words() -> None:
    tensor = torch.nn.Parameter(torch.randn(2))
    with pytest.raises(StateRefused, match="SGD"):
        moments.refuse_unknown_optimizer(torch.optim.SGD([tensor]))
    with pytest.raises(StateRefused, match="AMSGrad"):
        moments.refuse_unknown_optimizer(torch.optim.AdamW([tensor], amsgrad=True))
    moments.refuse_unknown_optimizer(torch.optim.AdamW([tensor]))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"swap_optimizer": True}, "NVMe"),
        ({"zenflow": True}, "ZenFlow"),
        ({}, "SimpleNamespace"),
    ],
)
def test_layouts_that_nobody_knows_are_refused(facts: dict[str, bool], words: str) -> None:
    engine = SimpleNamespace(optimizer=SimpleNamespace(**facts), basic_optimizer=None)
    with pytest.raises(StateRefused, match=words):
        layout_of(engine, [])


def dynamic_scaler() -> Any:
    return DynamicLossScaler(
        init_scale=2**16, scale_window=1000, min_scale=1, delayed_shift=2, consecutive_hysteresis=False
    )


def stage0_scaler() -> Any:
    arguments = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1}
    return LossScaleConfig(torch.float16, True, 1.0, arguments)


@pytest.mark.parametrize("make", [dynamic_scaler, stage0_scaler])
@pytest.mark.parametrize("take", [dynamic_scaler, stage0_scaler])
def test_a_loss_scale_goes_on_in_any_scaler(make: Any, take: Any) -> None:
    before, after = make(), take()
    before.cur_scale, before.cur_iter, before.last_overflow_iter = 512.0, 77, 70
    saved = json.loads(json.dumps(extras.loss_scale(before)))
    extras.restore_loss_scale(after, saved)
    assert (after.cur_scale, after.cur_iter, after.last_overflow_iter) == (512.0, 77, 70)


def test_a_scale_that_stands_still_is_not_saved() -> None:
    assert extras.loss_scale(LossScaler(scale=8)) is None
    assert extras.loss_scale(LossScaleConfig(torch.bfloat16, True, 1.0, None)) is None
    assert extras.loss_scale(None) is None
    still = LossScaler(scale=8)
    extras.restore_loss_scale(still, {"cur_scale": 4.0})
    assert still.cur_scale == 8


def test_random_states_come_back() -> None:
    for generator in (random.seed, numpy.random.seed, torch.manual_seed):
        generator(3)
    numpy.random.randn()
    random.gauss(0, 1)
    tensors, plain = extras.random_tensors(torch.device("cpu"))
    plain = json.loads(json.dumps(plain))

    def draw() -> list[float]:
        return [random.gauss(0, 1), float(numpy.random.randn()), float(torch.randn(()))]

    first = draw()
    extras.restore_random(tensors, plain, torch.device("cpu"))
    assert draw() == first


def test_names_do_not_depend_on_wrappers() -> None:
    inner = torch.nn.Linear(2, 2)
    wrapped = torch.nn.ModuleDict({"_orig_mod": torch.nn.ModuleDict({"a": inner, "b": inner})})
    named = named_parameters(wrapped)
    assert [(one.name, one.aliases) for one in named] == [
        ("a.weight", ("b.weight",)),
        ("a.bias", ("b.bias",)),
    ]
    norm = torch.nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert set(persistent_buffers(norm)) == {"running_mean", "running_var", "num_batches_tracked"}


def test_another_base_has_another_check() -> None:
    torch.manual_seed(1)
    base = torch.nn.Linear(100, 100).requires_grad_(False)
    first = frozen_check(named_parameters(base))
    assert first and first == frozen_check(named_parameters(base))
    assert first.startswith("float32:")
    base.weight.data[0, 3] += 1
    assert frozen_check(named_parameters(base)) != first
    assert frozen_check(named_parameters(base.requires_grad_(True))) == ""


def test_too_little_room_is_told_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert room.why_no_room(tmp_path, 1000) is None
    monkeypatch.setattr(room, "free_bytes", lambda folder: 1 << 30)
    told = room.why_no_room(tmp_path, 2 << 30)
    assert told is not None and "2.00 GiB" in told and "1.00 GiB free" in told
    assert "64.0 MiB must stay free" in told
    # More is free than it takes: without the reserve nobody would understand the refusal.
    assert "64.0 MiB must stay free" in (room.why_no_room(tmp_path, (1 << 30) - (8 << 20)) or "")
    monkeypatch.setattr(room, "free_bytes", lambda folder: 8 << 30)
    monkeypatch.setattr(room, "file_system", lambda folder: SimpleNamespace(kind="tmpfs"))
    monkeypatch.setattr(room, "memory_left_bytes", lambda: 1 << 30)
    told = room.why_no_room(tmp_path, 2 << 30)
    assert told is not None and "host memory" in told and "64.0 MiB must stay available" in told
    monkeypatch.setattr(room, "file_system", lambda folder: SimpleNamespace(kind="ext4"))
    assert room.why_no_room(tmp_path, 2 << 30) is None


def marked(folder: Path, step: int, files: dict[str, bytes]) -> Path:
    path = folder / f"step-{step}"
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    sizes = {name: len(content) for name, content in files.items()}
    progress = Progress(step=step, position=Position(index=step), world_size=1, files=sizes)
    (path / MARKER).write_bytes(msgspec.json.encode(progress))
    return path


def test_a_checkpoint_that_lost_a_byte_does_not_count(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        marked(tmp_path, step, {"rank-00000.safetensors": b"12345678", INDEX: b"{}"})
    found = newest(tmp_path)
    assert found is not None and found.step == 6
    (tmp_path / "step-6" / "rank-00000.safetensors").write_bytes(b"1234567")
    (tmp_path / "step-4" / INDEX).unlink()
    found = newest(tmp_path)
    assert found is not None and found.step == 2


def test_the_one_that_was_about_to_be_replaced_still_counts(tmp_path: Path) -> None:
    for step in (2, 4):
        path = marked(tmp_path, step, {INDEX: msgspec.json.encode(index([], ()))})
    path.rename(tmp_path / "step-4.old")
    found = newest(tmp_path)
    assert found is not None and found.step == 4
    assert index_of(tmp_path, found).source.zero == 2
    marked(tmp_path, 4, {INDEX: b"later"})
    with pytest.raises(LlmtopError, match="cannot read"):
        index_of(tmp_path, found)


def test_pruning_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        marked(tmp_path, step, {INDEX: b"{}"})
    (tmp_path / "step-8" / INDEX).unlink()
    (tmp_path / ".step-9.partial").mkdir()
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-6", "step-8"]
    # The one that a resume came from stays, however old.
    prune(tmp_path, keep=1, spare_step=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-6", "step-8"]


def test_an_index_of_another_kind_is_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(LlmtopError, match="not a training state"):
        read_index(tmp_path)
    (tmp_path / INDEX).write_bytes(b'{"step": ')
    with pytest.raises(LlmtopError, match="cannot read"):
        read_index(tmp_path)
    later = msgspec.structs.replace(index([], ()), format=99)
    (tmp_path / INDEX).write_bytes(msgspec.json.encode(later))
    with pytest.raises(LlmtopError, match="format 99"):
        read_index(tmp_path)
