"""The panels of GPUs and links: what stands in a small overview, and everything when opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.xid import xid_seen
from llmtop.profiler.record.deviceevents import DeviceSample, LinkSample
from llmtop.profiler.record.events import AnyEvent, HardwareSampled, TopologySeen, XidSeen
from llmtop.tui.app import LlmtopApp
from llmtop.tui.feeds.view import RunView
from llmtop.tui.panels.devices import DevicesPanel
from llmtop.tui.panels.links import LinksPanel
from llmtop.tui.widgets.picture import Picture
from tests.recorded import make_recorded_run, recorded_topology
from tests.recorded_spec import GIB, recorded_prediction, recorded_spec
from tests.tui.tuiruns import LiveRun, wait_for, wait_for_text

WELL = DeviceSample(
    index=0,
    name="NVIDIA H200",
    memory_used_bytes=80 * GIB,
    memory_total_bytes=140 * GIB,
    utilization_percent=99.0,
    power_watts=650.0,
    power_limit_watts=700.0,
    temperature_celsius=61.0,
    sm_clock_hz=1.755e9,
    throttle_reasons=(),
    sm_active_percent=91.0,
    tensor_active_percent=57.0,
    dram_active_percent=40.0,
)
"""GPM, but none of the error counters."""


def draw(panel: Picture, *devices: DeviceSample, xids: tuple[XidSeen, ...] = (), height: int = 3) -> str:
    topology = TopologySeen(topology=recorded_topology(len(devices)))
    sample = HardwareSampled(devices=devices)
    events: list[AnyEvent] = [topology, sample, sample, *xids]
    return draw_state(panel, fold(RunState(), events), height)


def draw_state(panel: Picture, state: RunState, height: int = 3) -> str:
    spec, prediction = recorded_spec("cuda"), recorded_prediction(recorded_spec("cuda"))
    parts = breakdown(state, spec, prediction)
    view = RunView(state=state, spec=spec, prediction=prediction, breakdown=parts)
    return panel.draw(view, 76, height).plain


def opened(kind: type[Picture]) -> Picture:
    panel = kind()
    panel.zoomed = True
    return panel


def test_activity_of_each_device_in_a_small_overview() -> None:
    head, first, second = draw(DevicesPanel(), WELL, replace(WELL, index=1, tensor_active_percent=3.0)).split(
        "\n"
    )
    assert head.split() == ["SM", "tensor", "DRAM", "W", "C"]
    assert first.split() == ["GPU0", "91%", "57%", "40%", "650", "61"]
    assert second.split()[2] == "3%"


def test_many_devices_are_a_mean_and_the_least_busy() -> None:
    devices = [replace(WELL, index=index, sm_active_percent=90.0 - index) for index in range(8)]
    rows = draw(DevicesPanel(), *devices).split("\n")
    assert [row.split()[:2] for row in rows[1:]] == [["mean", "86%"], ["GPU7", "83%"]]


def test_without_gpm_the_utilisation_is_called_so() -> None:
    old = DeviceSample(index=0, name="Tesla T4", utilization_percent=96.0)
    head, row = draw(DevicesPanel(), old).split("\n")
    assert head.split()[0] == "busy" and row.split() == ["GPU0", "96%", "n/a", "n/a", "n/a", "n/a"]
    shown = draw(opened(DevicesPanel), old)
    assert "NVML's utilisation" in shown and "SM occupancy" not in shown
    assert shown.count("n/a") > 5


def test_everything_of_an_opened_device() -> None:
    device = replace(
        WELL,
        throttle_reasons=("power cap", "hardware thermal slowdown"),
        ecc_corrected=7,
        ecc_uncorrected=1,
        remapped_rows=2,
        remap_pending=True,
    )
    shown = draw(opened(DevicesPanel), device, xids=(xid_seen(0, 63), xid_seen(3, 79)))
    for words in (
        "650/700 W",
        "61 C   clocks: SM 1755 MHz, memory n/a",
        "throttled: power cap, hardware thermal slowdown",
        "7 corrected, 1 not",
        "rows replaced: 2, more at the next reset",
        "Xid 63: a memory row was put on the list",
    ):
        assert words in shown
    assert "Xid 79" not in shown


def test_a_lost_device_says_so_in_both_sizes() -> None:
    lost = DeviceSample(index=0, name="NVIDIA H200", is_lost=True)
    assert "lost: the driver does not reach it" in draw(DevicesPanel(), lost)
    assert "lost: the driver says" in draw(opened(DevicesPanel), lost)


def test_links_one_by_one_come_from_the_newest_sample_that_has_them() -> None:
    links = (LinkSample(0, 20 * GIB, 10 * GIB, 0, 0, 0), LinkSample(3, 5 * GIB, None, 4, 1, 0))
    device = replace(WELL, pcie_generation=4, pcie_width=8, links=links)
    events: list[AnyEvent] = [
        TopologySeen(topology=recorded_topology(2)),
        HardwareSampled(devices=(device,)),
        HardwareSampled(devices=(replace(device, links=()),)),
    ]
    shown = draw_state(opened(LinksPanel), fold(RunState(), events))
    for words in (
        "PCIe gen4 x8 of gen5 x16",
        "GPU0  2 NVLinks up",
        " 0 20.0 GiB/s 10.0 GiB/s",
        " 3 5.00 GiB/s        n/a",
        "link 3: 4 CRC errors, 1 replay, 0 recoveries",
        "GPU0  X     NV18",
        "18 links to switches",
    ):
        assert words in shown


async def test_a_run_on_gpus_shows_them_in_place_of_the_host(root: Path) -> None:
    run = make_recorded_run(root, kind="cuda", ranks=2, steps=6, end=None)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=(80, 24)) as pilot:
        shown = await wait_for_text(pilot, "6/6", "9 GPUs", "tensor")
        assert "5 Host" not in shown
        await pilot.press("5")
        await wait_for_text(pilot, "5 Host", "RAM")


@pytest.mark.parametrize(("options", "size"), [({"offload_optimizer": "cpu"}, (80, 24)), ({}, (140, 40))])
async def test_the_host_stays_where_it_has_a_part_or_there_is_room(
    options: dict[str, Any], size: tuple[int, int], root: Path
) -> None:
    run = make_recorded_run(root, kind="cuda", ranks=2, steps=6, end=None, **options)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=size) as pilot:
        shown = await wait_for_text(pilot, "6/6", "5 Host")
        assert ("9 GPUs" in shown) == (size[0] > 80)


async def test_a_run_on_the_cpu_has_no_such_panel_until_asked(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(140, 40)) as pilot:
        shown = await wait_for_text(pilot, "20/60")
        assert "9 GPUs" not in shown
        await pilot.press("9")
        await wait_for(pilot, lambda: app.screen.zoomed is not None)  # type: ignore[attr-defined]
        await wait_for_text(pilot, "this run has no GPU")
