"""Requests to a running supervisor: one file each, written aside and renamed; the answers are events."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.foreign import read_json, why_unreadable
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent, ControlAnswered, RunEnded
from llmtop.profiler.record.remote import command_here
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.record.snapshotevents import SnapshotParams
from llmtop.profiler.record.wholefile import random_hex, write_atomic

STOP = "stop"
SET = "set"
SNAPSHOT = "snapshot"
ACTIONS = (STOP, SET, SNAPSHOT)

_LARGEST_REQUEST_BYTES = 1 << 20
_POLL_SECONDS = 0.05
_EXIT_SECONDS = 10.0
"""How long a supervisor may take to leave after its last event."""


class Request(Struct, frozen=True, kw_only=True):
    request_id: str
    action: str
    params: dict[str, Any] = {}
    asked_at: float = 0.0
    """Wall clock."""
    asked_by: int = 0
    """Process that asked."""


def request(run: RunDir, action: str, params: dict[str, Any] | None = None) -> str:
    """Ask the supervisor for something; the id under which it will answer. Raises when there is none."""
    run.require_own("takes no requests")
    if not run.supervisor_alive():
        raise LlmtopError(
            f"run {run.run_id} takes no requests",
            why="its supervisor is gone: the run has ended",
            fix=f"see how: {command_here(run.path, 'report')}",
        )
    # Ids sort by the time of asking, so requests are answered in that order.
    request_id = f"{time.time_ns():020d}-{random_hex(3)}"
    asked = Request(
        request_id=request_id,
        action=action,
        params=params or {},
        asked_at=time.time(),
        asked_by=os.getpid(),
    )
    try:
        write_atomic(run.control_dir / f"{request_id}.json", msgspec.json.encode(asked))
    except OSError as error:
        raise LlmtopError(
            f"the request to run {run.run_id} cannot be written",
            why=error.strerror or str(error),
            fix=f"make {run.control_dir} writable and free some space{_without_requests(run)}",
        ) from error
    return request_id


def _without_requests(run: RunDir) -> str:
    """How the run is ended by somebody who cannot write into its folder."""
    supervisor = run.supervisor_identity()
    return "" if supervisor is None else f"; kill {supervisor.pid} ends it, with a checkpoint where one fits"


def stop(run: RunDir, save: bool) -> str:
    """Ask the run to end after the step that it is in, with or without a checkpoint."""
    return request(run, STOP, {"save": save})


class SetParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request to change a live run holds."""

    words: tuple[str, ...]
    """`key=value`, as typed."""
    keep_global_batch: bool = True
    force: bool = False
    """Also when it is predicted not to fit."""
    refusal: str = ""
    """Why whoever asks has refused it already: it is recorded, and not made whatever the run is by now."""
    refusal_fix: str = ""


def set_params(asked: Request) -> SetParams:
    """What a request to change a live run asks for; raises UsageError where it holds no such thing."""
    try:
        return msgspec.convert(asked.params, SetParams)
    except msgspec.ValidationError as error:
        raise UsageError("the request holds no change", why=str(error)) from error


def change(run: RunDir, params: SetParams) -> str:
    """Ask the run to go over to another setting; the id under which the supervisor answers."""
    return request(run, SET, msgspec.to_builtins(params))


def snapshot_params(asked: Request) -> SnapshotParams:
    """What a request for a snapshot asks for; raises UsageError where it holds no such thing."""
    try:
        return msgspec.convert(asked.params, SnapshotParams)
    except msgspec.ValidationError as error:
        raise UsageError("the request holds no snapshot", why=str(error)) from error


def snapshot(run: RunDir, params: SnapshotParams) -> str:
    """Ask the ranks to write what they hold or do; the id under which the supervisor answers."""
    return request(run, SNAPSHOT, msgspec.to_builtins(params))


class NotARequest(Struct, frozen=True, kw_only=True):
    """A file in the place of a request that is none of the run's owner."""

    request_id: str
    action: str = ""
    why: str


def read_requests(run: RunDir, known: Container[str] = ()) -> list[Request | NotARequest]:
    """All requests ever made but those that are `known` by their ids, oldest first."""
    paths = sorted(path for path in run.control_dir.glob("*.json") if path.stem not in known)
    return [_read(path) for path in paths]


def _read(path: Path) -> Request | NotARequest:
    """Only its owner, and the superuser, may ask something of a run."""
    try:
        asked = read_json(path, Request, _LARGEST_REQUEST_BYTES, own=True)
    except (OSError, msgspec.MsgspecError) as error:
        return NotARequest(
            request_id=path.stem, why=f"the file holds no request that is taken: {why_unreadable(error)}"
        )
    if asked.request_id != path.stem:
        return NotARequest(request_id=path.stem, why="the file is not called by the id of its request")
    return asked


def answers(run: RunDir) -> dict[str, tuple[ControlAnswered, ...]]:
    """Every answer so far by request, in the order given."""
    return _Answers(run).poll()


class _Answers:
    """The same for whoever waits: what was read is not read again."""

    def __init__(self, run: RunDir) -> None:
        self._tail = EventTail(run.events_path(SUPERVISOR))
        self._found: dict[str, tuple[ControlAnswered, ...]] = {}

    def poll(self) -> dict[str, tuple[ControlAnswered, ...]]:
        for event in self._tail.poll():
            if isinstance(event, ControlAnswered):
                self._found[event.request_id] = (*self._found.get(event.request_id, ()), event)
        return self._found


def wait_for_answer(run: RunDir, request_id: str, timeout: float) -> ControlAnswered | None:
    """The first answer to a request; None while there is none, or when no supervisor is left to give one."""
    deadline, answered = time.monotonic() + timeout, _Answers(run)
    while True:
        # Asked before reading: a supervisor that leaves in between has then answered already.
        alive = run.supervisor_alive()
        given = answered.poll().get(request_id)
        if given:
            return given[0]
        if not alive or time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)


def wait_until_settled(run: RunDir, request_id: str, timeout: float) -> ControlAnswered | None:
    """The answer that says what became of a request; None while it is under way, or nobody is left to say."""
    deadline, answered = time.monotonic() + timeout, _Answers(run)
    while True:
        alive = run.supervisor_alive()
        given = [answer for answer in answered.poll().get(request_id, ()) if answer.answer != "accepted"]
        if given:
            return given[0]
        if not alive or time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)


def pending(run: RunDir, told: Iterable[AnyEvent] | None = None) -> tuple[Request, ...]:
    """Requests that were neither carried out nor refused yet, oldest first.

    `told`: what the supervisor has written, for whoever has read that already.
    """
    told = EventTail(run.events_path(SUPERVISOR)).poll() if told is None else told
    settled = {
        event.request_id
        for event in told
        if isinstance(event, ControlAnswered) and event.answer != "accepted"
    }
    return tuple(
        asked
        for asked in read_requests(run)
        if isinstance(asked, Request) and asked.request_id not in settled
    )


def wait_for_end(run: RunDir, timeout: float) -> RunEnded | None:
    """Wait until the run has ended and its supervisor is gone; None when that takes too long.

    None as well for a supervisor that died without writing how its run ended.
    """
    deadline = time.monotonic() + timeout
    tail = EventTail(run.events_path(SUPERVISOR))
    ended: RunEnded | None = None
    while True:
        # Asked before reading: a supervisor that leaves in between has then written its end already.
        alive = run.supervisor_alive()
        for event in tail.poll():
            if isinstance(event, RunEnded):
                ended = event
                deadline = max(deadline, time.monotonic() + _EXIT_SECONDS)
        if not alive or time.monotonic() >= deadline:
            return ended
        time.sleep(_POLL_SECONDS)
