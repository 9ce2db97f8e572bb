"""What was asked of a supervisor that was killed before it had carried it out: settled by the next one.

Without that a change would be under way for ever in the record, also where the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def settle_left(
    run: RunDir,
    left: Iterable[control.Request],
    was_in_force: InForce,
    write: Callable[[AnyEvent], object],
    answer: Reply,
) -> None:
    """`was_in_force` is what the supervisor before left; a relaunch that it was in is taken back already."""
    left = tuple(left)
    told = EventTail(run.events_path(SUPERVISOR)).poll() if left else ()
    taken_up = {event.request_id: event for event in told if isinstance(event, ChangeAsked)}
    began = {event.setting: event for event in told if isinstance(event, RestageBegan)}
    for asked in left:
        change = taken_up.get(asked.request_id)
        if change is None:
            if asked.action == control.SET:
                write(ChangeRefused(request_id=asked.request_id, asked=_words(asked), reason=ENDED_BEFORE))
            answer(asked, "refused", ENDED_BEFORE)
        elif change.setting != was_in_force.setting:
            write(_not_made(run, asked, change, was_in_force))
            answer(asked, "refused", ENDED_BEFORE)
        elif was_in_force.fall_back is not None:
            answer(asked, "refused", ENDED_BEFORE)
        else:
            # It was made, and there was no time left to say so.
            if change.restage and change.setting in began:
                write(Restaged(setting=change.setting, step=began[change.setting].last_step + 1))
            answer(asked, "done", "")


def _not_made(run: RunDir, asked: control.Request, change: ChangeAsked, in_force: InForce) -> AnyEvent:
    if change.restage:
        words = _words(asked)
        return ChangeRefused(
            request_id=asked.request_id, asked=words, reason=ENDED_BEFORE, setting=change.setting
        )
    # The ranks may have made it already, and those that are started now do not have it.
    back_to = in_force.setting if in_force.fall_back is None else in_force.fall_back
    return RestageFailed(
        setting=change.setting,
        back_to=back_to,
        reason=ENDED_BEFORE,
        world_size=run.spec(back_to).world_size,
    )


def _words(asked: control.Request) -> tuple[str, ...]:
    try:
        return control.set_params(asked).words
    except UsageError:
        return ()
