"""Starts a run: checks it, makes its folder, and leaves a supervisor behind that needs nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtop.presets.errors import JobFailedError, UsageError
from llmtop.presets.inputs import require_tokenizer
from llmtop.presets.spec import RunSpec
from llmtop.profiler.export.environment import record_environment
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import RunStarted
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.remote import command_here, read_remote
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir, runs_root
from llmtop.profiler.record.wholefile import document, write_atomic
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.preflight import preflight
from llmtop.trainer.script.unchangeable import again

_START_SECONDS = 60.0
"""A supervisor imports no torch; this long only on a machine that is very busy."""
_POLL_SECONDS = 0.01
_DEVICES = "CUDA_VISIBLE_DEVICES"


def start_run(
    spec: RunSpec,
    prediction: Prediction,
    *,
    root: Path | None = None,
    supervise: Callable[[RunDir], int] | None = None,
    over_hosts: bool = False,
) -> RunDir:
    """Launch a run and return at once; from then on its supervisor and its folder are all there is of it.

    `supervise` starts the supervisor another way than `start_supervisor`; `over_hosts`: as the lead of hosts.
    Raises UsageError for a run that cannot start here, JobFailedError when its supervisor does not.
    """
    _require_hosts(spec, over_hosts=over_hosts)
    preflight(spec, nvme_bytes=prediction.nvme_bytes)
    if not over_hosts:
        require_tokenizer(spec)  # not what is gone on with: its tokenizer is made already
    run = RunDir.create(root or runs_root(), spec, prediction, deepspeed_config(spec))
    _keep_environment(run)
    (supervise or start_supervisor)(run)
    return run


def _require_hosts(spec: RunSpec, *, over_hosts: bool) -> None:
    if spec.options.nodes > 1 and not over_hosts:
        raise UsageError(
            f"nodes = {spec.options.nodes}, and no hosts are named",
            why="ranks on this machine alone would be another run",
            fix="llmtop run --hostfile FILE, or inside a Slurm allocation; here: --nodes 1",
        )


def require_trainer(run: RunDir) -> None:
    """Raise UsageError for a run that cannot be gone on with here: an imported one, one of another machine, a
    command of the user's own, one over hosts whose launcher is not there."""
    run.require_own("cannot be gone on with")
    if (remote := read_remote(run.path)) is not None:
        raise UsageError(
            f"run {run.run_id} cannot be gone on with here",
            why=f"its folder and checkpoints are on {remote.host}",
            fix=f"call it there: {command_here(run.path, 'resume')}",
        )
    if (hosts := read_hosts(run)) is not None:
        from llmtop.trainer.hosts.starters import require_launcher  # most runs have one machine

        require_launcher(hosts.launcher)
    script = run.spec().script
    if script is None:
        return
    start = again(run, script.command, looked_at=script.pid is not None)
    raise UsageError(
        f"run {run.run_id} cannot be gone on with",
        why="it is a command of your own, which keeps its checkpoints itself",
        fix=f"start it again: {start}",
    )


def resume_run(run: RunDir) -> int:
    """Start a run that has ended again, in its folder: its ranks go on from its newest checkpoint.

    Raises like `start_run` for what this machine lacks.
    """
    require_trainer(run)
    preflight(run.spec(), nvme_bytes=run.prediction().nvme_bytes)
    _keep_environment(run)
    pid = start_supervisor(run)
    # Who looks next must not take the end of before for the end of this.
    log = EventTail(run.events_path(SUPERVISOR))
    while not any(isinstance(event, RunStarted) and event.pid == pid for event in log.poll()):
        if not run.supervisor_alive():
            break
        time.sleep(_POLL_SECONDS)
    return pid


def _keep_environment(run: RunDir) -> None:
    with _needing_room(run, run.environment_path):
        record_environment(run)


@contextmanager
def _needing_room(run: RunDir, path: Path) -> Iterator[None]:
    """Where one file of a run is written before it starts."""
    try:
        yield
    except OSError as error:
        raise JobFailedError(
            f"run {run.run_id} was not started",
            why=f"{path} cannot be written: {error.strerror or error}",
            fix="free some space there",
        ) from error


def start_supervisor(run: RunDir, *, visible_devices: str | None = None) -> int:
    """Start the supervisor of a run in a session of its own; its pid, once it supervises.

    `visible_devices` is CUDA_VISIBLE_DEVICES for it and its ranks; None: as for this process, or else as when
    the run was started before.
    """
    chosen = devices_for(run) if visible_devices is None else visible_devices
    if chosen is not None:
        with _needing_room(run, run.devices_path):
            write_atomic(run.devices_path, document(chosen))
    log_path = run.log_path(SUPERVISOR)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmtop.trainer.supervise", str(run.path.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            env=os.environ if chosen is None else {**os.environ, _DEVICES: chosen},
        )
    finally:
        os.close(descriptor)
    # Whoever launches may live for long (the app): its ended supervisors must not stay as zombies.
    threading.Thread(target=process.wait, name=f"reaper of {process.pid}", daemon=True).start()
    try:
        wait_until_supervised(run, process.pid, process.poll)
    except JobFailedError:
        process.kill()
        raise
    return process.pid


def devices_for(run: RunDir) -> str | None:
    """CUDA_VISIBLE_DEVICES of a run that is started now; None: all that there are.

    What the run was given before counts where the variable is not set, as long as it is enough.
    """
    if _DEVICES in os.environ:
        return os.environ[_DEVICES]
    given = run.given_devices()
    is_enough = given is not None and len(given.split(",")) >= run.spec().options.gpus
    return given if is_enough else None


def wait_until_supervised(run: RunDir, pid: int, exit_code: Callable[[], int | None]) -> None:
    """Until a process that was started for it is the supervisor of a run.

    Raises JobFailedError when it has ended (`exit_code` tells), or does not come to it.
    """
    deadline = time.monotonic() + _START_SECONDS
    while not _supervises(run, pid):
        code = exit_code()
        if code is not None:
            raise _not_started(run, f"its supervisor ended with exit code {code}")
        if time.monotonic() > deadline:
            raise _not_started(run, f"its supervisor was not ready after {_START_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def _supervises(run: RunDir, pid: int) -> bool:
    identity = run.supervisor_identity()
    return identity is not None and identity.pid == pid


def _not_started(run: RunDir, why: str) -> JobFailedError:
    log_path = run.log_path(SUPERVISOR)
    lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = f"; it says: {' / '.join(lines[-5:])}" if lines else ""
    return JobFailedError(f"run {run.run_id} did not start", why=why + said, fix=f"read {log_path}")
