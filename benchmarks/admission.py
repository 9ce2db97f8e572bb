"""Lets runs share devices as long as their predicted upper bounds together fit, in order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from llmtop.profiler.memory.result import Prediction


class Room(Struct, frozen=True, kw_only=True):
    """Bytes that a run may come to need, or that there are; None: not known, and so not limited."""

    device_bytes: int | None
    host_bytes: int | None

    def holds(self, needs: list[Room]) -> bool:
        return _fits([need.device_bytes for need in needs], self.device_bytes) and _fits(
            [need.host_bytes for need in needs], self.host_bytes
        )


def _fits(needed: list[int | None], limit: int | None) -> bool:
    return limit is None or sum(bytes_ or 0 for bytes_ in needed) <= limit


PAGED = "paged"
"""How the optimizers begin that keep their state in managed memory."""


def need_of(prediction: Prediction, optimizer: str = "") -> Room:
    """The upper bound of what a run takes from each device, pool included, and from the host.

    More managed memory than a device has free can hang it, so such a run has the device for itself.
    """
    needed = prediction.needed_bytes
    if optimizer.startswith(PAGED) and prediction.device_memory_bytes is not None:
        return Room(device_bytes=2 * prediction.device_memory_bytes, host_bytes=prediction.host_bytes)
    if needed is not None:
        # Where there is room the allocator keeps more than it has given out.
        outside = needed - prediction.peak_allocated_upper_bytes
        needed = max(needed, prediction.peak_reserved_bytes[1] + outside)
    return Room(device_bytes=needed, host_bytes=prediction.host_bytes)


class Pass:
    """One run's stay inside."""

    def __init__(self, need: Room) -> None:
        self.need = need
        self.alone = True
        """Whether nobody else has been inside so far."""


class Gate:
    """`enter` waits until the run fits beside those inside; one that fits nowhere goes in alone."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._changed = threading.Condition()
        self._inside: list[Pass] = []
        self._queue: deque[Pass] = deque()

    @contextmanager
    def enter(self, need: Room) -> Iterator[Pass]:
        ticket = Pass(need)
        with self._changed:
            self._queue.append(ticket)
            self._changed.wait_for(
                lambda: self._queue[0] is ticket and (not self._inside or self._room.holds(self._with(need)))
            )
            self._queue.popleft()
            self._inside.append(ticket)
            for each in self._inside if len(self._inside) > 1 else ():
                each.alone = False
            self._changed.notify_all()
        try:
            yield ticket
        finally:
            with self._changed:
                self._inside.remove(ticket)
                self._changed.notify_all()

    def _with(self, need: Room) -> list[Room]:
        return [*(each.need for each in self._inside), need]
