"""Bounds of what a run asks of its host: samples of the hardware, threads, patience."""

from __future__ import annotations

from llmtop.presets.rule import Rule

LEAST_SAMPLE_SECONDS = 0.01
MOST_SAMPLE_SECONDS = 600.0
MOST_THREADS = 1024
LEAST_HANG_SECONDS = 5.0

HOST_RULES: tuple[Rule, ...] = (
    Rule(
        name="samples faster than readings",
        refuses=lambda spec: spec.options.sample_seconds < LEAST_SAMPLE_SECONDS,
        what="sample_seconds = {o.sample_seconds:g}",
        why="a sample of the devices and the host takes some milliseconds: a core would do nothing else",
        fix="--sample-seconds {least:g} or more",
        source="profiler/hardware/costs.py: a reading up to 1 ms runs in every sample, and there are several",
        words=lambda _: {"least": LEAST_SAMPLE_SECONDS},
    ),
    Rule(
        name="samples too far apart",
        refuses=lambda spec: spec.options.sample_seconds > MOST_SAMPLE_SECONDS,
        what="sample_seconds = {o.sample_seconds:g}",
        why="host memory that runs out, devices that fall off the bus and clocks that are held back are seen"
        " in a sample only",
        fix="--sample-seconds {most:g} or less",
        source="trainer/supervisor/hardwarewatch.py: what it watches is what was sampled",
        words=lambda _: {"most": MOST_SAMPLE_SECONDS},
    ),
    Rule(
        name="hangs sooner than steps are told",
        refuses=lambda spec: spec.options.hang_floor_seconds < LEAST_HANG_SECONDS,
        what="hang_floor_seconds = {o.hang_floor_seconds:g}",
        why="a rank tells its steps up to a second late, so a pause this short is none",
        fix="--hang-floor-seconds {least:g} or more",
        source="profiler/record/eventlog.py:HELD_SECONDS",
        words=lambda _: {"least": LEAST_HANG_SECONDS},
    ),
    Rule(
        name="threads without cores",
        refuses=lambda spec: spec.options.threads_per_rank > MOST_THREADS,
        what="threads_per_rank = {o.threads_per_rank}",
        why="no host has so many cores for a rank: each matrix product would wait for threads that wait for"
        " a core, and starting them may fail",
        fix="--threads-per-rank 0 divides this machine's cores; at most {most}",
        source="it becomes OMP_NUM_THREADS (supervisor/rankenv.py); libgomp ends a process that cannot"
        " start them",
        words=lambda _: {"most": MOST_THREADS},
    ),
)
