"""Measures the folders of an NVMe offload before the ranks start, and says what a step will take of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmtop.presets.errors import LlmtopError
from llmtop.presets.paths import expand_user
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.nvme import nvme_traffic, traffic_seconds, uses_nvme
from llmtop.profiler.hardware.disk import TRIAL_BYTES, DiskSpeed, file_system, free_bytes, measure
from llmtop.profiler.record.events import NvmeMeasured
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.dsconfig import nvme_folders

_LEAST_ROOM_BYTES = 2 * TRIAL_BYTES
"""A disk that is nearly full is not tried."""


def report_nvme(
    run: RunDir, spec: RunSpec, write: Callable[[NvmeMeasured], object], log: Callable[[str], None]
) -> None:
    """Measure the run's folders, where it has some: the slowest counts. A trial that fails stops nothing."""
    if not uses_nvme(spec):
        return
    measured = []
    for folder in nvme_folders(run.deepspeed_config()):
        try:
            measured.append(measure_nvme(folder, spec, run.prediction().nvme_bytes))
        except (OSError, LlmtopError) as error:
            log(f"the speed of {folder} is not known: {error}")
    if measured:
        # How much of a step goes to which of two is not known: all of it at the slowest is the most.
        write(max(measured, key=lambda event: event.step_seconds or 0.0))


def measure_nvme(folder: str, spec: RunSpec, needed_bytes: int) -> NvmeMeasured:
    """A few seconds of direct reading and writing. Raises OSError where the folder cannot be written."""
    path = Path(expand_user(folder))
    room = free_bytes(path)
    system = file_system(path)
    speed = DiskSpeed(write_bytes_per_second=None, read_bytes_per_second=None, direct=False)
    if room is None or room >= _LEAST_ROOM_BYTES:
        speed = measure(path)
    traffic = nvme_traffic(spec)
    return NvmeMeasured(
        path=str(path),
        file_system=system.kind if system else None,
        free_bytes=room,
        needed_bytes=needed_bytes,
        direct=speed.direct,
        read_bytes_per_second=speed.read_bytes_per_second,
        write_bytes_per_second=speed.write_bytes_per_second,
        step_read_bytes=traffic.read_bytes,
        step_write_bytes=traffic.write_bytes,
        step_seconds=traffic_seconds(traffic, speed.read_bytes_per_second, speed.write_bytes_per_second),
    )
