"""A day of a run poured through writers, thinning, fold and monitor.

8 GPUs sampled 10 times a second and a step of 8 ranks each second, stamped as if time passed so
fast. Each recorded hour the monitor has to have caught up, and its memory and open files are read, with those
of this process, which writes, thins and folds as a supervisor does.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reliability.sound import LLMTOP
from benchmarks.ui_runs import BEGAN, LiveRun, sample_event, step_event
from benchmarks.ui_terminal import BenchTerminal
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.feed import RunReader, read_state
from llmtop.profiler.record.recording import logs_size_bytes
from llmtop.profiler.record.rundir import HARDWARE, RunDir
from llmtop.profiler.record.segments import log_bytes
from llmtop.profiler.record.thinning import MOST_BYTES, thin

RANKS = 8
SAMPLES_A_SECOND = 10
_TOKENS = 262_144
"""Of a step of `step_event`."""
_THIN_EVERY_SECONDS = 120


def day(root: Path, hours: float) -> Iterator[dict[str, Any]]:
    live = LiveRun(root, steps=10**6, ranks=RANKS)
    live.close()
    run = live.run
    writers = {name: EventWriter(run.events_path(name), str(name)) for name in (HARDWARE, *range(RANKS))}
    reader, began = RunReader(run), time.monotonic()
    env = {**os.environ, "LLMTOP_RUNS_DIR": str(root)}
    by_hour: list[dict[str, Any]] = []
    with BenchTerminal([LLMTOP, "attach", run.run_id], env, columns=120, rows=40) as terminal:
        terminal.wait_for("Help")
        seconds = int(hours * 3600)
        for second in range(1, seconds + 1):
            _write_second(writers, second)
            if second % 60 == 0:
                reader.poll()
            if second % _THIN_EVERY_SECONDS == 0:
                for path in run.event_logs():
                    thin(path)
            if second % 600 == 0 or second == seconds:
                terminal.forget()
                terminal.wait_for(f"{second}/", give_up=600.0)
            if second % 3600 == 0 or second == seconds:
                by_hour.append(_reading(run, terminal, second / 3600))
    state = reader.poll()
    yield {
        "figure": "a day at 10 Hz",
        "hours": hours,
        "by_hour": by_hour,
        "problems": _day_problems(run, state, seconds),
        "record_bytes": logs_size_bytes(run.event_logs()),
        "largest_log_bytes": max(log_bytes(path) for path in run.event_logs()),
        "most_log_bytes": MOST_BYTES,
        "seconds": round(time.monotonic() - began, 1),
    }
    for writer in writers.values():
        writer.close()
    shutil.rmtree(run.path)


def _write_second(writers: dict[str | int, EventWriter], second: int) -> None:
    for tenth in range(SAMPLES_A_SECOND):
        number = (second - 1) * SAMPLES_A_SECOND + tenth
        writers[HARDWARE].append(sample_event(BEGAN + number / SAMPLES_A_SECOND, number, RANKS))
    for rank in range(RANKS):
        writers[rank].append(step_event(second, rank, BEGAN + second, 1.0))


def _reading(run: RunDir, terminal: BenchTerminal, hour: float) -> dict[str, Any]:
    viewer, own = psutil.Process(terminal.process.pid), psutil.Process()
    return {
        "hour": round(hour, 2),
        "viewer_rss_bytes": viewer.memory_info().rss,
        "viewer_files": viewer.num_fds(),
        "own_rss_bytes": own.memory_info().rss,
        "own_files": own.num_fds(),
        "record_bytes": logs_size_bytes(run.event_logs()),
    }


def _day_problems(run: RunDir, live: RunState, seconds: int) -> list[str]:
    """What whoever read it as it came, and whoever reads what is left of it, have to agree on."""
    found: list[str] = []
    for name, state in (("live", live), ("anew", read_state(run))):
        expected = {
            "steps": (state.steps_finished, seconds),
            "steps of rank 7": (state.ranks[RANKS - 1].steps_seen, seconds),
            "samples": (state.hardware_samples, seconds * SAMPLES_A_SECOND),
            "tokens": (state.energy.tokens, seconds * _TOKENS),
            "skipped lines": (state.skipped_lines, 0),
            "newest": (state.now, BEGAN + seconds + 0.0003 * (RANKS - 1)),
        }
        found += [
            f"{name}: {what} {is_} and not {want}" for what, (is_, want) in expected.items() if is_ != want
        ]
    return found
