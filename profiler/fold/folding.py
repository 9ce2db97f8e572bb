"""The one fold: events in, one immutable `RunState` out.

Live view, replay and report all call `fold`; there is no other road from a log to what is shown.
Logs of different writers are merged by time, but only as far as they have been read, so no handler
relies on an order between two writers: a late line of a rank never undoes what its end has said.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmtop.profiler.fold.batch import Batch
from llmtop.profiler.fold.handlers import hardware, hosts, ranks, script, snapshots, supervisor
from llmtop.profiler.fold.handlers.handler import Handler
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.events import AnyEvent

_HANDLERS: dict[type, Handler] = {
    **supervisor.HANDLERS,
    **hardware.HANDLERS,
    **ranks.HANDLERS,
    **script.HANDLERS,
    **snapshots.HANDLERS,
    **hosts.HANDLERS,
}
"""One for every kind of event."""


def fold(state: RunState, events: Iterable[AnyEvent]) -> RunState:
    """Apply events in order. Pure: the same events give the same state, however they are cut."""
    batch = Batch(state)
    for event in events:
        batch.see_time(event.t)
        _HANDLERS[type(event)](batch, event)
    return batch.freeze()
