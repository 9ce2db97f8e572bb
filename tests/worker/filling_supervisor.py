"""A supervisor that sees a memory limit which fills up: `RUNDIR FULL_AFTER_SECONDS`.

The reading of the cgroup alone is planted; ranks, samples, forecast and checkpoint are real.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from llmtop.profiler import forecast
from llmtop.profiler.hardware import host
from llmtop.profiler.hardware.cgroup import CgroupMemory
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.supervise import main

LIMIT_BYTES = 8 << 30


def filling(log: Path, full_after_seconds: float) -> None:
    """From a rank's first step on, however long its start takes."""
    began: list[float] = []

    def read() -> CgroupMemory:
        if not began and log.exists() and b"step_finished" in log.read_bytes():
            began.append(time.monotonic())
        share = (time.monotonic() - began[0]) / full_after_seconds if began else 0.0
        return CgroupMemory(limit_bytes=LIMIT_BYTES, used_bytes=int(LIMIT_BYTES * min(1.0, share)))

    host.cgroup_memory = read  # type: ignore[attr-defined,assignment]
    # Minutes of samples, in seconds.
    forecast.FEWEST_SAMPLES, forecast.SHORTEST_SECONDS = 10, 0.5


if __name__ == "__main__":
    filling(RunDir(Path(sys.argv[1])).events_path(0), float(sys.argv[2]))
    sys.exit(main(sys.argv[1:2]))
