"""A trace in a few figures: what ran longest, for which part of the model, and what waited for what."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from llmtop.profiler.snapshots.collectives import Collective, collectives, is_communication
from llmtop.profiler.snapshots.intervals import Intervals, intersection, length, union
from llmtop.profiler.snapshots.parts import OTHER, Operator, operators
from llmtop.profiler.snapshots.tracefile import PHASE, TraceEvent, TraceFile

TOP = 20
NAME_LENGTH = 200
_MICRO = 1e-6
_WAITS = ("autograd::", "torch::autograd", "c10d::")
_MEMORY_OPERATIONS = ("gpu_memcpy", "gpu_memset")


class Part(Struct, frozen=True, kw_only=True):
    name: str
    seconds: float
    share: float
    """Of all that computed."""


class TopOperation(Struct, frozen=True, kw_only=True):
    """A kernel; on the CPU an operator without those that it called."""

    name: str
    part: str
    seconds: float
    calls: int


class TraceSummary(Struct, frozen=True, kw_only=True, tag="trace"):
    """Seconds are of one rank; shares are of `wall_seconds`, and overlap counts in both."""

    schema_version: int = 1
    rank: int
    world_size: int
    on_device: bool
    """Kernels of a GPU were recorded; else operators of the host stand for them."""
    step: int = 0
    steps: int = 1
    wall_seconds: float
    """From the first phase of a step to the end of the last one."""
    compute_seconds: float
    communication_seconds: float
    memcpy_seconds: float
    idle_seconds: float
    """Nothing of the three ran."""
    overlapped_seconds: float
    """Of the communication, while something computed."""
    overlap_share: float | None = None
    """Of the communication; None where there was none."""
    parts: tuple[Part, ...] = ()
    top: tuple[TopOperation, ...] = ()
    collectives: tuple[Collective, ...] = ()
    events: int = 0


def summarise(trace: TraceFile, *, step: int = 0, steps: int = 1) -> TraceSummary:
    spans = [event for event in trace.events if event.ph == "X"]
    found = operators(spans)
    kernels = [event for event in spans if event.cat == "kernel"]
    wall = _wall(spans)
    computing = [event for event in kernels if not is_communication(event)]
    busy = union(_spans(computing if kernels else [one.event for one in found if _computes(one.event.name)]))
    talk = union(_spans(event for event in spans if is_communication(event)))
    worked = _kernels(computing, found) if kernels else _host_work(found)
    copies = union(_spans(event for event in spans if event.cat in _MEMORY_OPERATIONS))
    compute, communication, memcpy = (intersection(each, wall) for each in (busy, talk, copies))
    overlapped = length(intersection(compute, communication))
    told = length(communication)
    any_of = union([*compute, *communication, *memcpy])
    return TraceSummary(
        rank=trace.distributed.rank,
        world_size=trace.distributed.world_size,
        on_device=bool(kernels),
        step=step,
        steps=steps,
        wall_seconds=length(wall) * _MICRO,
        compute_seconds=length(compute) * _MICRO,
        communication_seconds=told * _MICRO,
        memcpy_seconds=length(memcpy) * _MICRO,
        idle_seconds=(length(wall) - length(any_of)) * _MICRO,
        overlapped_seconds=overlapped * _MICRO,
        overlap_share=overlapped / told if told else None,
        parts=_parts(worked),
        top=_top(worked),
        collectives=collectives(spans, trace.distributed.world_size),
        events=len(trace.events),
    )


_Work = list[tuple[str, str, float]]
"""Name, part and microseconds of what computed."""


def _kernels(kernels: list[TraceEvent], found: list[Operator]) -> _Work:
    parts = {one.event.args.external_id: one.part for one in found}
    return [(event.name, parts.get(event.args.external_id, OTHER), event.dur) for event in kernels]


def _host_work(found: list[Operator]) -> _Work:
    return [(one.event.name, one.part, one.own_us) for one in found if _computes(one.event.name)]


def _computes(name: str) -> bool:
    """Of an operator of the host. Nodes of the backward pass and collectives wait as well, in their hooks."""
    return "::" in name and not name.startswith(_WAITS)


def _wall(spans: list[TraceEvent]) -> Intervals:
    """From the first phase to the last one, or all there is in a trace without them."""
    phases = [event for event in spans if event.name.startswith(PHASE) and event.cat == "user_annotation"]
    chosen = phases or spans
    return [(min(e.ts for e in chosen), max(e.end for e in chosen))] if chosen else []


def _spans(events: Iterable[TraceEvent]) -> Iterable[tuple[float, float]]:
    return ((event.ts, event.end) for event in events)


def _parts(worked: _Work) -> tuple[Part, ...]:
    sums: dict[str, float] = {}
    for _, part, spent in worked:
        sums[part] = sums.get(part, 0.0) + spent
    total = sum(sums.values())
    found = [
        Part(name=name, seconds=spent * _MICRO, share=spent / total if total else 0.0)
        for name, spent in sums.items()
    ]
    return tuple(sorted(found, key=lambda part: -part.seconds))


def _top(worked: _Work) -> tuple[TopOperation, ...]:
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for name, part, spent in worked:
        so_far, calls = sums.get((name, part), (0.0, 0))
        sums[name, part] = (so_far + spent, calls + 1)
    longest = sorted(sums.items(), key=lambda item: -item[1][0])[:TOP]
    return tuple(
        TopOperation(name=name[:NAME_LENGTH], part=part, seconds=spent * _MICRO, calls=calls)
        for (name, part), (spent, calls) in longest
    )
