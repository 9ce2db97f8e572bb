"""`doctor` on machines with GPUs: the matrix, what is wrong with links and memory, what readings cost."""

from __future__ import annotations

import os

import pytest

from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.tui.doctor import gpus
from llmtop.tui.doctor.check import Check
from llmtop.tui.doctor.gpus import GpuLook, look_at_gpus, matrix_lines
from tests.cli.conftest import Llmtop
from tests.fake_nvml import NOT_SUPPORTED, FakeGpu, FakeNvml
from tests.recorded import ManualClock

ACTIVE = {2: 1.0, 3: 1.0, 5: 0.0, 10: 0.5, 12: 0.0, 13: 0.0, 20: 0.0, 21: 0.0, 60: 0.0, 61: 0.0}


def h200(number: int) -> FakeGpu:
    gpu = FakeGpu(uuid=f"GPU-{number}")
    gpu.links, gpu.gpm, gpu.ecc, gpu.energy_mj = [1] * 18, dict(ACTIVE), {0: 0, 1: 0}, 1
    gpu.cpus = frozenset(os.sched_getaffinity(0))
    return gpu


def look(*devices: FakeGpu, seconds: dict[str, float] | None = None) -> GpuLook:
    time, fake = ManualClock(), FakeNvml(*devices)
    fake.spend = lambda name: time.advance((seconds or {}).get(name, 1e-5))
    found = look_at_gpus(NvmlReader(fake, clock=lambda: time.now), pause=time.advance)
    assert fake.open_handles == [] and fake.calls[-1] == "nvmlShutdown"
    return found


def checks(found: GpuLook) -> dict[str, Check]:
    return {check.name: check for check in found.checks}


def test_two_sound_devices() -> None:
    found = look(h200(0), h200(1), seconds={"nvmlDeviceGetTotalEnergyConsumption": 3.5e-3})
    told = checks(found)
    assert {check.status for check in found.checks} == {"ok"}
    assert told["gpu links"].found == "NVLink 18 links to switches; PCIe gen5 x16"
    assert told["gpu activity"].found == "SM, tensor and DRAM activity by GPM"
    assert "nvmlDeviceGetTotalEnergyConsumption 3.50 ms" in told["gpu readings"].found
    assert [row.call for row in found.call_costs[:2]] == ["nvmlDeviceGetTotalEnergyConsumption"] * 2
    rows = list(matrix_lines(found.topology))
    assert rows[0].split() == ["GPU0", "GPU1", "NUMA", "near", "CPUs"]
    assert rows[1].split()[:3] == ["GPU0", "X", "NV18"] and rows[-1] == "NV#: that many NVLinks"


def test_what_would_slow_or_break_training() -> None:
    first, second = h200(0), h200(1)
    first.links = second.links = []
    first.ecc, second.remapped = {0: 0, 1: 4}, (0, 1, 1, 0)
    first.gpm, second.broken = None, {"nvmlDeviceRegisterEvents": NOT_SUPPORTED}
    found = look(first, second)
    words = " | ".join(f"{check.status} {check.found}" for check in found.checks)
    for part in (
        "warn GPU 0 and 1: no NVLink",
        "warn GPU 0 had 4 memory errors",
        "warn GPU 1 waits for a reset",
        "optional GPU 0 gives no GPM",
        "optional the driver does not tell Xid errors of GPU 1",
    ):
        assert part in words
    assert all(check.mend for check in found.checks if check.status != "ok")
    assert list(matrix_lines(found.topology))[-1] == "SYS: the link between processors"


def test_a_machine_without_gpus_has_no_such_checks() -> None:
    assert look_at_gpus(NvmlReader(FakeNvml(init_error=9))) == GpuLook()


def test_doctor_prints_and_gives_them(llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(h200(0), h200(1))
    monkeypatch.setattr(gpus, "look_at_gpus", lambda: found)
    answer = llmtop("doctor", "--json").json()
    assert answer["topology"]["pairs"][0]["road"] == "NV18"
    assert {row["device"] for row in answer["nvml_calls"]} == {0, 1}
    assert all(isinstance(row["is_slow"], bool) for row in answer["nvml_calls"])
    text = llmtop("doctor").out
    assert "gpu links" in text and "GPU0  X     NV18" in text
