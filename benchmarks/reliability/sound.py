"""What must hold of a run's folder after any harm: it opens, little is lost, what was said to be saved is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmtop.presets.errors import LlmtopError
from llmtop.presets.tensorfile import read_header
from llmtop.profiler.export.archive import export_run
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.replay import Replay
from llmtop.profiler.report.build import build_report
from llmtop.trainer.statefile import read_index, read_progress
from llmtop.trainer.worker.state.shardfile import ShardReader

LLMTOP = str(Path(sys.executable).with_name("llmtop"))


def problems_of(run: RunDir, *, kept: int, where: Path | None = None) -> list[str]:
    """All that does not hold, in words; empty for a sound run. `kept`: how many checkpoints it keeps.

    `where` is the folder that the events' paths mean, if the run was copied from there.
    """
    found: list[str] = []
    try:
        state = read_state(run)
        build_report(run)
        replay = Replay(run, lambda _: {})
        replay.read_on(3600.0)
        if replay.end:
            replay.seek(replay.end)
    except LlmtopError as error:
        return [f"it does not open: {error.in_one_line}"]
    logs = [path for path in run.event_logs() if path.exists()]
    for path in logs:
        found += _log_problems(path)
    if state.skipped_lines > len(logs):
        found.append(f"{state.skipped_lines} lines were skipped in {len(logs)} logs")
    return found + _checkpoint_problems(run, kept, where or run.path)


def _log_problems(path: Path) -> list[str]:
    """Every whole line but a torn one that a later process has closed must be an event."""
    *whole, _torn = path.read_bytes().split(b"\n")
    broken = [line for line in whole if line.strip() and not _is_event(line)]
    if len(broken) > 1:
        return [f"{path.name}: {len(broken)} lines are broken"]
    tail = EventTail(path)
    events = tail.poll()
    if len(events) + len(broken) != sum(1 for line in whole if line.strip()):
        return [f"{path.name}: {len(events)} events of {len(whole)} whole lines"]
    return []


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _checkpoint_problems(run: RunDir, kept: int, where: Path) -> list[str]:
    """What was reported is there and can be read to its last byte, unless `kept` newer ones took its place.

    The record may tell of less than there is: a log that was cut ends before the newest of them.
    """
    said = [event for event in EventTail(run.events_path(0)).poll() if isinstance(event, CheckpointSaved)]
    complete = [
        progress.step
        for path in run.checkpoints_dir.glob("step-*")
        if (progress := read_progress(path)) is not None
    ]
    found: list[str] = []
    for event in {event.step: event for event in said}.values():
        # One that is being removed may be there in part, once the last of those that replace it counts.
        if sum(step > event.step for step in complete) >= kept:
            continue
        path = run.path / Path(event.path).relative_to(where)
        problem = unreadable(path)
        if problem:
            found.append(f"the checkpoint of step {event.step} was reported, and {problem}")
    return found


def unreadable(path: Path) -> str:
    """Why a checkpoint cannot be read whole; empty where it can."""
    progress = read_progress(path)
    if progress is None:
        return f"{path.name} is not complete ({sorted(p.name for p in path.glob('*'))})"
    try:
        index = read_index(path)
        for file in index.files:
            reader = ShardReader(path / file.name)
            for name in read_header(path / file.name).entries:
                reader.tensor(name)
            reader.close()
    except (LlmtopError, OSError, ValueError, RuntimeError) as error:
        return f"{path.name} cannot be read: {error}"
    return ""


def exports(run: RunDir, archive: Path) -> list[str]:
    try:
        export_run(run, archive)
    except LlmtopError as error:
        return [f"it is not exported: {error.in_one_line}"]
    finally:
        archive.unlink(missing_ok=True)
    return []


def command_problems(root: Path, *words: str, allowed: Sequence[int] = (0,)) -> list[str]:
    """A command of the product on these runs: no traceback, and an exit code that is one of the allowed."""
    done = subprocess.run(
        [LLMTOP, *words],
        env={**os.environ, "LLMTOP_RUNS_DIR": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "Traceback" in done.stderr or done.returncode not in allowed:
        return [f"llmtop {' '.join(words)} ended with {done.returncode}: {done.stderr[-400:]}"]
    return []
