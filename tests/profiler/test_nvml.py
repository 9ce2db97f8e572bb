"""GPU readings: everything the driver tells, None for what it does not, and never an exception."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.resolve import Layer, resolve
from llmtop.presets.spec import ValueSource
from llmtop.profiler.hardware.links import ALL_LINKS
from llmtop.profiler.hardware.machine import detect_machine, preset_name
from llmtop.profiler.hardware.nvml import NvmlReader, visible_device_indices
from tests.fake_nvml import GIB, FakeGpu, FakeNvml, process
from tests.recorded import ManualClock


def reader(*gpus: FakeGpu) -> tuple[NvmlReader, FakeNvml, ManualClock]:
    time, nvml = ManualClock(), FakeNvml(*gpus)
    return NvmlReader(nvml, clock=lambda: time.now), nvml, time


def test_every_reading_of_a_healthy_gpu() -> None:
    gpu = FakeGpu()
    gpu.throttle_bits = 0x1 | 0x4 | 0x40
    gpu.processes = [process(11, 3 * GIB), process(12, 2 * GIB), process(99, GIB)]
    nvml, _, _ = reader(gpu)
    (sample,) = nvml.sample(own_pids={11, 12, 13})
    assert sample.name == "NVIDIA H200"
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (10 * GIB, 140 * GIB)
    assert (sample.power_watts, sample.power_limit_watts) == (612.0, 700.0)
    assert (sample.utilization_percent, sample.temperature_celsius) == (87.0, 58.0)
    assert (sample.sm_clock_hz, sample.memory_clock_hz) == (1980e6, 3201e6)
    assert sample.throttle_reasons == ("power cap", "hardware thermal slowdown")
    assert (sample.process_count, sample.own_memory_bytes) == (3, 5 * GIB)


def test_an_idle_gpu_is_not_throttled() -> None:
    gpu = FakeGpu()
    gpu.throttle_bits = 0x1
    assert reader(gpu)[0].sample()[0].throttle_reasons == ()


def test_links_are_rates_over_all_links_in_bytes() -> None:
    gpu = FakeGpu()
    nvml, fake, time = reader(gpu)
    (first,) = nvml.sample()
    assert first.nvlink_tx_bytes_per_second is None and first.pcie_rx_bytes_per_second is None
    assert fake.requested[:2] == [[(138, ALL_LINKS), (139, ALL_LINKS)], [(197, 0), (198, 0)]]
    gpu.fields = {138: 2000, 139: 1000, 197: 500, 198: 300}
    time.advance(2.0)
    (second,) = nvml.sample()
    assert second.nvlink_tx_bytes_per_second == 1000 * 1024
    assert second.nvlink_rx_bytes_per_second == 500 * 1024
    assert (second.pcie_tx_bytes_per_second, second.pcie_rx_bytes_per_second) == (250.0, 150.0)


def test_a_counter_that_wraps_gives_one_unknown_rate() -> None:
    gpu = FakeGpu()
    nvml, _, time = reader(gpu)
    rates: list[float | None] = []
    for total in (100, 300, 50, 250):
        gpu.fields[197] = total
        rates.append(nvml.sample()[0].pcie_tx_bytes_per_second)
        time.advance(1.0)
    assert rates == [None, 200.0, None, 200.0]


def test_links_that_do_not_exist_are_asked_for_once() -> None:
    gpu = FakeGpu()
    gpu.fields = {197: 0, 198: 0}
    nvml, fake, time = reader(gpu)
    nvml.sample()
    time.advance(1.0)
    (sample,) = nvml.sample()
    assert fake.requested[2:] == [[(197, 0), (198, 0)]]
    assert sample.nvlink_tx_bytes_per_second is None
    assert sample.pcie_tx_bytes_per_second == 0.0


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
        ("nvmlDeviceGetUtilizationRates", "utilization_percent"),
        ("nvmlDeviceGetPowerUsage", "power_watts"),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_watts"),
        ("nvmlDeviceGetTemperature", "temperature_celsius"),
        ("nvmlDeviceGetClockInfo", "sm_clock_hz"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "throttle_reasons"),
        ("nvmlDeviceGetComputeRunningProcesses", "process_count"),
        ("nvmlDeviceGetName", "name"),
    ],
)
@pytest.mark.parametrize("missing", [True, False])
def test_one_reading_that_fails_leaves_the_others(
    function: str, field: str, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    if missing:
        monkeypatch.delitem(sys.modules["tests.fake_nvml"]._ANSWERS, function)
    else:
        gpu.broken[function] = 3
    nvml, _, _ = reader(gpu)
    (sample,) = nvml.sample(own_pids=())
    assert getattr(sample, field) is None
    known = ("memory_used_bytes", "utilization_percent", "power_watts", "temperature_celsius")
    assert all(getattr(sample, other) is not None for other in known if other != field)


def test_the_older_name_of_the_throttle_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = sys.modules["tests.fake_nvml"]._ANSWERS
    monkeypatch.delitem(answers, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setitem(answers, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda gpu: 0x8)
    assert reader(FakeGpu())[0].sample()[0].throttle_reasons == ("hardware slowdown",)


def test_a_gpu_that_falls_off_the_bus_stays_in_the_list_without_readings() -> None:
    lost, well = FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")
    nvml, _, time = reader(lost, well)
    nvml.sample()
    lost.lost = True
    time.advance(1.0)
    first, second = nvml.sample(own_pids=())
    assert (first.index, first.name, first.memory_total_bytes) == (0, "NVIDIA H200", 140 * GIB)
    assert first.memory_used_bytes is None and first.nvlink_tx_bytes_per_second is None
    assert first.throttle_reasons is None and first.process_count is None
    assert second.memory_used_bytes == 10 * GIB and second.nvlink_tx_bytes_per_second == 0.0


def test_memory_of_processes_that_the_driver_does_not_tell() -> None:
    gpu = FakeGpu()
    gpu.processes = [process(11, None)]
    assert reader(gpu)[0].sample(own_pids={11})[0].own_memory_bytes is None
    # In a container NVML may number processes as the host does: ours are not among them.
    gpu.processes = [process(70011, GIB)]
    (sample,) = reader(gpu)[0].sample(own_pids={11})
    assert (sample.process_count, sample.own_memory_bytes) == (1, None)
    (unlisted,) = reader(gpu)[0].sample()
    assert unlisted.process_count is None


def test_chosen_devices_come_in_the_order_asked_for() -> None:
    nvml, _, _ = reader(*(FakeGpu(uuid=f"GPU-{n}") for n in range(4)))
    assert [sample.index for sample in nvml.sample((3, 1, 9))] == [3, 1]


def test_no_driver_and_no_binding_are_reasons_and_not_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = NvmlReader(FakeNvml(FakeGpu(), init_error=9))
    assert nvml.sample() == () and nvml.devices == ()
    assert nvml.problem == "NVML: Driver Not Loaded"
    nvml.close()

    real_import = builtins.__import__
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "pynvml":
            raise ModuleNotFoundError("No module named 'pynvml'")
        return real_import(name, *rest, **named)

    monkeypatch.setattr("llmtop.profiler.hardware.nvml.import_module", lambda name: without(name))
    absent = NvmlReader()
    assert absent.sample() == ()
    assert absent.problem is not None and "nvidia-ml-py" in absent.problem


def test_names_given_as_bytes_are_text() -> None:
    gpu = FakeGpu()
    gpu.name = b"Tesla T4"
    assert reader(gpu)[0].devices[0].name == "Tesla T4"


UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", None]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("", ()),
        ("-1", ()),
        ("0,1", (0, 1)),
        ("2, 0", (2, 0)),
        ("1,9,0", (1,)),
        ("1,-1,0", (1,)),
        ("1,1", (1,)),
        ("GPU-cccc-3,GPU-aab", (2, 1)),
        ("GPU-aa", ()),
        ("GPU-zzzz", ()),
        ("MIG-GPU-cccc-3/1/0", (2,)),
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices_as_cuda_counts_them(visible: str, indices: tuple[int, ...]) -> None:
    assert visible_device_indices(UUIDS, visible) == indices


def test_visible_devices_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml, _, _ = reader(FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b"))
    assert nvml.visible_indices() == (0, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert nvml.visible_indices() == (1,)


@pytest.mark.parametrize(
    ("nvml_name", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA B200", "b200"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        # No preset: the device's own name, so that a preset of a user's can have it.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop-gpu"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        # The presets of the same memory are of SXM modules, which have NVLink.
        ("A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("Tesla V100-PCIE-32GB", "v100-pcie-32gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-generation"),
    ],
)
def test_preset_of_an_nvml_name(nvml_name: str, preset: str) -> None:
    assert preset_name(nvml_name) == preset


def test_a_pcie_card_has_its_measured_memory_and_no_nvlink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    machine = detect_machine(FakeNvml(FakeGpu(name="NVIDIA A100-PCIE-40GB", total=40 * GIB)))
    layer = Layer(ValueSource.COMMAND_LINE, "", {"model": "gpt2"})
    gpu = resolve([layer], name="test", machine=machine).gpu
    assert (gpu.name, gpu.memory_bytes) == ("a100-pcie-40gb", 40 * GIB)
    assert gpu.nvlink_bytes_per_second is None
    own = tmp_path / "llmtop" / "presets" / "gpus" / "a100-pcie-40gb.toml"
    own.parent.mkdir(parents=True)
    own.write_text('description = "mine"\nmemory_bytes = 42949672960\npcie_bytes_per_second = 31.5e9\n')
    assert resolve([layer], name="test", machine=machine).gpu.pcie_bytes_per_second == 31.5e9


def test_the_machine_counts_visible_gpus_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    others = [FakeGpu(uuid=f"GPU-{n}") for n in range(3)]
    display = FakeGpu(name="NVIDIA T400", uuid="GPU-t", total=2 * GIB)
    machine = detect_machine(FakeNvml(*others, display))
    assert (machine.gpu, machine.gpus) == ("h200", 3)
    assert (machine.gpu_memory_bytes, machine.compute_capability) == (140 * GIB, "9.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert detect_machine(FakeNvml(*others, display)).gpu == "t400"


def test_a_machine_without_gpus_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = detect_machine(FakeNvml(init_error=9))
    assert (machine.gpu, machine.gpus) == ("cpu", 1)
    assert machine.host_memory_bytes is not None and machine.host_memory_bytes > 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_machine(FakeNvml(FakeGpu())).gpu == "cpu"
