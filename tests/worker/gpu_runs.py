"""A run on the GPU of this machine, in fresh processes without their imports."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.admission import Gate, Room
from benchmarks.cells import Planned, Runner, plan
from benchmarks.forkserver import ForkServer
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.record.rundir import RunDir

_SECONDS = 180.0
"""The first run may have to build DeepSpeed's ops, which is not counted."""


def carried_out(server: ForkServer, root: Path, **options: Any) -> tuple[Planned, RunDir]:
    machine = detect_machine()
    planned = plan(options, machine, name="gpu-test")
    gate = Gate(Room(device_bytes=None, host_bytes=None))
    with closing(Runner(root, machine, gate, server)) as runner:
        return planned, runner.forked(planned, _SECONDS).run
