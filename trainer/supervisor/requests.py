"""Requests to the run as its supervisor sees them: each comes once, and what is answered is in the record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from llmtop.profiler.record.events import Answer, AnyEvent, ControlAnswered
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control

Reply = Callable[[control.Request, Answer, str], None]
"""`Requests.answer`, as those have it who carry out what is asked."""


class Requests:
    def __init__(self, run: RunDir, write: Callable[[AnyEvent], object]) -> None:
        self._run = run
        self._write = write
        # Requests of an earlier attempt are not this one's.
        self.earlier = frozenset(asked.request_id for asked in control.read_requests(run))
        """Ids of those that were there before."""
        self._seen = set(self.earlier)

    def new(self) -> Iterator[control.Request | control.NotARequest]:
        """Those that came since the last call, oldest first."""
        for asked in control.read_requests(self._run, self._seen):
            self._seen.add(asked.request_id)
            yield asked

    def answer(self, asked: control.Request | control.NotARequest, answer: Answer, reason: str = "") -> None:
        self._write(
            ControlAnswered(request_id=asked.request_id, action=asked.action, answer=answer, reason=reason)
        )

    def close(self, stops: Iterable[control.Request], reason: str) -> None:
        """The run has ended: what asked for that is done, what came too late is refused."""
        for stop in stops:
            self.answer(stop, "done", reason)
        for asked in self.new():
            self.answer(asked, "refused", "the run has ended")
