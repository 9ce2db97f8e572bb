"""The GPUs of this machine over the plan: who uses which, choosing some, and launching on them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec
from llmtop.profiler.hardware.gpuuse import GpuProcess, GpusInUse, GpuUse
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.screens import plan
from llmtop.tui.screens.plan import PlanScreen
from llmtop.tui.widgets import gpupicker
from llmtop.tui.widgets.gpupicker import GpuPicker, is_free
from llmtop.tui.widgets.placebars import gpu_bars
from tests.recorded_spec import GIB, recorded_prediction, recorded_spec
from tests.tui.planapp import cursor_to
from tests.tui.tuiruns import MACHINE, wait_for, wait_for_text, without_notes

SMALL = (80, 24)
TOTAL = 150_754_820_096
HERE = Machine(gpu="h200", gpus=4, host_memory_bytes=1008 * GIB, gpu_memory_bytes=TOTAL)
ADA = GpuProcess(pid=4242, user="ada", command="python train.py", memory_bytes=60 * GIB)


def gpu(index: int, *processes: GpuProcess, used: int = GIB // 2, preset: str = "h200") -> GpuUse:
    return GpuUse(
        index=index,
        uuid=f"GPU-{index}",
        preset=preset,
        name=f"NVIDIA {preset.upper()}",
        memory_used_bytes=used,
        memory_total_bytes=TOTAL,
        utilization_percent=97.0 if processes else 0.0,
        processes=processes,
    )


FOUR = GpusInUse(gpus=(gpu(0, ADA, used=61 * GIB), gpu(1), gpu(2, ADA, used=61 * GIB), gpu(3)))


class Bench:
    """The plan on a machine with these GPUs; notes what is launched."""

    def __init__(self, root: Path, in_use: GpusInUse = FOUR, machine: Machine = HERE) -> None:
        self.in_use = in_use
        self.launched: list[tuple[RunSpec, str]] = []
        deeds = Deeds(detect=lambda: machine, gpus=lambda: self.in_use, launch=self.launch)
        self.app = LlmtopApp("plan", root=root, recipe="test-8b", deeds=deeds)

    def launch(self, spec: RunSpec, prediction: Prediction, root: Path, visible: str) -> RunDir:
        self.launched.append((spec, visible))
        return RunDir.create(root, spec, prediction, {})


async def test_shows_who_uses_which_and_launches_on_the_chosen_ones(root: Path) -> None:
    bench = Bench(root)
    async with bench.app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits", "each")
        await pilot.press("d")
        shown = await wait_for_text(pilot, "GPU3", "ada", "60.0 GiB", "python train.py (4242)")
        assert "61.0/140 GiB  busy 97%" in shown and "nobody uses it" in shown
        await pilot.press("enter")
        await wait_for(pilot, lambda: not isinstance(bench.app.screen, PlanScreen))
        await pilot.press("a")
        await wait_for_text(pilot, "2 chosen", "✓ GPU1", "✓ GPU3")
        await pilot.press("enter")
        await wait_for_text(pilot, "2 x h200: GPU1, GPU3")
        await pilot.press("L")
        await wait_for_text(pilot, "CUDA_VISIBLE_DEVICES=GPU-1,GPU-3 llmtop run test-8b")
        await pilot.press("enter")
        await wait_for(pilot, lambda: bool(bench.launched))
    (spec, visible), *_ = bench.launched
    assert visible == "GPU-1,GPU-3" and spec.options.gpus == 2


async def test_a_driver_that_hangs_is_asked_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpupicker, "EVERY_SECONDS", 0.01)
    answers, asked, begun = threading.Event(), 0, 0

    def read() -> GpusInUse:
        nonlocal asked
        asked += 1
        if begun:
            answers.wait()
        return FOUR

    class Ticking(GpuPicker):
        ticks = 0

        def _look(self) -> None:
            self.ticks += 1
            super()._look()

    monkeypatch.setattr(plan, "GpuPicker", Ticking)
    deeds = Deeds(detect=lambda: HERE, gpus=read)
    app = LlmtopApp("plan", root=root, recipe="test-8b", deeds=deeds)
    async with app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits", "each")
        begun = asked
        await pilot.press("d")
        await wait_for(pilot, lambda: isinstance(app.screen, Ticking) and app.screen.ticks > 3)
        assert asked == begun + 1
        answers.set()
        await wait_for_text(pilot, "GPU3")
        await wait_for(pilot, lambda: asked > begun + 1)


async def test_another_number_of_gpus_takes_the_choice_back(root: Path) -> None:
    bench = Bench(root)
    async with bench.app.run_test(size=(120, 30)) as pilot:
        await wait_for_text(pilot, "✓ fits", "each")
        await pilot.press("d")
        await wait_for_text(pilot, "GPU3")
        await pilot.press("down", "space", "down", "down", "space", "enter")
        await wait_for_text(pilot, "2 x h200: GPU1, GPU3")
        cursor_to(bench.app, "gpus")
        await pilot.press("right")
        shown = await wait_for_text(pilot, "4 x h200", "1 edited")
        assert "GPU1, GPU3" not in shown
        # All four are those that CUDA shows: two of them are in use.
        await wait_for_text(pilot, "61.0 GiB in use")


async def test_a_busy_gpu_is_told_not_to_have_the_room(root: Path) -> None:
    bench = Bench(root, GpusInUse(gpus=(gpu(0, ADA, used=120 * GIB), gpu(1))))
    async with bench.app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✗ no room on GPU0", "GPU0    ✗", "each    ✓")
        await pilot.press("L")
        shown = await wait_for_text(pilot, "Launch this run?", "note GPU0 has 120 GiB in use by others")
        assert "needs up to" in shown


async def test_a_host_without_the_memory_is_told_not_to_have_the_room(root: Path) -> None:
    bench = Bench(root, machine=replace(HERE, host_memory_bytes=GIB))
    async with bench.app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✗ host memory is short", "host    ✗")
        await pilot.press("L")
        await wait_for_text(
            pilot, "This run is not predicted to fit", "of host memory, and there is 1.00 GiB"
        )
        await pilot.press("enter")
        assert bench.launched == []
        await pilot.press("y")
        await wait_for(pilot, lambda: len(bench.launched) == 1, "the launch")


async def test_readings_change_while_it_is_open_and_kinds_are_not_mixed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtop.tui.widgets.gpupicker.EVERY_SECONDS", 0.05)
    bench = Bench(root, GpusInUse(gpus=(gpu(0), gpu(1, preset="a100-80gb"))))
    async with bench.app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("d")
        await wait_for_text(pilot, "A100")
        await pilot.press("space", "down", "space")
        await wait_for_text(pilot, "2 chosen")
        await pilot.press("enter")
        await wait_for_text(pilot, "of several kinds")
        bench.in_use = GpusInUse(gpus=(gpu(0, ADA, used=61 * GIB), gpu(1, preset="a100-80gb")))
        await wait_for_text(pilot, "ada", "busy 97%")
        await without_notes(pilot)
        await pilot.press("escape")
        await wait_for(pilot, lambda: isinstance(bench.app.screen, PlanScreen))


async def test_without_a_gpu_it_says_why(root: Path) -> None:
    bench = Bench(root, GpusInUse(problem="NVML: Driver Not Loaded"), MACHINE)
    async with bench.app.run_test(size=SMALL, notifications=True) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("d")
        await wait_for_text(pilot, "n/a: no GPU here (NVML: Driver Not Loaded)")
        await pilot.press("space", "a", "enter")
        await wait_for_text(pilot, "None is chosen")
        bench.in_use = GpusInUse(problem="NVML: it hangs", is_silent=True)
        await wait_for_text(pilot, "n/a: no GPU answers (NVML: it hangs)")


def test_what_is_free() -> None:
    assert is_free(gpu(0)) and not is_free(gpu(0, ADA)) and not is_free(gpu(0, used=20 * GIB))
    assert is_free(replace(gpu(0), processes=None)) and is_free(replace(gpu(0), memory_used_bytes=None))
    assert not is_free(replace(gpu(0), processes=None, memory_used_bytes=None))


@pytest.mark.parametrize("width", [20, 35, 80, 120])
def test_many_busy_gpus_share_a_few_rows(width: int) -> None:
    spec = recorded_spec("cuda")
    gpus = [gpu(index, ADA, used=61 * GIB) for index in range(8)]
    rows = gpu_bars(recorded_prediction(spec), gpus, width)
    assert len(rows) == 5 and "4 GPUs more" in rows[-1].plain
    assert all(row.cell_length <= max(width, 45) for row in rows)


async def test_what_a_model_needs_to_be_loaded(root: Path) -> None:
    bench = Bench(root)
    async with bench.app.run_test(size=SMALL) as pilot:
        await wait_for_text(pilot, "✓ fits")
        await pilot.press("v")
        shown = await wait_for_text(
            pilot, "llmtop  load  ", "8,192 tokens kept for 1 request", "✓ bf16", "smallest GPU"
        )
        await pilot.press("right", "up", "up")
        longer = await wait_for_text(pilot, "16,384 tokens kept for 4 requests")
        assert longer != shown
        await pilot.press("h", "h", "j", "j")
        await wait_for_text(pilot, "4,096 tokens kept for 1 request")
        await pilot.press("escape")
        await wait_for(pilot, lambda: isinstance(bench.app.screen, PlanScreen))
