"""The driver is missing, fails in the middle of a run, loses a GPU, or has it in parts (MIG)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.presets.resolve import Machine
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.ending import memory_words
from llmtop.profiler.hardware import gpuuse, machine, nvml
from llmtop.profiler.hardware.gpuuse import GpusInUse, gpus_in_use
from llmtop.profiler.hardware.links import LinkTotals
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.record.events import HardwareSampled, StepFinished, TopologySeen, XidSeen
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.script.unseen import unseen_spec
from llmtop.tui.cli import main
from tests.fake_nvml import NOT_SUPPORTED, FakeGpu, FakeNvml
from tests.hosts.lab import wait_for
from tests.recorded_spec import recorded_prediction, recorded_spec
from tests.trainer.fakedriver import shut_until, stand_in_for_the_driver
from tests.trainer.supervised import GRACES, TIMEOUT_SECONDS, Supervised, cleaned_up, worker_command

_HARM = """
import pynvml
run = Path(sys.orig_argv[-1])
gpus = [FakeGpu(uuid=f"GPU-{number}") for number in range(2)]

def begin(name, gpu):
    if (run / "harm").exists():
        HARM

class Harmed(FakeNvml):
    def _begin(self, name, gpu):
        begin(name, gpu)
        super()._begin(name, gpu)

FakeNvml = Harmed
"""
"""GPUs to which something happens once there is a file `harm` in the run."""

Start = Callable[[str], Supervised]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("LLMTOP_GRACES", GRACES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMTOP_WORKER_COMMAND", worker_command("trains"))

    def begin(gpus: str) -> Supervised:
        stand_in_for_the_driver(monkeypatch, tmp_path / "driver", gpus)
        supervised = Supervised(tmp_path / "runs")
        spec = recorded_spec("cuda", ranks=2, sample_seconds=0.1)
        supervised.run = RunDir.create(tmp_path / "runs", spec, recorded_prediction(spec), {})
        started.append(supervised)
        supervised.start()
        return supervised

    with cleaned_up() as started:
        yield begin


def newest(run: Supervised) -> HardwareSampled:
    sample = run.events("hardware")[-1]
    assert isinstance(sample, HardwareSampled)
    return sample


def step(run: Supervised) -> int:
    return max(event.step for event in run.events(0) if isinstance(event, StepFinished))


def harm(run: Supervised) -> int:
    """Begin, with samples there; the step then."""
    run.wait_for_step(2)
    run.wait_for(lambda: bool(run.events("hardware")))
    (run.run.path / "harm").touch()
    return step(run)


def end_well(run: Supervised, since: int) -> None:
    run.wait_for_step(since + 5)
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"


def test_no_driver_at_all(start: Start) -> None:
    run = start(
        "gpus = []\nFakeNvml = lambda: __import__('tests.fake_nvml').fake_nvml.FakeNvml(init_error=9)\n"
    )
    run.wait_for_step(2)
    run.wait_for(lambda: bool(run.events("hardware")))
    assert newest(run).devices == () and newest(run).host.memory_total_bytes
    end_well(run, step(run))


def test_every_call_fails_from_some_time_on(start: Start) -> None:
    run = start(_HARM.replace("HARM", "raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)"))
    since = harm(run)
    run.wait_for(lambda: newest(run).devices[0].memory_used_bytes is None)
    assert newest(run).host.memory_total_bytes
    end_well(run, since)


def test_the_binding_breaks_in_a_way_that_nobody_foresaw(start: Start) -> None:
    run = start(_HARM.replace("HARM", "raise RuntimeError('unforeseen')"))
    since = harm(run)
    run.wait_for(lambda: "hardware is no longer sampled" in run.log())
    assert "unforeseen" in run.log()
    end_well(run, since)


def test_the_binding_is_broken_from_the_start(start: Start) -> None:
    run = start("gpus = []\nFakeNvml.nvmlInit = lambda self: 1 / 0\n")
    run.wait_for_step(2)
    assert "hardware is not sampled" in run.log() and "ZeroDivisionError" in run.log()
    end_well(run, step(run))


def test_a_driver_that_hangs_holds_up_neither_the_run_nor_its_stop(start: Start) -> None:
    run = start(_HARM.replace("HARM", "while (run / 'harm').exists(): __import__('time').sleep(0.05)"))
    since = harm(run)
    run.wait_for(lambda: newest(run).driver_silent)
    assert [device.memory_used_bytes for device in newest(run).devices] == [None, None]
    assert newest(run).host.memory_total_bytes, "what needs no driver is read on"
    told = {f.key: f for f in findings(read_state(run.run), run.run.spec(), run.run.prediction())}
    assert told["driver_silent"].severity == "critical"
    (run.run.path / "harm").unlink()
    run.wait_for(lambda: newest(run).devices[0].memory_used_bytes is not None)
    assert not newest(run).driver_silent
    assert run.log().count("driver of the GPUs does not answer") == run.log().count("answers again") == 1
    (run.run.path / "harm").touch()
    run.wait_for(lambda: newest(run).driver_silent)
    end_well(run, since)
    assert memory_words(read_state(run.run)) == "GPU 0, 1 does not tell"


def test_a_driver_that_hangs_when_it_is_opened_holds_up_no_rank(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTOP_GRACES", f"{GRACES},driver=0.2")
    opens = tmp_path / "opens"
    run = start(shut_until(opens, gpus=2))
    run.wait_for_step(2)
    run.wait_for(lambda: bool(run.events("hardware")))
    assert newest(run).driver_silent and newest(run).devices == ()
    assert newest(run).host.memory_total_bytes
    opens.touch()
    run.wait_for(lambda: len(newest(run).devices) == 2 and not newest(run).driver_silent)
    run.wait_for(lambda: bool(run.of(TopologySeen)))
    assert "driver of the GPUs does not answer" in run.log() and "answers again" in run.log()
    end_well(run, step(run))
    assert memory_words(read_state(run.run)) == "GPU 0, 1 does not tell", "nobody saw them without the ranks"


def test_who_reads_the_gpus_once_is_told_that_the_driver_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()

    class Shut(FakeNvml):
        def nvmlInit(self) -> None:
            opened.wait()

    monkeypatch.setattr(nvml, "OPEN_SECONDS", 0.1)
    try:
        reader = NvmlReader(Shut(FakeGpu()))
        assert reader.devices == () and "does not answer" in (reader.problem or "")
        assert reader.sample() == () and reader.holders(0) is None and reader.link_totals(0) == LinkTotals()
        reader.close()
        here = detect_machine(Shut(FakeGpu()))
        assert here.driver_silent and not unseen_spec(("x",), Path("/"), here).on_cpu
        # Who asks later is told at once, and no thread more waits for the driver.
        monkeypatch.setattr(nvml, "OPEN_SECONDS", 3600.0)
        # Those of other tests may end meanwhile.
        threads = set(threading.enumerate())
        for _ in range(3):
            assert "does not answer within 3600 s" in gpus_in_use(Shut(FakeGpu())).problem
        assert set(threading.enumerate()) <= threads
    finally:
        opened.set()
    # The one that hung holds the library until it is answered.
    assert NvmlReader(FakeNvml(FakeGpu()), waits=True).problem is None
    wait_for(lambda: not NvmlReader(FakeNvml(FakeGpu())).is_silent)


def test_a_driver_that_hangs_while_it_is_read_is_asked_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    is_read, goes_on = threading.Event(), threading.Event()

    class Stuck(FakeNvml):
        def _begin(self, name: str, gpu: FakeGpu) -> None:
            if name == "nvmlDeviceGetUtilizationRates":
                is_read.set()
                goes_on.wait()
            super()._begin(name, gpu)

    silent = "the driver of the GPUs does not answer"
    monkeypatch.setattr(gpuuse, "OPEN_SECONDS", 0.1)
    try:
        # The first is at the reading, the second at the opening of a library that is taken.
        assert gpus_in_use(Stuck(FakeGpu())) == GpusInUse(problem=silent, is_silent=True)
        assert is_read.wait(TIMEOUT_SECONDS)
        monkeypatch.setattr(nvml, "OPEN_SECONDS", 0.1)
        assert "NVML: " in gpus_in_use(Stuck(FakeGpu())).problem
        threads = set(threading.enumerate())
        for _ in range(3):
            found = gpus_in_use(Stuck(FakeGpu()))
            assert "NVML: " in found.problem and found.is_silent
        assert set(threading.enumerate()) <= threads
    finally:
        goes_on.set()
    wait_for(lambda: not gpus_in_use(FakeNvml(FakeGpu())).problem)


def test_a_plan_takes_no_machine_whose_driver_hangs_for_one_without_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = Machine(gpu="cpu", gpus=1, host_memory_bytes=1 << 34, driver_silent=True)
    monkeypatch.setattr(machine, "detect_machine", lambda: silent)
    assert main(["plan", "full-zero2", "--model", "tiny-llama-cpu"]) == ExitCode.USAGE
    assert "does not answer" in capsys.readouterr().err
    assert main(["plan", "full-zero2", "--model", "tiny-llama-cpu", "--gpu", "h200"]) == ExitCode.DONE


def test_a_gpu_that_falls_off_the_bus_is_told_while_the_run_goes_on(start: Start) -> None:
    run = start(
        _HARM.replace("HARM", "gpus[1].lost or (gpus[1].xids.append(79), setattr(gpus[1], 'lost', True))")
    )
    since = harm(run)
    run.wait_for(lambda: bool(run.of(XidSeen)))
    run.wait_for(lambda: newest(run).devices[1].is_lost)
    assert newest(run).devices[0].memory_used_bytes is not None
    told = {f.key: f for f in findings(read_state(run.run), run.run.spec(), run.run.prediction())}
    assert told["gpu_lost"].severity == told["xid"].severity == "critical"
    assert "79" in told["xid"].title
    end_well(run, since)


def test_a_gpu_in_parts_tells_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MIG the driver refuses figures of the whole device, and CUDA names a part of it."""
    gpu = FakeGpu(uuid="GPU-cccc-3")
    for call in (
        *("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses"),
        *("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetNvLinkState"),
    ):
        gpu.broken[call] = NOT_SUPPORTED
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-cccc-3/1/0")
    reader = NvmlReader(FakeNvml(gpu))
    assert reader.visible_indices() == (0,)
    (sample,) = reader.sample(own_pids=frozenset())
    assert not sample.is_lost and sample.memory_used_bytes is None and sample.utilization_percent is None
    assert sample.power_watts == 612.0 and sample.temperature_celsius == 58.0
    assert reader.holders(0) is None
