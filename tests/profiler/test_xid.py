"""Xid errors: what is told of them, that nothing waits for them, and what a run's record makes of them."""

from __future__ import annotations

import pytest

from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.host import HostReader
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.hardware.sampler import Sampler
from llmtop.profiler.hardware.xid import XIDS, xid_seen
from llmtop.profiler.record.events import XidSeen
from tests.fake_nvml import NOT_SUPPORTED, FakeGpu, FakeNvml
from tests.recorded import ManualClock


def watching(*gpus: FakeGpu) -> tuple[NvmlReader, FakeNvml]:
    time, fake = ManualClock(), FakeNvml(*gpus)
    return NvmlReader(fake, clock=lambda: time.now), fake


def numbers(seen: tuple[XidSeen, ...]) -> list[tuple[int, int]]:
    return [(event.device, event.xid) for event in seen]


@pytest.mark.parametrize("number", [13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 120])
def test_what_trainers_meet_is_explained(number: int) -> None:
    event = xid_seen(0, number)
    assert event.meaning == XIDS[number].meaning and len(event.fix) > 10
    assert event.is_hardware == (number not in (13, 31, 43, 45))


def test_an_unknown_number_is_not_explained_away() -> None:
    event = xid_seen(2, 777)
    assert "not in this table" in event.meaning and "catalogue" in event.fix
    assert not event.is_hardware


def test_every_explanation_fits_a_panel() -> None:
    assert all(xid.meaning and xid.fix and len(xid.meaning) <= 62 for xid in XIDS.values())


def test_each_error_is_given_once_and_names_its_device() -> None:
    first, second = FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")
    reader, fake = watching(first, second)
    assert reader.watch_xids((1, 0)) == {0, 1}
    reader.sample()
    assert reader.take_xids() == ()
    first.xids, second.xids = [31, 45], [79]
    reader.sample()
    assert numbers(reader.take_xids()) == [(0, 31), (0, 45), (1, 79)]
    assert reader.take_xids() == ()
    second.xids = [48]
    assert reader.take_xids() == ()
    assert numbers(reader.take_xids(poll=True)) == [(1, 48)]
    reader.close()
    assert fake.open_handles == []


def test_a_flood_is_taken_in_parts() -> None:
    gpu = FakeGpu()
    reader, _ = watching(gpu)
    reader.watch_xids()
    gpu.xids = [13] * 1000
    reader.sample()
    assert 0 < len(reader.take_xids()) < 100
    assert gpu.xids


def test_a_device_that_refuses_is_not_watched() -> None:
    gpu, other = FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")
    gpu.broken = {"nvmlDeviceRegisterEvents": NOT_SUPPORTED}
    reader, fake = watching(gpu, other)
    assert reader.watch_xids() == {1}
    gpu.xids = other.xids = [13]
    reader.sample()
    assert numbers(reader.take_xids()) == [(1, 13)]
    reader.close()
    assert fake.open_handles == []


def test_without_watching_nobody_asks() -> None:
    gpu = FakeGpu()
    gpu.xids = [79]
    reader, fake = watching(gpu)
    reader.sample()
    assert reader.take_xids(poll=True) == () and "nvmlEventSetWait_v2" not in fake.calls


def test_the_sampler_watches_its_own_devices() -> None:
    gpus = [FakeGpu(uuid=f"GPU-{n}") for n in range(3)]
    reader, _ = watching(*gpus)
    sampler = Sampler(nvml=reader, host=HostReader(), device_indices=(2,))
    for gpu in gpus:
        gpu.xids = [94]
    sampler.sample({})
    assert numbers(sampler.take_xids()) == [(2, 94)]
    sampler.close()


def test_the_fold_keeps_the_first_of_each_and_counts_all() -> None:
    events = [xid_seen(0, 31), xid_seen(0, 31), xid_seen(0, 45), xid_seen(1, 31)]
    state = fold(RunState(), events)
    assert numbers(state.xids) == [(0, 31), (0, 45), (1, 31)]
    assert state.xid_counts == {0: 3, 1: 1}
    assert state == fold(fold(RunState(), events[:2]), events[2:])
