"""How GPUs are connected: as nvidia-smi writes it, and what is worth telling of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.hardware.nvmlcalls import NvmlCalls
from llmtop.profiler.hardware.topology import cpu_ranges, read_topology
from llmtop.profiler.record.deviceevents import Topology
from llmtop.profiler.record.events import TopologySeen
from llmtop.profiler.topology import matrix, nvlink_words, parse_cpus, pcie_words, problems
from tests.fake_nvml import NOT_SUPPORTED, FakeGpu, FakeNvml
from tests.recorded import recorded_topology

OWN = sorted(os.sched_getaffinity(0))


def gpus(count: int, links: int) -> list[FakeGpu]:
    """On one baseboard with NVSwitch."""
    made = []
    for number in range(count):
        gpu = FakeGpu(uuid=f"GPU-{number}")
        gpu.links, gpu.bus_id = [1] * links, f"00000000:{number:02X}:00.0"
        gpu.link_fields = {(164, link): 26_562 for link in range(links)}
        gpu.cpus = frozenset(OWN)
        made.append(gpu)
    return made


def read(*devices: FakeGpu) -> Topology:
    reader = NvmlReader(FakeNvml(*devices))
    try:
        return reader.topology()
    finally:
        reader.close()


def keys(topology: Topology) -> list[str]:
    return [problem.key for problem in problems(topology)]


def test_devices_that_meet_at_switches() -> None:
    topology = read(*gpus(3, 18))
    assert [(pair.first, pair.second, pair.road) for pair in topology.pairs] == [
        (0, 1, "NV18"),
        (0, 2, "NV18"),
        (1, 2, "NV18"),
    ]
    assert all(pair.peer_access and pair.nvlinks == 18 for pair in topology.pairs)
    device = topology.devices[1]
    assert (device.nvlinks, device.nvlink_peer) == (18, "switch")
    assert device.nvlink_bytes_per_second == pytest.approx(18 * 26.562e9)
    assert device.pci_bus_id == "00000000:01:00.0"
    assert (device.pcie_generation_max, device.pcie_width_max, device.has_gpm) == (5, 16, False)
    assert problems(topology) == []


def test_links_that_end_at_the_other_device_are_counted() -> None:
    first, second, third = gpus(3, 4)
    for gpu, ends in ((first, (1, 1, 2, 2)), (second, (0, 0, 2, 2)), (third, (0, 0, 1, 1))):
        gpu.link_peer = 0
        gpu.link_bus_ids = {link: f"00000000:{end:02X}:00.0" for link, end in enumerate(ends)}
    assert [pair.road for pair in read(first, second, third).pairs] == ["NV2", "NV2", "NV2"]
    second.links = [0, 0, 1, 1]
    first.links = [0, 0, 1, 1]
    topology = read(first, second, third)
    assert [pair.road for pair in topology.pairs] == ["SYS", "NV2", "NV2"]
    (problem,) = problems(topology)
    assert problem.key == "no_nvlink" and problem.what.startswith("GPU 0 and 1: no NVLink")
    assert "the link between processors" in problem.what


@pytest.mark.parametrize(
    ("level", "road"), [(0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS")]
)
def test_devices_without_nvlink(level: int, road: str) -> None:
    first, second = gpus(2, 0)
    first.road = second.road = level
    topology = read(first, second)
    assert topology.pairs[0].road == road and topology.pairs[0].nvlinks is None
    assert keys(topology) == ["no_nvlink"]


def test_what_a_driver_refuses_is_not_told() -> None:
    first, second = gpus(2, 18)
    assert read(first, second).pairs[0].road == "NV18"
    refused = (
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetP2PStatus",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetCpuAffinity",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetMigMode",
    )
    for gpu in (first, second):
        gpu.broken = dict.fromkeys(refused, NOT_SUPPORTED)
    topology = read(first, second)
    (pair,) = topology.pairs
    assert pair.road is None and pair.nvlinks is None and pair.peer_access is None
    device = topology.devices[0]
    assert device.nvlinks is None and device.cpus is None and device.ecc_enabled is None
    assert problems(topology) == []
    assert matrix(topology)[1] == ["GPU0", "X", "n/a", "n/a", "n/a"]


def test_numa_node_from_the_kernel(tmp_path: Path) -> None:
    (gpu,) = gpus(1, 0)
    gpu.bus_id = "00000000:1B:00.0"
    calls = NvmlCalls(FakeNvml(gpu))
    folder = tmp_path / "bus" / "pci" / "devices" / "0000:1b:00.0"
    folder.mkdir(parents=True)
    for text, node in (("1\n", 1), ("-1\n", None), ("\n", None)):
        (folder / "numa_node").write_text(text)
        assert read_topology(calls, [(0, gpu)], {}, sysfs=tmp_path).devices[0].numa_node == node


def test_processors_far_from_a_device() -> None:
    first, second = gpus(2, 18)
    second.cpus = frozenset({500, 501})
    (problem,) = problems(read(first, second))
    assert problem.key == "far_cpus" and "GPU 1 is far from" in problem.what
    assert "taskset -c 500-501" in problem.fix


def test_few_lanes_are_told_and_an_old_generation_is_not() -> None:
    (gpu,) = gpus(1, 0)
    gpu.pcie = {"gen": 1, "gen_max": 5, "width": 16, "width_max": 16}
    assert problems(read(gpu)) == [], "idle devices lower the generation"
    gpu.pcie["width"] = 4
    (problem,) = problems(read(gpu))
    assert problem.what == "GPU 0 uses 4 of 16 PCIe lanes"


def test_no_way_to_each_others_memory() -> None:
    first, second = gpus(2, 0)
    first.peer_to_peer = 3
    assert keys(read(first, second)) == ["no_nvlink", "no_peer_access"]


def test_matrix_as_people_know_it() -> None:
    head, first, *_ = matrix(recorded_topology(8))
    assert head == ["", *(f"GPU{n}" for n in range(8)), "NUMA", "near CPUs"]
    assert first == ["GPU0", "X", *["NV18"] * 7, "0", "0-47"]
    assert matrix(Topology()) == [["", "NUMA", "near CPUs"]]


def test_words() -> None:
    device = recorded_topology(1).devices[0]
    assert nvlink_words(device) == "18 links to switches, 445 GiB/s each way"
    assert nvlink_words(replace(device, nvlinks=0)) == "no link is up"
    assert nvlink_words(replace(device, nvlinks=None)) == "n/a"
    assert (pcie_words(5, 16), pcie_words(None, 8), pcie_words(None, None)) == ("gen5 x16", "gen? x8", "n/a")


def test_the_chosen_devices_keep_their_numbers() -> None:
    reader = NvmlReader(FakeNvml(*gpus(4, 18)))
    topology = reader.topology((3, 1))
    assert [device.index for device in topology.devices] == [3, 1]
    assert [(pair.first, pair.second) for pair in topology.pairs] == [(1, 3)]
    assert NvmlReader(FakeNvml(init_error=9)).topology() == Topology()


def test_it_stands_in_the_state_of_a_run() -> None:
    topology = recorded_topology(2)
    assert fold(RunState(), [TopologySeen(topology=topology)]).topology == topology


@given(st.frozensets(st.integers(0, 300), max_size=60))
def test_ranges_of_processors_say_the_set(cpus: frozenset[int]) -> None:
    assert parse_cpus(cpu_ranges(cpus)) == cpus


def test_processors_that_no_machine_has_are_not_counted() -> None:
    assert parse_cpus(",".join(["0-99999"] * 100_000)) is None
