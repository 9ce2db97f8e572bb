"""Power cuts of real runs, simulated: folders copied at one moment, and cut where nothing was synced.

What a process had synced before it was told of (specs, complete checkpoints) is in the copy as it was. Every
log ends at a random byte, and files that need not last, or were being written aside, are cut or missing.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reliability.runs import GIVE_UP_SECONDS, KEPT_CHECKPOINTS, tiny_spec, wait_for
from benchmarks.reliability.sound import command_problems, exports, problems_of
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.tune.nest import Nest

COPIES_A_RUN = 20
_GAP_SECONDS = 0.5
_EARLY_COPIES = 3
"""Of each run, before its first checkpoint."""
_LAST_BYTES = 2048
_STILL = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
_STILL_SECONDS = 1.0
"""That processes are waited for before they are let go on and stopped anew."""
_LOGS = (".jsonl", ".log")
_UNSYNCED = ("bookmark", "supervisor.pid", "live.json", "save.json", "environment.json")
_COMMANDS = (("ls",), ("report",), ("logs",), ("ls", "--json"))


def power_cuts(nest: Nest, root: Path, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each copy."""
    chance = random.Random(seed)
    for first in range(0, count, COPIES_A_RUN):
        numbers = range(first, min(count, first + COPIES_A_RUN))
        run = nest.start(tiny_spec(), root / "live")
        try:
            copies = [_copy(run, root / f"cut-{number}", chance, number - first) for number in numbers]
        finally:
            control.stop(run, save=False)
            control.wait_for_end(run, 120)
        for number, copy in zip(numbers, copies, strict=True):
            yield {"figure": "power cut", "number": number, "seed": seed, **_judged(run, copy, chance)}
            shutil.rmtree(copy.path.parent)
        shutil.rmtree(root / "live")


def _copy(run: RunDir, root: Path, chance: random.Random, number: int) -> RunDir:
    if number >= _EARLY_COPIES:
        wait_for(lambda: bool(read_state(run).checkpoints), "the first checkpoint")
    time.sleep(chance.uniform(0.0, _GAP_SECONDS))
    target = root / run.run_id
    with _standing_still(run):
        shutil.copytree(run.path, target)
    return RunDir(target)


@contextmanager
def _standing_still(run: RunDir) -> Iterator[None]:
    """A cut is one moment for all processes: none of them goes on while its folder is copied."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while not _all_still(processes := _suspended_tree(run)) or not set(_tree(run)) <= set(processes):
        # One that starts a program waits in the kernel until that has begun, and stops only then: where the
        # program was stopped before, both are let go on. What one has started before it stopped still runs.
        _resume(processes)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the processes of {run.run_id} did not stand still at once")
        time.sleep(_STILL_SECONDS / 10)
    try:
        yield
    finally:
        _resume(processes)


def _suspended_tree(run: RunDir) -> list[psutil.Process]:
    return [process for process in _tree(run) if _suspended(process)]


def _tree(run: RunDir) -> list[psutil.Process]:
    """The supervisor and all below it."""
    identity = run.supervisor_identity()
    if identity is None or not identity.alive:
        return []
    supervisor = psutil.Process(identity.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def _all_still(processes: Sequence[psutil.Process]) -> bool:
    try:
        wait_for(lambda: all(map(_stands_still, processes)), "standing still", _STILL_SECONDS)
    except TimeoutError:
        return False
    return True


def _resume(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _suspended(process: psutil.Process) -> bool:
    """False for one that has ended by itself meanwhile, as a short look at the machine."""
    try:
        process.suspend()
    except psutil.NoSuchProcess:
        return False
    return True


def _stands_still(process: psutil.Process) -> bool:
    """Also one that was about to end, and has."""
    try:
        return process.status() in _STILL
    except psutil.NoSuchProcess:
        return True


def _cut(path: Path, chance: random.Random) -> int:
    """Bytes that are left of it."""
    size = path.stat().st_size
    # Half of them near the end, where the torn lines of a drive's last seconds are.
    left = chance.randint(0 if chance.random() < 0.5 else max(0, size - _LAST_BYTES), size)
    with path.open("r+b") as file:
        file.truncate(left)
    return left


def _judged(run: RunDir, copy: RunDir, chance: random.Random) -> dict[str, Any]:
    before = {path: len(EventTail(path).poll()) for path in copy.event_logs()}
    lost_lines: dict[str, int] = {}
    whole_lines: dict[Path, int] = {}
    for path in sorted(copy.path.rglob("*")):
        if not path.is_file():
            continue
        if path.suffix in _LOGS:
            _cut(path, chance)
            whole_lines[path] = path.read_bytes().count(b"\n")
        elif path.name in _UNSYNCED or any(part.startswith(".") for part in path.parts[-2:]):
            _cut(path, chance) if chance.random() < 0.7 else path.unlink()
    problems: list[str] = []
    for path, events in before.items():
        kept = len(EventTail(path).poll())
        if path in whole_lines and kept != whole_lines[path]:
            problems.append(f"{path.name} has {whole_lines[path]} whole lines and tells {kept} events")
        lost_lines[path.name] = events - kept
    problems += problems_of(copy, kept=KEPT_CHECKPOINTS, where=run.path)
    problems += exports(copy, copy.path.parent / "cut.zip")
    words = chance.choice(_COMMANDS)
    named = () if words[0] == "ls" else (copy.run_id,)
    problems += command_problems(copy.path.parent, *words, *named)
    state = read_state(copy)
    return {
        "steps": state.steps_finished,
        "checkpoints": len(state.checkpoints),
        "status": state.status,
        "lines_cut_off": lost_lines,
        "problems": problems,
    }
