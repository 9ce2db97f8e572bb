"""`llmtop stop`: end a run after the step that it is in, and say how it ended."""

from __future__ import annotations

import argparse
import socket
import time
from contextlib import suppress

import psutil

from llmtop.presets.errors import ExitCode, JobFailedError, LlmtopError
from llmtop.profiler.fold.ending import memory_words, unsaved_words
from llmtop.profiler.fold.runstate import ENDED, RunState
from llmtop.profiler.hardware.aside import ask_once
from llmtop.profiler.hardware.nvml import NvmlReader
from llmtop.profiler.record import rundir
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.leftovers import marked_pids
from llmtop.profiler.record.remote import command_there, name_here, read_remote
from llmtop.profiler.units import format_bytes, format_seconds
from llmtop.trainer import control
from llmtop.trainer.change.restagefolder import keep_states
from llmtop.trainer.hosts.left import hosts_left_open, hosts_never_there
from llmtop.trainer.statefile import newest_in
from llmtop.trainer.supervisor.patience import Graces
from llmtop.tui.asking.deeds import ANSWER_SECONDS
from llmtop.tui.asking.stopping import at_the_latest, stop_words
from llmtop.tui.commandline.arguments import RUN_ANYWHERE_HELP
from llmtop.tui.commandline.runs import find_run
from llmtop.tui.commandline.telling import tell
from llmtop.tui.commands.follow import end_in_words, tell_unsaved

WAIT_SECONDS = 600.0
"""A step of a large model and its checkpoint take minutes."""
_BY_FORCE_SECONDS = Graces().stop + Graces().stop_kill
TERM_SECONDS = 5.0
"""For a process without supervisor to end when asked, before it is killed."""
_LEAVE_SECONDS = 10.0
"""For processes on this machine whose last words were read: supervisors of hosts, what links to hosts."""
_LOOK_SECONDS = 0.05
_DRIVER_SECONDS = 30.0
"""It may have to be loaded first."""
_DRIVER_SILENT = "the driver of the GPUs does not answer: what they have in use is not known"
_MOST_NAMED = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_ANYWHERE_HELP)
    parser.add_argument(
        "--save", action="store_true", help="save a checkpoint first, however long that takes"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help=f"how long to wait for the end (default: {WAIT_SECONDS:g}); 0: only ask. Without --save it is"
        f" ended by force {_BY_FORCE_SECONDS:g} s after it was asked",
    )


def run(args: argparse.Namespace) -> ExitCode:
    found = find_run(args.run, "lines")
    found.require_own("has nothing to stop")
    state = read_state(found)
    if state.status in ENDED:
        return _had_ended(found, state, args)
    began = time.monotonic()
    try:
        asked = control.stop(found, save=args.save)
    except LlmtopError:
        state = read_state(found)
        if state.status not in ENDED:
            raise
        # It ended, or its supervisor was killed, while it was looked at.
        return _had_ended(found, state, args)
    answer = control.wait_for_answer(found, asked, timeout=ANSWER_SECONDS)
    refusal = answer.reason if answer is not None and answer.answer == "refused" else ""
    if refusal:
        if found.spec().script is not None and read_state(found).status not in ("stopping", *ENDED):
            # Refused for good: whoever waited would wait for the end of the training.
            raise JobFailedError(f"run {found.run_id} goes on", why=refusal, fix="stop it without --save")
        tell(f"the request was refused: {refusal}")
    else:
        latest = "" if args.save else at_the_latest(found)
        tell(f"stopping run {found.run_id}: it {stop_words(found)}{latest}")
    control.wait_for_end(found, timeout=max(0.0, began + args.wait - time.monotonic()))
    state = read_state(found)
    if state.status not in ENDED and args.wait <= 0:
        if refusal and args.save:
            raise JobFailedError(f"run {found.run_id} was not asked for a checkpoint", why=refusal)
        print(f"run {found.run_id} is still stopping; llmtop attach {name_here(found.path)} follows it")
        return ExitCode.DONE
    if state.status not in ENDED:
        raise JobFailedError(
            f"run {found.run_id} has not ended after {args.wait:g} s",
            why="a rank may be inside a long step or hang",
            fix=f"llmtop attach {name_here(found.path)};"
            f" {_there(found)}kill {state.supervisor_pid} ends it at once, without saving",
        )
    _refuse_lost_elsewhere(found, state)
    print(f"run {found.run_id} {end_in_words(state)}")
    if state.status == "lost":
        # Its supervisor was killed after it was asked.
        _end_lost(found, state, args)
    _require_hosts_ended(found, lead_gone=state.status == "lost", lead_lost=state.status == "lost")
    _tell_what_is_left(found, state, time.monotonic() - began)
    if args.save:
        _tell_what_is_saved(found, state, refusal)
    else:
        tell_unsaved(found, state)
    return ExitCode.DONE


def _had_ended(found: rundir.RunDir, state: RunState, args: argparse.Namespace) -> ExitCode:
    _refuse_lost_elsewhere(found, state)
    print(f"run {found.run_id} had ended: {end_in_words(state)}")
    if state.status == "lost":
        _end_lost(found, state, args)
    _require_hosts_ended(found, lead_gone=True, lead_lost=state.status == "lost")
    if state.status == "lost":
        _require_none_left(found)
        print("no process is left")
    tell_unsaved(found, state)
    return ExitCode.DONE


def _refuse_lost_elsewhere(found: rundir.RunDir, state: RunState) -> None:
    """Raise JobFailedError: only who is there can end what a supervisor has left behind."""
    remote = read_remote(found.path)
    if state.status == "lost" and remote is not None:
        raise JobFailedError(
            f"run {found.run_id} is lost: its supervisor on {remote.host} is gone",
            fix=f"llmtop ends there what is left of it: {command_there(found.run_id, remote.host, 'stop')}",
        )


def _require_hosts_ended(found: rundir.RunDir, *, lead_gone: bool, lead_lost: bool) -> None:
    """Raise JobFailedError naming each host of a run that has not said that nothing runs there.

    With the lead gone they are asked here; where it was lost, it has said of none whether it left.
    """
    hosts = read_hosts(found)
    if hosts is None or read_remote(found.path) is not None:
        return
    if not lead_lost and (never := hosts_never_there(found)):
        _tell_never_there(never)
    open_ = hosts_left_open(found)
    if lead_lost or (lead_gone and open_):
        from llmtop.trainer.hosts.ending import end_hosts  # most runs have one machine

        tell("the launching machine's supervisor is gone; ending what is left on the hosts")
        open_ = end_hosts(found, hosts, [host.name for host in hosts.hosts] if lead_lost else open_)
    if open_:
        raise JobFailedError(
            "not known to have ended: " + "; ".join(f"host {name}: {why}" for name, why in open_.items()),
            why="a host ends its ranks by itself once it has not heard of the launching machine for"
            f" {Graces.from_environment().host:g} s",
            fix=f"when they can be reached again: llmtop stop {found.run_id}",
        )


def _tell_never_there(never: dict[str, str]) -> None:
    names = ", ".join(list(never)[:_MOST_NAMED]) + (", ..." if len(never) > _MOST_NAMED else "")
    print(f"never there, so nothing runs there: {names}")


def _there(found: rundir.RunDir) -> str:
    """Ahead of a command that works on the machine of the run's processes."""
    remote = read_remote(found.path)
    return f"ssh {remote.host} " if remote is not None else ""


def _tell_what_is_left(found: rundir.RunDir, state: RunState, seconds: float) -> None:
    """That no process is left and the GPUs have their memory back; raises where a process is."""
    if (remote := read_remote(found.path)) is not None:
        print(f"it has ended on {remote.host}, {format_seconds(seconds)} after it was asked")
    else:
        _require_none_left(found)
        print(f"no process is left, {format_seconds(seconds)} after it was asked")
    if told := memory_words(state):
        print(told)


def _require_none_left(found: rundir.RunDir) -> None:
    """Raise JobFailedError where a process of the run is left here once all have had time to leave."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while left := processes_left(found):
        if time.monotonic() >= deadline:
            raise JobFailedError(
                f"processes of run {found.run_id} are left: {', '.join(map(str, left))}",
                fix=f"kill -9 {' '.join(map(str, left))}",
            )
        time.sleep(_LOOK_SECONDS)


def _tell_what_is_saved(found: rundir.RunDir, state: RunState, refusal: str) -> None:
    """The checkpoint that was asked for; raises where steps were done and it is not there."""
    newest = state.checkpoints[-1] if state.checkpoints else None
    if newest is not None and newest.step >= state.steps_finished:
        print(f"checkpoint: {newest.path}")
        return
    kept = newest_in((found.checkpoints_dir,))
    if kept is not None and kept[0].step >= max(1, state.steps_finished):
        # A state that was saved for a relaunch, which the stop ended.
        print(f"checkpoint: {kept[1] / f'step-{kept[0].step}'}")
        return
    if state.unsaved is not None and state.unsaved.step >= state.steps_finished:
        raise JobFailedError(
            f"run {found.run_id} has ended without the checkpoint that was asked for",
            why=unsaved_words(state),
        )
    before = f"; the newest checkpoint is of step {newest.step}: {newest.path}" if newest else ""
    if not state.steps_finished:
        print("nothing was saved: the run had not finished a step")
    elif (why := _why_unsaved(state)) and not refusal:
        print(f"nothing was saved: the run {why}{before}")
    else:
        raise JobFailedError(
            f"run {found.run_id} has ended without the checkpoint that was asked for{before}",
            why=refusal or end_in_words(state),
        )


def _why_unsaved(state: RunState) -> str:
    """Why there was nothing to save; empty where there was."""
    if state.status == "completed":
        return "had completed before the request was carried out"
    stepped = any(rank.steps_seen for rank in state.ranks.values())
    return (
        "" if stepped or state.status != "stopped" else "had not finished a step since it was started again"
    )


def _end_lost(found: rundir.RunDir, state: RunState, args: argparse.Namespace) -> None:
    """What a supervisor that is gone cannot do any more: end processes, look at the GPUs, keep a state."""
    _end_leftovers(found, args.wait if args.save else min(args.wait, TERM_SECONDS))
    # The driver may be why the supervisor is gone.
    told = ask_once(lambda: memory_now(state, NvmlReader()), _DRIVER_SILENT, _DRIVER_SECONDS)
    if told:
        print(told)
    for kept in keep_states(found):
        print(f"a state saved for a relaunch is kept as {kept}")


def _end_leftovers(found: rundir.RunDir, grace_seconds: float) -> None:
    """End what a killed supervisor left behind: asked first, then killed."""
    left = _marked_processes(found)
    if not left:
        return
    print(f"ending what is left of it: {_pids(left)}")
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(left, timeout=grace_seconds)[1]:
        tell(f"process {process.pid} did not end when asked; killing it")
        with suppress(psutil.NoSuchProcess):
            process.kill()
    # What they started meanwhile carries the mark too.
    for process in _marked_processes(found):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    still = psutil.wait_procs(_marked_processes(found), timeout=TERM_SECONDS)[1]
    if still:
        raise JobFailedError(f"processes of run {found.run_id} cannot be ended: {_pids(still)}")


def memory_now(state: RunState, nvml: NvmlReader) -> str:
    """What the GPUs of a run without supervisor have in use now; empty where there are none here."""
    last = state.hardware
    devices = last.devices if last is not None and state.host == socket.gethostname() else ()
    read = {device.index: device.memory_used_bytes for device in nvml.sample([d.index for d in devices])}
    return "; ".join(
        f"GPU {device.index}: {format_bytes(read.get(device.index))} in use,"
        f" {format_bytes(device.memory_used_bytes)} when its supervisor last looked"
        for device in devices
    )


def _pids(processes: list[psutil.Process]) -> str:
    return ", ".join(str(process.pid) for process in processes)


def processes_left(found: rundir.RunDir) -> list[int]:
    """Live processes that carry the run's mark, and its supervisor."""
    left = [process.pid for process in _marked_processes(found)]
    supervisor = found.supervisor_identity()
    if supervisor is not None and found.supervisor_alive() and supervisor.pid not in left:
        left.append(supervisor.pid)
    return left


def _marked_processes(found: rundir.RunDir) -> list[psutil.Process]:
    """Live processes that carry the run's mark, but for this one."""
    marked: list[psutil.Process] = []
    if found.is_imported:
        return marked  # the run that it was may be going on here under the same id
    for pid in marked_pids(found.run_id):
        with suppress(psutil.Error):  # it has just ended
            marked.append(psutil.Process(pid))
    return marked
