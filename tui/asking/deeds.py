"""What the app does to the machine, each behind one function that a test can replace."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.hosts import HostDir
from llmtop.profiler.record.rundir import RunDir

if TYPE_CHECKING:
    from llmtop.presets.resolve import Machine
    from llmtop.profiler.hardware.gpuuse import GpusInUse
    from llmtop.profiler.record.snapshotevents import SnapshotParams
    from llmtop.trainer.control import SetParams
    from llmtop.trainer.tune.journal import TuneDir
    from llmtop.tui.asking.deletion import Load
    from llmtop.tui.asking.resuming import ResumeWish


def launch(spec: RunSpec, prediction: Prediction, root: Path, visible_devices: str = "") -> RunDir:
    """Start a run for real, on the devices that are named as in CUDA_VISIBLE_DEVICES, or on what there is."""
    from llmtop.trainer.launch import start_run, start_supervisor

    supervise = partial(start_supervisor, visible_devices=visible_devices) if visible_devices else None
    return start_run(spec, prediction, root=root, supervise=supervise)


def detect() -> Machine:
    """What this machine has."""
    from llmtop.profiler.hardware.machine import detect_machine

    return detect_machine()


def gpus() -> GpusInUse:
    """Who is using which GPU of this machine."""
    from llmtop.profiler.hardware.gpuuse import gpus_in_use

    return gpus_in_use()


ANSWER_SECONDS = 5.0
"""A supervisor that is alive answers within a fraction of a second."""


def stop(run: RunDir, save: bool) -> str | None:
    """Ask a run's supervisor to end it; why it refuses, or None when it does not."""
    from llmtop.trainer import control

    answer = control.wait_for_answer(run, control.stop(run, save), ANSWER_SECONDS)
    return answer.reason if answer is not None and answer.answer == "refused" else None


CHANGE_SECONDS = 60.0
"""Before it answers a supervisor looks whether the machine has what the change needs."""


def change(run: RunDir, params: SetParams) -> str | None:
    """Ask a run's supervisor to change it; why it refuses, or None when it does not."""
    from llmtop.trainer import control

    answer = control.wait_for_answer(run, control.change(run, params), CHANGE_SECONDS)
    return answer.reason if answer is not None and answer.answer == "refused" else None


def fix(run: RunDir, state: RunState, number: int) -> None:
    """Go on with a run that ran out of memory, with one of the changes that fit; raises where it cannot."""
    from llmtop.trainer.change import afterend

    words = afterend.fix_numbered(run, state, number).words
    afterend.resume_changed(run, afterend.plan_after_end(run, words))


def going_on(run: RunDir) -> RunState:
    """What is known of a run that is to go on; raises UsageError where it cannot."""
    from llmtop.profiler.record.feed import read_state
    from llmtop.trainer.change.goingon import MORE_STEPS, require_ended

    state = read_state(run)
    require_ended(run, state, MORE_STEPS)
    return state


def resume(run: RunDir, state: RunState, wish: ResumeWish) -> None:
    """Go on with a run that has ended; raises where it cannot."""
    from llmtop.trainer.change.goingon import go_on

    go_on(run, state, wish.words, anew=wish.anew, force=wish.force)


_BREAK_SECONDS = 5.0
_LOOK_SECONDS = 0.05


def bring(part: HostDir, given_up: Callable[[], bool]) -> str:
    """Wait until a part of a run on another machine is here; why it may be old, empty where it is not."""
    from llmtop.tui.commandline.runs import following_of

    following = following_of(part)
    if following is None or part.ranks_here is None:
        return ""
    number, broke_at = following.bring(part.host, part.ranks_here), time.monotonic()
    while not following.has_come(number) and not given_up():
        problem = following.problem
        if not problem:
            broke_at = time.monotonic()
        elif time.monotonic() - broke_at > _BREAK_SECONDS:
            return problem
        time.sleep(_LOOK_SECONDS)
    return ""


def stacks(run: RunDir, state: RunState) -> str:
    """The Python stacks of every rank, and where they are kept."""
    from llmtop.trainer.stacks import take_stacks

    taken = take_stacks(run, state)
    return f"kept in {taken.path}\n\n{taken.text}"


def snapshot(run: RunDir, params: SnapshotParams) -> str:
    """A closer look at some steps, once the ranks have written it; raises LlmtopError where they do not."""
    from llmtop.tui.asking import snapshots

    return snapshots.snapshot(run, params)


def weigh(run: RunDir) -> Load:
    """What deleting a run would take away; raises LlmtopError where it may not be deleted."""
    from llmtop.tui.asking import deletion

    deletion.require_deletable(run)
    return deletion.weigh(run)


def delete(run: RunDir) -> Load:
    """Delete a run that has ended; what went."""
    from llmtop.tui.asking import deletion

    return deletion.delete(run)


def search(spec: RunSpec, tune: TuneDir | None, root: Path) -> TuneDir:
    """Begin the search for a run's fastest setting, or go on with one; it needs nobody from then on."""
    from llmtop.tui.feeds import searching

    if tune is None:
        return searching.begin(spec, root)
    searching.go_on(tune)
    return tune


def interrupt(tune: TuneDir) -> bool:
    """Ask the process that is at a search to end; whether there was one."""
    from llmtop.tui.feeds import searching

    return searching.interrupt(tune)


class Deeds(Struct, frozen=True, kw_only=True):
    """All of them."""

    launch: Callable[[RunSpec, Prediction, Path, str], RunDir] = launch
    detect: Callable[[], Machine] = detect
    gpus: Callable[[], GpusInUse] = gpus
    stop: Callable[[RunDir, bool], str | None] = stop
    change: Callable[[RunDir, SetParams], str | None] = change
    fix: Callable[[RunDir, RunState, int], None] = fix
    going_on: Callable[[RunDir], RunState] = going_on
    resume: Callable[[RunDir, RunState, ResumeWish], None] = resume
    bring: Callable[[HostDir, Callable[[], bool]], str] = bring
    stacks: Callable[[RunDir, RunState], str] = stacks
    snapshot: Callable[[RunDir, SnapshotParams], str] = snapshot
    weigh: Callable[[RunDir], Load] = weigh
    delete: Callable[[RunDir], Load] = delete
    search: Callable[[RunSpec, TuneDir | None, Path], TuneDir] = search
    interrupt: Callable[[TuneDir], bool] = interrupt
