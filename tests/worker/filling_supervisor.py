"""A supervisor that sees a memory limit which fills up: `RUNDIR FULL_AFTER_SECONDS`.

The reading of the cgroup alone is planted; ranks, samples, forecast and checkpoint are real.
"""

from __future__ import annotations

import sys
import time

from llmtop.profiler import forecast
from llmtop.profiler.hardware import host
from llmtop.profiler.hardware.cgroup import CgroupMemory
from llmtop.trainer.supervise import main

LIMIT_BYTES = 8 << 30


def filling(full_after_seconds: float) -> None:
    began = time.monotonic()

    def read() -> CgroupMemory:
        share = (time.monotonic() - began) / full_after_seconds
        return CgroupMemory(limit_bytes=LIMIT_BYTES, used_bytes=int(LIMIT_BYTES * min(1.0, share)))

    host.cgroup_memory = read  # type: ignore[attr-defined,assignment]
    # Minutes of samples, in seconds.
    forecast.FEWEST_SAMPLES, forecast.SHORTEST_SECONDS = 10, 0.5


if __name__ == "__main__":
    filling(float(sys.argv[2]))
    sys.exit(main(sys.argv[1:2]))
