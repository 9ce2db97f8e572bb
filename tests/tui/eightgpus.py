"""A run on eight GPUs, of which one waits more, one is hot and held down, and one has somebody else on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from llmtop.profiler.record.deviceevents import DeviceSample
from llmtop.profiler.record.rundir import RunDir
from tests.recorded import BEGAN
from tests.recorded_spec import GIB, recorded_prediction, recorded_spec
from tests.tui.pictured import FineRecorder

GPUS, SLOW, HOT, FULL = 8, 5, 3, 0
STEPS = 20


class EightRecorder(FineRecorder):
    def _device(self, index: int, used: int) -> DeviceSample:
        device = super()._device(index, used)
        changed: dict[int, dict[str, Any]] = {
            SLOW: {"sm_active_percent": 61.0},
            HOT: {"temperature_celsius": 86.0, "throttle_reasons": ("hw_thermal_slowdown",)},
            FULL: {"memory_used_bytes": (device.memory_used_bytes or 0) + 9 * GIB},
        }
        return replace(device, **changed.get(index, {}))


def run_on_eight(root: Path) -> RunDir:
    """An 8B model under ZeRO-3, whose links are sampled finely."""
    spec = recorded_spec("cuda", ranks=GPUS, steps=STEPS, zero=3)
    run = RunDir.create(root, spec, recorded_prediction(spec), {"zero_optimization": {"stage": 3}})
    recorder = EightRecorder(run, spec, BEGAN)
    recorder.start()
    for step in range(1, STEPS + 1):
        recorder.fine = 24 if step > STEPS - 8 else 0
        recorder.step(step)
    recorder.end("completed", STEPS)
    recorder.close()
    return run
