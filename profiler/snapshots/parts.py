"""Which part of a model each operator of a trace worked for.

By the ranges that llmtop put around modules, and for the backward pass by the number that joins its nodes to
the operators that made them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from llmtop.profiler.snapshots.tracefile import PHASE, PREFIX, TraceEvent

OTHER = "other"
_LOSS = re.compile(r"cross_entropy|nll_loss|log_softmax|CrossEntropy|NllLoss|LogSoftmax")
_NODE = "autograd::engine::evaluate_function: "
_PASSES_ON = 1.0e-3
"""Microseconds that an operator may end after its caller: times are rounded."""


class Operator(Struct, frozen=True):
    """An operator on a thread of the host."""

    event: TraceEvent
    part: str
    own_us: float
    """Without the operators that it called."""


class _Frame(Struct):
    """What an event that is under way on a thread means for those inside it."""

    event: TraceEvent
    part: str
    phase: str
    operator: int | None
    """Of the operators found so far, itself or the nearest around it."""


class _Thread:
    """One thread's events, from outside in."""

    def __init__(self, joined: dict[int, str]) -> None:
        self._joined = joined
        self._open: list[_Frame] = []
        self.found: list[list[Any]] = []
        """Event, part, own time."""
        self.made: dict[int, str] = {}
        """Sequence number to the part of the last operator that had it: the one that made the node."""

    def see(self, event: TraceEvent) -> None:
        while self._open and event.ts >= self._open[-1].event.end - _PASSES_ON:
            self._open.pop()
        around = self._open[-1] if self._open else None
        part, phase = (around.part, around.phase) if around is not None else (OTHER, "")
        if event.cat == "user_annotation":
            if event.name.startswith(PHASE):
                phase = event.name.removeprefix(PHASE)
                part = "optimizer" if phase == "optimizer" else OTHER
            elif event.name.startswith(PREFIX):
                part = event.name.removeprefix(PREFIX)
            self._open.append(_Frame(event, part, phase, None if around is None else around.operator))
            return
        part = self._part(event, part)
        caller = None if around is None else around.operator
        if caller is not None:
            self.found[caller][2] -= event.dur
        self._open.append(_Frame(event, part, phase, len(self.found)))
        self.found.append([event, part, event.dur])
        if event.args.sequence is not None and not event.name.startswith(_NODE):
            self.made[event.args.sequence] = part

    def _part(self, event: TraceEvent, inherited: str) -> str:
        if event.name.startswith(_NODE):
            if "AccumulateGrad" in event.name:
                return "gradients"
            if _LOSS.search(event.name):
                return "loss"
            number = event.args.sequence
            return inherited if number is None else self._joined.get(number, inherited)
        if inherited in (OTHER, "head") and _LOSS.search(event.name):
            return "loss"
        return inherited


def operators(events: Iterable[TraceEvent]) -> list[Operator]:
    """All operators of all threads. The thread with the phases of a step makes the graph."""
    threads: dict[Any, list[TraceEvent]] = {}
    for event in events:
        if event.ph == "X" and event.cat in ("cpu_op", "user_annotation"):
            threads.setdefault(event.tid, []).append(event)
    for each in threads.values():
        each.sort(key=lambda event: (event.ts, -event.dur))
    leading = next(
        (tid for tid, each in threads.items() if any(e.name.startswith(PHASE) for e in each)), None
    )
    order = sorted(threads, key=lambda tid: tid != leading)
    joined: dict[int, str] = {}
    found: list[Operator] = []
    for tid in order:
        thread = _Thread(joined)
        if not joined:
            # On the CPU the leading thread runs the backward pass too: it reads what it has made.
            thread._joined = thread.made
        for event in threads[tid]:
            thread.see(event)
        joined = joined or thread.made
        found += _operators(thread)
    return found


def _operators(thread: _Thread) -> Iterator[Operator]:
    for event, part, own_us in thread.found:
        yield Operator(event, part, max(0.0, own_us))
