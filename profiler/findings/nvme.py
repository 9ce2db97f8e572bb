"""What the speed of the NVMe folder means for a step."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from llmtop.profiler.findings.finding import STEADY_STEPS, Finding, Rule, Seen
from llmtop.profiler.fold.rankstate import WARMUP_STEPS
from llmtop.profiler.fold.series import steady_steps
from llmtop.profiler.units import format_bytes, format_rate, format_seconds

BOUND_SHARE = 0.5
"""Of a step, that reading and writing alone would take."""


def nvme_bound(seen: Seen) -> Iterator[Finding]:
    measured = seen.state.nvme
    steps = [seconds for seconds, _ in steady_steps(seen.state.speed_series, WARMUP_STEPS)]
    if measured is None or measured.step_seconds is None or len(steps) < STEADY_STEPS:
        return
    usual = median(steps)
    if measured.step_seconds < BOUND_SHARE * usual:
        return
    read, write = measured.read_bytes_per_second, measured.write_bytes_per_second
    yield Finding(
        key="nvme_bound",
        severity="warning",
        title="the step waits for the NVMe drive",
        evidence=f"reading {format_bytes(measured.step_read_bytes)} at {format_rate(read)} and writing"
        f" {format_bytes(measured.step_write_bytes)} at {format_rate(write)} take"
        f" {format_seconds(measured.step_seconds)} of a step of {format_seconds(usual)}",
        change="offload to cpu if the memory is there, give a faster drive, or accumulate more micro-batches"
        " for each step (--grad-accum)",
    )


NVME_RULES: tuple[Rule, ...] = (nvme_bound,)
