"""Runs the measurement of `llmtop calibrate` in a process of its own, and keeps what it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import date

import msgspec

from llmtop.presets.errors import JobFailedError
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.calibration import Calibration, Measured, machine_name, work_of

LIMIT_SECONDS = 60.0
MODULE = "llmtop.profiler.probes.calibrate"


def calibrate(spec: RunSpec) -> Calibration:
    """Raises JobFailedError when it ends without an answer or takes longer than a minute."""
    cores = len(os.sched_getaffinity(0))
    threads = spec.options.threads_per_rank or max(1, cores // spec.options.gpus)
    work = work_of(spec, threads if spec.on_cpu else None)
    # Before the measurement, which is a load itself.
    load = os.getloadavg()[0]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE],
            input=msgspec.json.encode(work),
            capture_output=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailedError(
            f"the calibration took longer than {LIMIT_SECONDS:g} s",
            why="the machine may be busy with something else",
            fix="try again when it is idle, or with a smaller micro-batch",
        ) from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise JobFailedError("the calibration failed", why=lines[-1] if lines else f"exit {done.returncode}")
    answer = msgspec.json.decode(done.stdout, type=Measured)
    return Calibration(
        gpu=spec.gpu.name,
        processor=machine_name(),
        date=date.today().isoformat(),
        versions=answer.versions,
        took_seconds=round(time.monotonic() - started, 1),
        work=work,
        figures=answer.figures,
        scatter=answer.scatter,
        load_average=round(load, 2),
        cores=os.cpu_count(),
    )
