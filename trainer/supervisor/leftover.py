"""What was asked of a supervisor that was killed before it had carried it out: settled by the next one.

Without that a change would be under way for ever in the record, also where the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from llmtop.presets.errors import UsageError
from llmtop.profiler.fold.changestate import ChangeRecord
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.changeevents import ChangeAsked, ChangeRefused, Restaged, RestageFailed
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.rundir import SUPERVISOR, InForce, RunDir
from llmtop.trainer import control
from llmtop.trainer.supervisor.requests import Reply

ENDED_BEFORE = "the supervisor ended before it was carried out"
NO_STEP_YET = "the supervisor ended before a step was made on it"


def settle_left(
    run: RunDir,
    earlier: Container[str],
    was_in_force: InForce,
    write: Callable[[AnyEvent], object],
    answer: Reply,
) -> None:
    """Answer those of the `earlier` requests, ids, that have no end, and end their changes in the record; and
    that of a run that had ended and went on with it.

    `was_in_force` is what the supervisor before left; a relaunch that it was in is taken back already, and
    one that the run is to go on with is not told yet.
    """
    if not earlier and not any(run.settings()):
        return
    events = EventTail(run.events_path(SUPERVISOR)).poll()
    records = fold(RunState(), events).changes.records
    told = {_request_id(record): record for record in records}
    for asked in control.pending(run, events):
        if asked.request_id in earlier:
            _settle(run, asked, told.get(asked.request_id), was_in_force, write, answer)
    for record in records:
        # One that nobody asked a live run for, and that took a relaunch.
        if record.began is not None and record.status == "under way" and not _request_id(record):
            write(_ended_on(run, record.began.setting, was_in_force))


def _request_id(record: ChangeRecord) -> str:
    told = record.asked or record.refused
    return told.request_id if told is not None else ""


def _settle(
    run: RunDir,
    asked: control.Request,
    told: ChangeRecord | None,
    was_in_force: InForce,
    write: Callable[[AnyEvent], object],
    answer: Reply,
) -> None:
    """An end that the record has is the true one: then only the answer was missing."""
    if told is None:
        if asked.action == control.SET:
            write(ChangeRefused(request_id=asked.request_id, asked=_words(asked), reason=ENDED_BEFORE))
        answer(asked, "refused", ENDED_BEFORE)
    elif told.asked is None or told.status in ("refused", "failed"):
        answer(asked, "refused", told.reason)
    elif told.setting == was_in_force.setting and was_in_force.fall_back is not None:
        # It is taken back, also where the disk has had no room to say so yet.
        answer(asked, "refused", ENDED_BEFORE)
    elif told.status == "applied":
        answer(asked, "done", "")
    elif _is_made(told.asked, was_in_force):
        # It was made, and there was no time left to say so.
        if told.asked.restage and told.began is not None:
            write(Restaged(setting=told.asked.setting, step=told.began.last_step + 1))
        answer(asked, "done", "")
    else:
        write(_not_made(run, asked, told.asked, was_in_force, begun=told.began is not None))
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


def _ended_on(run: RunDir, setting: int, in_force: InForce) -> AnyEvent:
    """Of one that the run went on with: nothing else was in force then, so that this is not taken back."""
    back_to = in_force.setting if in_force.ended_on is None else in_force.ended_on
    return RestageFailed(
        setting=setting, back_to=back_to, reason=NO_STEP_YET, world_size=run.spec(back_to).world_size
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
