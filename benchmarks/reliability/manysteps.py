"""As many steps as weeks of training make, under a real supervisor that thins their logs meanwhile.

Once by two ranks without torch, which write as fast as they can; once by a rank that trains: DeepSpeed on the
CPU, a model so small that a step takes some milliseconds, checkpoints among the steps.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reliability.runs import rank_pids, size_of, tiny_spec, wait_for
from benchmarks.reliability.sound import command_problems, problems_of
from benchmarks.ui_runs import long_spec
from llmtop.profiler.memory.predict import predict_with_suggestions
from llmtop.profiler.record.bookmarking import Bookmarker
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.eventtail import EventTail
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.recording import logs_size_bytes
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import log_bytes
from llmtop.profiler.record.thinning import MOST_BYTES
from llmtop.profiler.replay import Replay
from llmtop.trainer import control
from llmtop.trainer.launch import start_run, start_supervisor

FAST_STEPS = 100_000
_KEPT = 2
_CHECKPOINTS = 8
_LOOK_SECONDS = 1.0
_GROWN = 1.1
"""What a process holds at the end against what it held at a fifth of its steps: more is a problem."""
_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 272,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def fast_ranks(root: Path) -> Iterator[dict[str, Any]]:
    """Two ranks that only write: the row of them."""
    began = time.monotonic()
    spec = long_spec(FAST_STEPS, 2)
    run = RunDir.create(root, spec, predict_with_suggestions(spec), {})
    os.environ["LLMTOP_WORKER_COMMAND"] = shlex.join(
        [sys.executable, "-m", "benchmarks.reliability.fast_rank"]
    )
    try:
        pid = start_supervisor(run)
    finally:
        del os.environ["LLMTOP_WORKER_COMMAND"]
    largest, sizes = 0, []
    for _ in _while_it_lasts(run):
        largest = max(largest, *(log_bytes(path) for path in run.event_logs()))
        sizes += [psutil.Process(pid).memory_info().rss] if psutil.pid_exists(pid) else []
    yield {
        "figure": "100,000 steps under a supervisor",
        "steps": FAST_STEPS,
        "ranks": 2,
        "largest_log_bytes": largest,
        "most_log_bytes": MOST_BYTES,
        "supervisor_rss_bytes": [sizes[len(sizes) // 4], sizes[-1], max(sizes)] if sizes else [],
        "problems": _end_problems(root, run, FAST_STEPS),
        "log_bytes_at_end": max(log_bytes(path) for path in run.event_logs()),
        "seconds": round(time.monotonic() - began, 1),
    }
    shutil.rmtree(run.path)


def real_rank(root: Path, steps: int) -> Iterator[dict[str, Any]]:
    """One that trains: the row of it.

    A line has some 420 bytes where steps are so short: its log is thinned when there are 160,000 of them.
    """
    began = time.monotonic()
    model = root / "nano"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_MODEL))
    spec = tiny_spec(
        model=str(model),
        gpus=1,
        zero=1,
        seq_len=16,
        micro_batch=1,
        steps=steps,
        checkpoint_every=steps // _CHECKPOINTS,
        keep_checkpoints=_KEPT,
        sample_seconds=0.5,
    )
    run = start_run(spec, predict_with_suggestions(spec), root=root)
    wait_for(lambda: bool(rank_pids(run)), "the rank", 600.0)
    supervisor, (rank,) = run.supervisor_identity(), rank_pids(run).values()
    assert supervisor is not None
    watched = {"supervisor": psutil.Process(supervisor.pid), "rank": psutil.Process(rank)}
    tail, step, largest, by_tenth, times = EventTail(run.events_path(0)), 0, 0, list[Any](), list[float]()
    for _ in _while_it_lasts(run):
        finished = [event for event in tail.poll() if isinstance(event, StepFinished)]
        times += [event.step_seconds for event in finished if event.step_seconds is not None]
        step = finished[-1].step if finished else step
        largest = max(largest, *(log_bytes(path) for path in run.event_logs()))
        if step * 10 >= steps * (len(by_tenth) + 1) and step < steps:
            by_tenth.append({"step": step, **_held(watched), **_sizes(run)})
    problems = _end_problems(root, run, steps) + problems_of(run, kept=_KEPT) + _growth(by_tenth)
    problems += [] if read_state(run).thinned.get("rank0") else ["the rank's log was not thinned"]
    yield {
        "figure": "steps of a real rank",
        "steps": steps,
        "ranks": 1,
        "step_seconds": round(statistics.median(times), 6),
        "by_tenth": by_tenth,
        "largest_log_bytes": largest,
        "most_log_bytes": MOST_BYTES,
        **_sizes(run),
        "problems": problems,
        "seconds": round(time.monotonic() - began, 1),
    }
    shutil.rmtree(run.path)


def _while_it_lasts(run: RunDir) -> Iterator[None]:
    deadline = time.monotonic() + 3600.0
    while run.supervisor_alive() and time.monotonic() < deadline:
        yield
        time.sleep(_LOOK_SECONDS)


def _held(watched: dict[str, psutil.Process]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, process in watched.items():
        found[f"{name}_rss_bytes"] = process.memory_info().rss
        found[f"{name}_files"] = process.num_fds()
    return found


def _sizes(run: RunDir) -> dict[str, int]:
    """Of the logs together, and of all that the run's folder holds besides checkpoints."""
    whole = size_of(run.path) - size_of(run.checkpoints_dir)
    return {"log_bytes": logs_size_bytes(run.event_logs()), "record_bytes": whole}


def _growth(by_tenth: list[dict[str, int]]) -> list[str]:
    """What holds more memory or more open files at the end than at a fifth of the steps."""
    if len(by_tenth) < 3:
        return ["it was looked at too seldom to say what grows"]
    early, last = by_tenth[1], by_tenth[-1]
    allowed: dict[str, Callable[[int], float]] = {
        **{f"{name}_rss_bytes": lambda size: _GROWN * size for name in ("supervisor", "rank")},
        **{f"{name}_files": lambda count: count for name in ("supervisor", "rank")},
    }
    return [
        f"{key} went from {early[key]:,} to {last[key]:,}"
        for key, most in allowed.items()
        if last[key] > most(early[key])
    ]


def _end_problems(root: Path, run: RunDir, steps: int) -> list[str]:
    """How it ended, the bound of each log, and whether every view still counts each step."""
    end, state = control.wait_for_end(run, 60), read_state(run)
    problems = [] if end is not None and end.state == "completed" else [f"it ended so: {end}"]
    for number, rank in state.ranks.items():
        problems += [] if rank.steps_seen == steps else [f"of rank {number} {rank.steps_seen} steps are told"]
    problems += [
        f"{path.name} has {log_bytes(path)} bytes"
        for path in run.event_logs()
        if log_bytes(path) > MOST_BYTES
    ]
    Bookmarker(run).finish(600.0)
    replay = Replay(run, lambda _: {})
    replay.read_on(600.0)
    replay.seek(replay.end)
    problems += [] if replay.state.steps_finished == steps else ["the replay does not come to the end"]
    problems += command_problems(root, "export", run.run_id, "--out", str(root / "run.zip"))
    return problems + command_problems(root, "report", run.run_id)
