"""Replays the allocator's own record of a step: what was allocated at the peak of each phase, by name.

Pure arithmetic, without torch. A *state* is a number of events: state k is what lives after the first k of
them. An *instance* is one allocation from its birth to its death; an address may serve many of them.

A block dies when its free is asked for: that is what the allocator counts as allocated. It stays *active*
until the free is completed, which is at once unless another stream still uses the block. The allocator counts
what was asked for of active blocks only, so that is what a replay can be compared with to the byte. What is
allocated follows from the same events, because each completion belongs to a request, which is checked too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

from llmtop.profiler.memory.result import Component, Moment

CLOCK_TOLERANCE_US = 5
"""The trace keeps whole microseconds, converted from the processor's counter."""

_PRIORITY = (
    Component.PARAMETERS,
    Component.MASTER_PARAMETERS,
    Component.OPTIMIZER_STATE,
    Component.COMMUNICATION_BUFFERS,
    Component.GRADIENTS,
    Component.LOGITS,
    Component.ACTIVATIONS,
    Component.WORKSPACE,
)
"""Where one instance was seen as several things, the first of these is its name."""
_RANK = {component: rank for rank, component in enumerate(_PRIORITY)}


class Trace(Struct, frozen=True, kw_only=True):
    """One device's allocations and frees in the order in which they happened. Lists of one length."""

    addresses: list[int]
    deltas: list[int]
    """Bytes asked for: more when allocated, less when a free is asked for, zero when it is completed."""
    active_deltas: list[int]
    """The same of active blocks: zero when a free is asked for, negative when it is completed."""
    times_us: list[int]
    live_at_end: dict[int, int]
    """Address to bytes asked for, of what lives after the last event."""
    pending_at_end: dict[int, int] = {}
    """The same of what is active and no longer lives."""


class Span(Struct, frozen=True, kw_only=True):
    """A phase, as the states at its two borders."""

    phase: str
    first: int
    last: int
    began_us: int
    ended_us: int


class Seen(NamedTuple):
    """A storage that somebody recognised at some time."""

    time_us: int
    address: int
    size_bytes: int
    component: Component


class Instance(NamedTuple):
    address: int
    size_bytes: int
    born: int
    """Index of the event that allocated it; -1: before the trace began."""
    died: int
    """Index of the event that freed it; the number of events: it outlived the trace."""


class TransientSizes(Struct, frozen=True, kw_only=True):
    """What unseen instances of exactly these sizes are."""

    logits: frozenset[int] = frozenset()
    """Copies and gradients of the logits, which only the loss function sees: made in the forward pass, or in
    the backward pass before the first gradient of a weight."""
    workspaces: frozenset[int] = frozenset()
    """Of the math libraries: they live on from their first use."""


class PhasePeak(Struct, frozen=True, kw_only=True):
    """The largest state of one phase, by what was asked for."""

    phase: str
    state: int
    requested_bytes: int
    active_peak_bytes: int
    """The largest of the same states' active totals, maybe another one's."""
    components: dict[Component, int]
    unnamed: tuple[int, ...]
    """Instances that nobody recognised and that live across a border of the phase, largest first."""
    moment: Moment


class Replay:
    """A trace with the totals of all its states and the life of every instance."""

    def __init__(self, trace: Trace) -> None:
        """Raises ValueError for a trace whose frees do not belong together."""
        _check_pairs(trace)
        self._trace = trace
        live, pending = sum(trace.live_at_end.values()), sum(trace.pending_at_end.values())
        self.totals = list(accumulate(trace.deltas, initial=live - sum(trace.deltas)))
        self.active_totals = list(
            accumulate(trace.active_deltas, initial=live + pending - sum(trace.active_deltas))
        )
        self._instances = list(_lives(trace))

    @property
    def events(self) -> int:
        return len(self._trace.deltas)

    def peak_state(self, first: int, last: int) -> int:
        """The earliest state of the largest total, borders included."""
        return max(range(first, last + 1), key=self.totals.__getitem__)

    def active_peak_bytes(self, first: int, last: int) -> int:
        """The largest active total, borders included."""
        return max(self.active_totals[first : last + 1])

    def alive(self, state: int) -> list[Instance]:
        return [life for life in self._instances if life.born < state <= life.died]

    def time_us(self, event: int) -> float:
        return self._trace.times_us[event] if event < self.events else float("inf")

    def born_us(self, instance: Instance) -> float:
        return self._trace.times_us[instance.born] if instance.born >= 0 else float("-inf")

    def died_us(self, instance: Instance) -> float:
        return self.time_us(instance.died)

    def clock_shift_us(self, spans: Sequence[Span]) -> int:
        """What to add to the host's times to get the trace's: zero unless a border proves otherwise.

        A border lies between two events, which is known without clocks.
        """
        times = self._trace.times_us
        least, most = float("-inf"), float("inf")
        for state, at in [(s.first, s.began_us) for s in spans] + [(s.last, s.ended_us) for s in spans]:
            if state > 0:
                least = max(least, times[state - 1] - at)
            if state < self.events:
                most = min(most, times[state] - at)
        if least > 0:
            return int(least)
        return int(most) if most < 0 else 0


def _check_pairs(trace: Trace) -> None:
    """What was asked to be freed is completed with the same size, or pending at the end."""
    asked: dict[int, int] = {}
    for address, delta, active in zip(trace.addresses, trace.deltas, trace.active_deltas, strict=True):
        if delta < 0:
            asked[address] = -delta
        if active < 0 and asked.pop(address, -active) != -active:
            raise ValueError(f"the free of {-active} bytes at {address:#x} was asked for with another size")
    if not asked.items() <= trace.pending_at_end.items():
        raise ValueError("frees were asked for that are neither completed nor pending")


def _lives(trace: Trace) -> Iterable[Instance]:
    born: dict[int, int] = {}
    for index, (address, delta) in enumerate(zip(trace.addresses, trace.deltas, strict=True)):
        if delta > 0:
            born[address] = index
        elif delta < 0:
            yield Instance(address, -delta, born.pop(address, -1), index)
    end = len(trace.deltas)
    for address, size in trace.live_at_end.items():
        yield Instance(address, size, born.get(address, -1), end)


def in_trace_time(seen: Iterable[Seen], shift_us: int) -> list[Seen]:
    return list(seen) if not shift_us else [one._replace(time_us=one.time_us + shift_us) for one in seen]


def phase_peak(replay: Replay, span: Span, seen: list[Seen], sizes: TransientSizes) -> PhasePeak:
    """Name everything that was alive at the largest state of a phase. `seen` is in the trace's time."""
    state = replay.peak_state(span.first, span.last)
    alive = replay.alive(state)
    names = _names(replay, alive, seen)
    until_us = _loss_until_us(replay, span, seen)
    components: dict[Component, int] = {}
    unnamed: list[int] = []
    kept = 0
    for instance in alive:
        name = names.get(instance.address) or _by_size(replay, instance, span, sizes, until_us)
        if name is None:
            unnamed.append(instance.size_bytes)
        else:
            components[name] = components.get(name, 0) + instance.size_bytes
            if name is Component.ACTIVATIONS and instance.born < span.first:
                kept += instance.size_bytes
    return PhasePeak(
        phase=span.phase,
        state=state,
        requested_bytes=replay.totals[state],
        active_peak_bytes=replay.active_peak_bytes(span.first, span.last),
        components=components,
        unnamed=tuple(sorted(unnamed, reverse=True)),
        moment=_moment(replay, span, components, kept, seen),
    )


def _names(replay: Replay, alive: list[Instance], seen: list[Seen]) -> dict[int, Component]:
    """Address to name. At one state an address belongs to one instance."""
    lives = {
        life.address: (life.size_bytes, replay.born_us(life), replay.died_us(life))
        for life in alive
        if life.size_bytes
    }
    names: dict[int, Component] = {}
    for time_us, address, size, component in seen:
        life = lives.get(address)
        if life is None or life[0] != size:
            continue
        if life[1] - CLOCK_TOLERANCE_US <= time_us <= life[2] + CLOCK_TOLERANCE_US:
            known = names.get(address)
            if known is None or _RANK[component] < _RANK[known]:
                names[address] = component
    return names


def _loss_until_us(replay: Replay, span: Span, seen: list[Seen]) -> float:
    """Until when what a phase makes may belong to the loss."""
    if span.phase == "forward":
        return float("inf")
    if span.phase != "backward":
        return float("-inf")
    began = replay.time_us(span.first)
    return min((one.time_us for one in seen if _is_gradient_after(one, began)), default=float("inf"))


def _is_gradient_after(one: Seen, began_us: float) -> bool:
    return one.component is Component.GRADIENTS and one.time_us >= began_us


def _by_size(
    replay: Replay, instance: Instance, span: Span, sizes: TransientSizes, loss_until_us: float
) -> Component | None:
    in_trace = instance.born >= 0
    if in_trace and instance.size_bytes in sizes.logits and replay.born_us(instance) <= loss_until_us:
        return Component.LOGITS
    if instance.size_bytes in sizes.workspaces:
        return Component.WORKSPACE
    came_and_went = span.first <= instance.born and instance.died < span.last
    return Component.WORKSPACE if came_and_went else None


def _moment(
    replay: Replay, span: Span, components: dict[Component, int], kept: int, seen: list[Seen]
) -> Moment:
    """Told from what is alive: logits only wait for the loss, activations go block by block."""
    if span.phase == "forward":
        return Moment.FORWARD_END
    if span.phase == "optimizer":
        return Moment.OPTIMIZER_STEP
    if span.phase != "backward":
        return Moment.STEADY
    if components.get(Component.LOGITS):
        return Moment.LOSS_BACKWARD
    at_start = replay.alive(span.first)
    names = _names(replay, at_start, seen)
    kept_at_start = sum(
        life.size_bytes for life in at_start if names.get(life.address) is Component.ACTIVATIONS
    )
    return Moment.LAST_BLOCK_BACKWARD if 2 * kept > kept_at_start else Moment.FIRST_BLOCK_BACKWARD
