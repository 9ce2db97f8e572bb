"""SIGKILL of viewer, supervisor or a rank at random moments of real runs, and what is left of each."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.reliability.runs import (
    CHECKPOINT_EVERY,
    KEPT_CHECKPOINTS,
    rank_pids,
    size_of,
    tiny_spec,
    wait_for,
)
from benchmarks.reliability.sound import LLMTOP, command_problems, problems_of
from benchmarks.ui_terminal import BenchTerminal
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.tune.nest import Nest
from llmtop.tui.commands.stop import processes_left

TARGETS = ("viewer", "supervisor", "rank")
EARLY_SHARE, EARLY_SECONDS = 0.3, 3.0
"""So many kills come at a random moment of the first seconds, which are start-up."""
LATEST_STEP, LATE_SECONDS = 16, 0.4
"""The others come a random moment after a random step: among steps and checkpoints on any machine."""
RESUMED_EVERY = 10
_END_SECONDS = 60.0
_RESUMED_STEPS = 2 * CHECKPOINT_EVERY


class Moment(NamedTuple):
    """When a kill comes."""

    step: int
    """After the record tells of this step; 0: after the launch."""
    seconds: float

    def come(self, run: RunDir) -> None:
        """Wait for it."""
        wait_for(lambda: read_state(run).steps_finished >= self.step, f"step {self.step}")
        time.sleep(self.seconds)


def kills(nest: Nest, root: Path, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` runs, each with one kill; a row for each."""
    moments = random.Random(seed)
    for number in range(count):
        target = TARGETS[number % len(TARGETS)]
        early = moments.random() < EARLY_SHARE
        step = 0 if early else moments.randint(1, LATEST_STEP)
        moment = Moment(step, moments.uniform(0.0, EARLY_SECONDS if early else LATE_SECONDS))
        yield {"figure": "kill", "number": number, "seed": seed, **_one(nest, root, target, moment, number)}


def _one(nest: Nest, root: Path, target: str, moment: Moment, number: int) -> dict[str, Any]:
    began = time.monotonic()
    run = nest.start(tiny_spec(), root)
    try:
        harm: dict[str, Callable[[RunDir, Moment], list[str]]] = {
            "viewer": _kill_viewer,
            "supervisor": _kill_supervisor,
            "rank": _kill_rank,
        }
        problems = harm[target](run, moment)
        state = read_state(run)
        problems += [f"process {pid} is left" for pid in processes_left(run)]
        problems += problems_of(run, kept=KEPT_CHECKPOINTS)
        if number % RESUMED_EVERY == 0 and target != "viewer" and state.checkpoints:
            problems += _resume(run)
    except TimeoutError as error:
        problems, state = [str(error)], read_state(run)
    finally:
        _end(run)
    reason = state.ended.reason if state.ended is not None else ""
    row = {
        "target": target,
        "after_step": moment.step,
        "after_seconds": round(moment.seconds, 3),
        "steps": state.steps_finished,
        "checkpoints": len(state.checkpoints),
        "status": state.status,
        # Where that machine keeps its temporary files is nobody's business.
        "reason": reason.replace(f"{run.path}/", ""),
        "record_bytes": sum(path.stat().st_size for path in run.path.glob("*.jsonl")),
        "folder_bytes": size_of(run.path),
        "problems": problems,
        "seconds": round(time.monotonic() - began, 2),
    }
    shutil.rmtree(run.path)
    return row


def _kill_viewer(run: RunDir, moment: Moment) -> list[str]:
    """The training goes on, makes steps, and stops when asked."""
    env = {**os.environ, "LLMTOP_RUNS_DIR": str(run.path.parent)}
    with BenchTerminal([LLMTOP, "attach", run.run_id], env) as terminal:
        moment.come(run)
        terminal.process.send_signal(signal.SIGKILL)
        terminal.process.wait(30)
    problems = [] if run.supervisor_alive() else ["the supervisor has ended with the viewer"]
    before = read_state(run).steps_finished
    wait_for(lambda: read_state(run).steps_finished > before, "a step after the viewer's death")
    return problems + _stop(run)


def _kill_supervisor(run: RunDir, moment: Moment) -> list[str]:
    """Its ranks do not outlive it, nor what they started; the run is told lost."""
    identity = run.supervisor_identity()
    assert identity is not None
    moment.come(run)
    supervisor = psutil.Process(identity.pid)
    family = supervisor.children(recursive=True)
    supervisor.kill()
    # Forked ranks carry no mark that is seen from outside, so they are waited for by name.
    alive = psutil.wait_procs([supervisor, *family], timeout=_END_SECONDS)[1]
    wait_for(lambda: not processes_left(run), "the end of what the ranks had started")
    status = read_state(run).status
    problems = [] if status == "lost" else [f"its status is {status}, not lost"]
    return problems + [f"process {process.pid} has outlived the supervisor" for process in alive]


def _kill_rank(run: RunDir, moment: Moment) -> list[str]:
    """The run fails, and the end names the rank and the signal."""
    moment.come(run)
    wait_for(lambda: bool(rank_pids(run)), "the first rank")
    ranks = rank_pids(run)
    victim = sorted(ranks)[int(moment.seconds * 1e6) % len(ranks)]
    if process_identity(ranks[victim]) is None:
        return [f"rank {victim} had ended before it was killed"]
    os.kill(ranks[victim], signal.SIGKILL)
    end = control.wait_for_end(run, 120)
    if end is None:
        return ["it has no end"]
    if end.state != "failed" or f"rank {victim} was killed by SIGKILL" not in end.reason:
        return [f"rank {victim} was killed, and its end says: {end.state}: {end.reason}"]
    return []


def _stop(run: RunDir) -> list[str]:
    control.stop(run, save=True)
    end = control.wait_for_end(run, 120)
    if end is None or end.state != "stopped" or "saved in" not in end.reason:
        return [f"it did not stop with a checkpoint: {end}"]
    return []


def _resume(run: RunDir) -> list[str]:
    """It goes on from its newest checkpoint and makes steps."""
    step = read_state(run).checkpoints[-1].step
    problems = command_problems(
        run.path.parent, "resume", run.run_id, f"steps={step + _RESUMED_STEPS}", "--headless"
    )
    state = read_state(run)
    if state.status != "completed" or state.steps_finished != step + _RESUMED_STEPS:
        problems.append(f"resumed from step {step} it is {state.status} at step {state.steps_finished}")
    return problems + problems_of(run, kept=KEPT_CHECKPOINTS)


def _end(run: RunDir) -> None:
    for pid in processes_left(run):
        if process_identity(pid) is not None:
            os.kill(pid, signal.SIGKILL)
