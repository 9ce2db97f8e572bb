"""A rank without torch: `python fake_rank.py SCENARIO RUNDIR` plays one part of a training job.

Every scenario is a function. Loops wait for signals or files, with a bound, so that nothing is left
running when a test goes wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from llmtop.profiler.record.changeevents import ChangeApplied
from llmtop.profiler.record.checkpointevents import CheckpointRefused, CheckpointSaved
from llmtop.profiler.record.events import RankFailed, RankFinished, StageBegan, StepFinished
from llmtop.profiler.record.failureevents import StepHealed
from llmtop.profiler.record.patientlog import PatientWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotFile, SnapshotTaken
from llmtop.profiler.record.snapshotrequest import SnapshotRequest, SnapshotRequests
from llmtop.profiler.record.wholefile import write_atomic
from llmtop.profiler.snapshots.modules import ModuleRow, ModuleTable
from llmtop.trainer.change.livefile import LiveFile, LiveRequest
from llmtop.trainer.change.restagefolder import restage_folders
from llmtop.trainer.change.standby import mark_ready, standby_setting, wait_for_go
from llmtop.trainer.pdeath import die_with_parent

BOUND_SECONDS = 600.0
PAUSE_SECONDS = 0.01

die_with_parent()
SCENARIO, RUN = sys.argv[1], RunDir(Path(sys.argv[2]))
RANK = int(os.environ["RANK"])
EVENTS = PatientWriter(RUN.events_path(RANK), f"rank{RANK}")
ASKED: list[int] = []


def listen() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda caught, _frame: ASKED.append(caught))


def step(number: int) -> None:
    EVENTS.write(StepFinished(step=number, loss=1.0, step_seconds=0.01))


def first_step() -> None:
    """Of all ranks: who fails after it does not end another one before it."""
    step(1)
    logs = [RUN.events_path(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
    wait_for(lambda: all(log.exists() and "step_finished" in log.read_text() for log in logs))


def finish(last_step: int, reason: str = "completed") -> None:
    EVENTS.write(RankFinished(reason=reason, last_step=last_step))  # type: ignore[arg-type]


def fail(message: str, *, kind: str = "RuntimeError", out_of_memory: bool = False, code: int = 1) -> None:
    EVENTS.write(
        RankFailed(error_type=kind, message=message, out_of_memory=out_of_memory, stage="forward", step=3)
    )
    os._exit(code)


def wait_for(condition: object) -> bool:
    """Whether the condition came true before the bound."""
    assert callable(condition)
    end = time.monotonic() + BOUND_SECONDS
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(PAUSE_SECONDS)
    return False


def told(name: str) -> bool:
    """Whether the test has put a file of this name into the run."""
    return (RUN.path / name).exists()


def tell(name: str, text: str = "") -> None:
    """Whoever waits for the file finds all of it."""
    write_atomic(RUN.path / f"{name}-{RANK}", text.encode(), lasting=False)


def trains() -> None:
    """Steps until told to stop, as the worker does."""
    listen()
    number = next_step() - 1
    end = time.monotonic() + BOUND_SECONDS
    while time.monotonic() < end and not ASKED:
        number += 1
        step(number)
        time.sleep(PAUSE_SECONDS)
    if signal.SIGTERM in ASKED and RANK == 0:
        EVENTS.write(CheckpointSaved(step=number, path="checkpoints/x", size_bytes=1, seconds=0.1))
    finish(number, "stopped")


def has_no_room() -> None:
    """Steps until told to stop; after its third one and at the end there is no room for a checkpoint."""
    listen()
    number = 0
    end = time.monotonic() + BOUND_SECONDS
    while time.monotonic() < end and not ASKED:
        number += 1
        step(number)
        if number == 3:
            refuse(number)
        time.sleep(PAUSE_SECONDS)
    if signal.SIGTERM in ASKED:
        refuse(number)
    finish(number, "stopped")


def ends_without_room() -> None:
    """Makes all its steps; at the end there is no room for the checkpoint."""
    for number in range(1, 4):
        step(number)
    refuse(3)
    finish(3, "completed")


def refuse(number: int) -> None:
    if RANK == 0:
        EVENTS.write(CheckpointRefused(step=number, why="it takes 20.0 MiB, and /runs has 9.0 MiB free"))


def changes() -> None:
    """Steps until told to stop, and does what is asked of a running rank.

    On a setting that is named in the file `hangs-on` it never makes a step, on one in `fails-on` it fails,
    on one in `fails-back` when it is to go on from a state. Named in `hangs-early` it never gets ready, in
    `waits-early` not as long as that file is there.
    """
    prepared = standby_setting()
    if prepared is not None:
        if named("hangs-early", prepared) and RANK == 1:
            wait_for(lambda: False)
        if named("fails-early", prepared):
            os._exit(9)
        wait_for(lambda: not named("waits-early", prepared))
        mark_ready(RUN, prepared, RANK)
        wait_for_go(RUN, prepared)
    listen()
    setting, asks = RUN.in_force().setting, LiveFile(RUN)
    if named("fails-on", setting) or named("fails-back", setting) and next_step() > 1:
        fail("this setting cannot be built", kind="ValueError")
    if named("hangs-on", setting):
        tell("hangs")
        wait_for(lambda: False)
    number = next_step()
    end = time.monotonic() + BOUND_SECONDS
    while time.monotonic() < end and not ASKED:
        step(number)
        asked = asks.newest()
        if asked is not None and asked.setting > setting:
            setting = asked.setting
            problem = "no room for a state" if named("refuses", setting) else ""
            if asked.leave and not problem:
                leave(asked, number)
                return
            EVENTS.write(ChangeApplied(setting=setting, step=number + 1, problem=problem))
        number += 1
        time.sleep(PAUSE_SECONDS)
    finish(number - 1, "stopped")


def leave(asked: LiveRequest, number: int) -> None:
    if RANK == 0:
        state = RUN.path / asked.folder / f"step-{number}"
        state.mkdir(parents=True)
        (state / "state").write_text("weights")
        saved = CheckpointSaved(step=number, path=str(state), size_bytes=7, seconds=0.01, passing=True)
        EVENTS.write(saved)
    finish(number, "stopped")


def looks_closer() -> None:
    """Steps until told to stop; writes a table of modules when one is asked for.

    Where there is a file `disk-full`, it says that of every rank that it names; of a `silent` run, nothing.
    """
    listen()
    asks, done, number = SnapshotRequests(RUN), 0, 0
    end = time.monotonic() + BOUND_SECONDS
    while time.monotonic() < end and not ASKED:
        number += 1
        step(number)
        asked = asks.newest()
        if asked is not None and asked.number > done and RANK in asked.ranks and not told("silent"):
            done = asked.number
            full = told("disk-full") and str(RANK) in (RUN.path / "disk-full").read_text()
            EVENTS.write(closer_look(asked, number, "No space left on device" if full else ""))
        time.sleep(PAUSE_SECONDS)
    finish(number, "stopped")


def closer_look(asked: SnapshotRequest, number: int, problem: str) -> SnapshotTaken:
    if problem:
        return SnapshotTaken(number=asked.number, what=asked.what, step=number, problem=problem)
    row = ModuleRow(name="model.layers.*.mlp", kind="Mlp", calls=2, forward_seconds=0.5, saved_bytes=3 << 20)
    table = msgspec.json.encode(ModuleTable(rank=RANK, step=number, step_seconds=1.5, rows=(row,)))
    RUN.snapshots_dir.mkdir(exist_ok=True)
    path = RUN.snapshots_dir / f"{asked.stem}-rank-{RANK}-{asked.what}.json"
    path.write_bytes(table)
    file = SnapshotFile(name=str(path.relative_to(RUN.path)), size_bytes=len(table))
    return SnapshotTaken(number=asked.number, what=asked.what, step=number, files=(file,))


def next_step() -> int:
    folders = (RUN.checkpoints_dir, *restage_folders(RUN))
    return 1 + max((int(s.name[5:]) for f in folders for s in f.glob("step-*")), default=0)


def named(name: str, setting: int) -> bool:
    path = RUN.path / name
    return path.exists() and path.read_text() == str(setting)


def trains_until_told() -> None:
    """Says that it was asked to stop, and obeys once it is told to."""
    listen()
    step(1)
    wait_for(lambda: ASKED)
    tell("asked")
    wait_for(lambda: told("go"))
    finish(1, "stopped")


def finishes() -> None:
    for number in (1, 2, 3):
        step(number)
    finish(3)


def leaves_early() -> None:
    """Rank 1 leaves with 0 and says nothing; rank 0 does all it should."""
    if RANK == 0:
        finishes()


def exits_seven() -> None:
    sys.stdout.write("all is lost\n")
    if RANK == 1:
        os._exit(7)
    wait_for(lambda: False)


def out_of_memory() -> None:
    """Rank 1 runs out of memory; rank 0 sees its connection close, and is noticed first."""
    first_step()
    if RANK == 0:
        wait_for(lambda: told("rank-1.jsonl") and "rank_failed" in RUN.events_path(1).read_text())
        fail("[gloo] Connection closed by peer [127.0.0.1]")
    fail(
        "CUDA out of memory. Tried to allocate 2.00 GiB", kind="OutOfMemoryError", out_of_memory=True, code=5
    )


def fits_when_smaller() -> None:
    """Rank 1 runs out of device memory in step 3, unless the run was made smaller than it was launched."""
    if RUN.spec().options.micro_batch < RUN.spec(0).options.micro_batch:
        number = next_step()
        step(number)
        finish(number)
        return
    first_step()
    if RANK == 1:
        fail(
            "CUDA out of memory. Tried to allocate 2.00 GiB.",
            kind="OutOfMemoryError",
            out_of_memory=True,
            code=5,
        )
    wait_for(lambda: False)


def host_memory() -> None:
    first_step()
    if RANK == 1:
        fail("DefaultCPUAllocator: you tried to allocate 9 bytes", out_of_memory=True, code=5)
    wait_for(lambda: False)


def heals() -> None:
    """Steps, of which the third is made again in smaller parts by both ranks: rank 1 ran out of memory."""
    listen()
    step(1)
    step(2)
    stage, message = ("backward", "CUDA out of memory. Tried to allocate 2.00 GiB") if RANK else (None, "")
    EVENTS.write(StepHealed(step=3, micro_batch=2, grad_accum=4, stage=stage, message=message))
    number = 2
    end = time.monotonic() + BOUND_SECONDS
    while time.monotonic() < end and not ASKED:
        number += 1
        step(number)
        time.sleep(PAUSE_SECONDS)
    finish(number, "stopped")


def fails_by_mistake() -> None:
    if RANK == 0:
        fail("data x is empty\n  why: it has no line\n  fix: give another file", kind="UsageError", code=2)
    wait_for(lambda: False)


def is_stubborn() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    step(1)
    tell("ready")
    wait_for(lambda: False)


def steps_when_told() -> None:
    """Once it is told to, and listens to nothing."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    tell("ready")
    wait_for(lambda: told("go"))
    step(1)
    wait_for(lambda: False)


def is_deaf() -> None:
    """Still importing: no handler yet, no step."""
    tell("ready")
    wait_for(lambda: False)


def lingers() -> None:
    """Rank 0 finishes, rank 1 never does."""
    if RANK == 0:
        finishes()
    else:
        is_stubborn()


def leaves_children() -> None:
    """Children in sessions of their own that ignore signals, one of them an orphan."""
    ignore = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)
    orphan = subprocess.check_output(
        [
            sys.executable,
            "-c",
            "import subprocess,sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
            "start_new_session=True, stdout=subprocess.DEVNULL).pid)",
            ignore,
        ],
        text=True,
    )
    tell("children", f"{child.pid} {orphan}")
    if RANK == 0:
        wait_for(lambda: told("go"))
    finishes()
    child.returncode = 0  # left to the supervisor


def holds() -> None:
    """Ignores signals, and so do a child and an orphan in sessions of their own; each has a GPU's memory."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sleeps = "import time; time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", sleeps], start_new_session=True)
    orphan = subprocess.check_output(
        [
            sys.executable,
            "-c",
            "import subprocess,sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
            "start_new_session=True, stdout=subprocess.DEVNULL).pid)",
            sleeps,
        ],
        text=True,
    )
    wait_for(lambda: told("take"))
    tell("holds", f"{os.getpid()} {child.pid} {orphan}")
    step(1)
    wait_for(lambda: False)


def pauses() -> None:
    """Steps, falls silent until told, steps again."""
    listen()
    for number in (1, 2, 3):
        step(number)
    wait_for(lambda: told("go"))
    step(4)
    wait_for(lambda: told("go-again"))
    finish(4)


def compiles() -> None:
    """A child that looks like ninja building an op."""
    EVENTS.write(StageBegan(stage="engine"))
    op = RUN.path / "fused_adam"
    op.mkdir(exist_ok=True)
    ninja = op / f"bin-{RANK}" / "ninja"
    ninja.parent.mkdir()
    ninja.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(ninja), "300"], cwd=op)
    wait_for(lambda: told("go"))
    child.kill()
    child.wait()
    finishes()


def meets_a_lock() -> None:
    """Another program's build is killed while this rank waits for it."""
    EVENTS.write(StageBegan(stage="op_build"))
    lock = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    if wait_for(lambda: not lock.exists()):
        finishes()


def shows_environment() -> None:
    tell("environment", json.dumps(dict(os.environ)))
    finishes()


if __name__ == "__main__":
    globals()[SCENARIO]()
