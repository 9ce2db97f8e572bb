"""What was asked of a supervisor that was killed before it had carried it out: settled by the next one.

Without that a change would be under way for ever in the record, also where the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.changeevents import (
    ChangeAsked,
    ChangeRefused,
    RestageBegan,
    Restaged,
    RestageFailed,
)
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.rundir import SUPERVISOR, InForce, RunDir
from llmtop.trainer import control
from llmtop.trainer.supervisor.requests import Reply

ENDED_BEFORE = "the supervisor ended before it was carried out"


class _Told(Struct, kw_only=True):
    """How far the record has followed the changes; the last four by setting."""

    taken_up: dict[str, ChangeAsked] = {}
    """By request, as `refused_at_once`."""
    refused_at_once: dict[str, str] = {}
    """Why."""
    began: dict[int, RestageBegan] = {}
    made: set[int] = set()
    not_made: dict[int, str] = {}
    """Why."""


def settle_left(
    run: RunDir,
    earlier: Container[str],
    was_in_force: InForce,
    write: Callable[[AnyEvent], object],
    answer: Reply,
) -> None:
    """Answer those of the `earlier` requests, ids, that have no end, and end their changes in the record.

    `was_in_force` is what the supervisor before left; a relaunch that it was in is taken back already, and
    one that the run is to go on with is not told yet.
    """
    if not earlier:
        return
    events = EventTail(run.events_path(SUPERVISOR)).poll()
    told = _told(events)
    if was_in_force.fall_back is not None:
        # Also where the disk has had no room for that yet.
        told.not_made.setdefault(was_in_force.setting, ENDED_BEFORE)
    for asked in control.pending(run, events):
        if asked.request_id in earlier:
            _settle(run, asked, told, was_in_force, write, answer)


def _told(events: Iterable[AnyEvent]) -> _Told:
    told = _Told()
    for event in events:
        if isinstance(event, ChangeAsked):
            told.taken_up[event.request_id] = event
        elif isinstance(event, RestageBegan):
            told.began[event.setting] = event
        elif isinstance(event, Restaged):
            told.made.add(event.setting)
        elif isinstance(event, (RestageFailed, ChangeRefused)):
            _add_not_made(told, event)
    return told


def _add_not_made(told: _Told, event: RestageFailed | ChangeRefused) -> None:
    if event.setting is not None:
        told.not_made[event.setting] = event.reason
    elif isinstance(event, ChangeRefused):
        told.refused_at_once[event.request_id] = event.reason


def _settle(
    run: RunDir,
    asked: control.Request,
    told: _Told,
    was_in_force: InForce,
    write: Callable[[AnyEvent], object],
    answer: Reply,
) -> None:
    """An end that the record has is the true one: then only the answer was missing."""
    change = told.taken_up.get(asked.request_id)
    if change is None:
        reason = told.refused_at_once.get(asked.request_id, "")
        if asked.action == control.SET and not reason:
            write(ChangeRefused(request_id=asked.request_id, asked=_words(asked), reason=ENDED_BEFORE))
        answer(asked, "refused", reason or ENDED_BEFORE)
    elif change.setting in told.not_made:
        answer(asked, "refused", told.not_made[change.setting])
    elif change.setting in told.made:
        answer(asked, "done", "")
    elif _is_made(change, was_in_force):
        # It was made, and there was no time left to say so.
        if change.restage and change.setting in told.began:
            write(Restaged(setting=change.setting, step=told.began[change.setting].last_step + 1))
        answer(asked, "done", "")
    else:
        write(_not_made(run, asked, change, was_in_force, begun=change.setting in told.began))
        answer(asked, "refused", ENDED_BEFORE)


def _is_made(change: ChangeAsked, in_force: InForce) -> bool:
    """Whether the supervisor before trained on it for good."""
    if change.restage or in_force.ended_on is None:
        return change.setting == in_force.setting
    return change.setting == in_force.ended_on


def _not_made(
    run: RunDir, asked: control.Request, change: ChangeAsked, in_force: InForce, *, begun: bool
) -> AnyEvent:
    if change.restage and not begun:
        words = _words(asked)
        return ChangeRefused(
            request_id=asked.request_id, asked=words, reason=ENDED_BEFORE, setting=change.setting
        )
    # Of one between two steps, the ranks may have made it already, and those that are started now do not
    # have it.
    back_to = _went_back_to(in_force)
    return RestageFailed(
        setting=change.setting,
        back_to=back_to,
        reason=ENDED_BEFORE,
        world_size=run.spec(back_to).world_size,
    )


def _went_back_to(in_force: InForce) -> int:
    """Before another one was chosen for the run to go on with; after a trial that may be the one on trial."""
    if in_force.ended_on is not None:
        return in_force.ended_on
    return in_force.setting if in_force.fall_back is None else in_force.fall_back


def _words(asked: control.Request) -> tuple[str, ...]:
    try:
        return control.set_params(asked).words
    except UsageError:
        return ()
