"""A day of a run poured through writers, thinning, fold and monitor; and 100,000 steps under a supervisor.

The day: 8 GPUs sampled 10 times a second and a step of 8 ranks each second, stamped as if time passed so
fast. Each recorded hour the monitor has to have caught up, and its memory and open files are read, with those
of this process, which writes, thins and folds as a supervisor does.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reliability.sound import LLMTOP, command_problems
from benchmarks.ui_runs import BEGAN, LiveRun, long_spec, sample_event, step_event
from benchmarks.ui_terminal import BenchTerminal
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.record.bookmarking import Bookmarker
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.feed import RunReader, read_state
from llmtop.profiler.record.recording import logs_size_bytes
from llmtop.profiler.record.rundir import HARDWARE, RunDir
from llmtop.profiler.record.segments import log_bytes
from llmtop.profiler.record.thinning import MOST_BYTES, thin
from llmtop.profiler.replay import Replay
from llmtop.trainer import control
from llmtop.trainer.launch import start_supervisor

RANKS = 8
SAMPLES_A_SECOND = 10
_TOKENS = 262_144
"""Of a step of `step_event`."""
_THIN_EVERY_SECONDS = 120
STEPS = 100_000


def soak(root: Path, hours: float) -> Iterator[dict[str, Any]]:
    yield from _day(root, hours)
    yield _many_steps(root)


def _day(root: Path, hours: float) -> Iterator[dict[str, Any]]:
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


def _many_steps(root: Path) -> dict[str, Any]:
    """100,000 steps of two ranks under a real supervisor, which thins their logs while they write."""
    began = time.monotonic()
    spec = long_spec(STEPS, 2)
    run = RunDir.create(root, spec, predict_with_suggestions(spec), {})
    os.environ["LLMTOP_WORKER_COMMAND"] = shlex.join(
        [sys.executable, "-m", "benchmarks.reliability.fast_rank"]
    )
    try:
        pid = start_supervisor(run)
    finally:
        del os.environ["LLMTOP_WORKER_COMMAND"]
    largest, supervisor, sizes = 0, psutil.Process(pid), []
    deadline = time.monotonic() + 3600.0
    while run.supervisor_alive() and time.monotonic() < deadline:
        largest = max(largest, *(log_bytes(path) for path in run.event_logs()))
        try:
            sizes.append(supervisor.memory_info().rss)
        except psutil.Error:
            break
        time.sleep(1.0)
    end = control.wait_for_end(run, 60)
    state = read_state(run)
    problems = [] if end is not None and end.state == "completed" else [f"it ended so: {end}"]
    problems += [] if state.ranks[1].steps_seen == STEPS else [f"{state.ranks[1].steps_seen} steps are told"]
    problems += [
        f"{path.name} has {log_bytes(path)} bytes"
        for path in run.event_logs()
        if log_bytes(path) > MOST_BYTES
    ]
    Bookmarker(run).finish(600.0)
    replay = Replay(run, lambda _: {})
    replay.read_on(600.0)
    replay.seek(replay.end)
    problems += [] if replay.state.steps_finished == STEPS else ["the replay does not come to the end"]
    problems += command_problems(root, "export", run.run_id, "--out", str(root / "run.zip"))
    problems += command_problems(root, "report", run.run_id)
    row = {
        "figure": "100,000 steps under a supervisor",
        "steps": STEPS,
        "ranks": 2,
        "largest_log_bytes": largest,
        "most_log_bytes": MOST_BYTES,
        "log_bytes_at_end": max(log_bytes(path) for path in run.event_logs()),
        "supervisor_rss_bytes": [sizes[len(sizes) // 4], sizes[-1], max(sizes)] if sizes else [],
        "problems": problems,
        "seconds": round(time.monotonic() - began, 1),
    }
    shutil.rmtree(run.path)
    return row
