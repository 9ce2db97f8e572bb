"""Whether this machine has the host memory that a run would take: where offload keeps what a GPU cannot."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec
from llmtop.profiler.hardware.hostmemory import host_memory_bytes
from llmtop.profiler.memory.result import Prediction


def host_limit(spec: RunSpec) -> int | None:
    """What a run can use of this machine's memory; None for one that would be on another, or on several.

    None also of a run on the CPU, whose verdict is about that memory already.
    """
    from llmtop.profiler.hardware.machine import detect_machine  # asks the driver

    is_here = not spec.on_cpu and spec.options.nodes == 1 and detect_machine().gpu == spec.gpu.name
    return host_memory_bytes() if is_here else None


def limit_if_short(spec: RunSpec, prediction: Prediction) -> int | None:
    """As `host_limit`; None as well where the run and all that is suggested for it stay within this machine's
    memory: then the driver is not asked which GPUs are here."""
    limit = host_memory_bytes()
    most = max((prediction.host_bytes, *(one.host_bytes or 0 for one in prediction.suggestions)))
    return host_limit(spec) if limit is not None and most > limit else None
