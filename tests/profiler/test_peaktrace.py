"""The replay of an allocator's trace, against brute force and against small histories told by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.probes.peaktrace import (
    PhasePeak,
    Replay,
    Seen,
    Span,
    Trace,
    TransientSizes,
    in_trace_time,
    phase_peak,
)

NO_SIZES = TransientSizes()


@dataclass
class Heap:
    """An allocator that keeps a trace, as the real one does. Freed addresses are used again at once."""

    live: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    """Freed while another stream used it."""
    spare: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)
    active_deltas: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    now: int = 1000
    recording: bool = False

    def alloc(self, size: int) -> int:
        address = self.spare.pop() if self.spare else 512 * (1 + len(self.live) + len(self.spare))
        while address in self.live or address in self.pending:
            address += 512
        self.live[address] = size
        self._write(address, size, size)
        return address

    def free(self, address: int) -> None:
        self.ask(address)
        self.complete(address)

    def ask(self, address: int) -> None:
        self.pending[address] = self.live.pop(address)
        self._write(address, -self.pending[address], 0)

    def complete(self, address: int) -> None:
        self._write(address, 0, -self.pending.pop(address))
        self.spare.append(address)

    def _write(self, address: int, delta: int, active_delta: int) -> None:
        self.now += 20
        if self.recording:
            self.addresses.append(address)
            self.deltas.append(delta)
            self.active_deltas.append(active_delta)
            self.times.append(self.now)

    @property
    def state(self) -> int:
        return len(self.deltas)

    def seen(self, address: int, component: Component) -> Seen:
        return Seen(self.now + 10, address, self.live[address], component)

    def trace(self) -> Trace:
        return Trace(
            addresses=self.addresses,
            deltas=self.deltas,
            active_deltas=self.active_deltas,
            times_us=self.times,
            live_at_end=dict(self.live),
            pending_at_end=dict(self.pending),
        )


def span(phase: str, first: int, last: int, *, began_us: int = 0, ended_us: int = 0) -> Span:
    return Span(phase=phase, first=first, last=last, began_us=began_us, ended_us=ended_us)


Steps = list[tuple[str, int, int]]
DOINGS = st.sampled_from(["alloc", "alloc", "ask", "complete"])
steps = st.lists(st.tuples(DOINGS, st.integers(1, 9999), st.integers(0, 99)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(steps, steps, st.integers(0, 60), st.integers(0, 60))
def test_totals_lives_and_peaks_are_those_of_the_allocator(
    before: Steps, during: Steps, one: int, other: int
) -> None:
    """Frees are completed late or not at all, some of those from before the recording within it."""
    heap = Heap()
    snapshots: list[dict[int, int]] = []
    active: list[int] = []

    def snapshot() -> None:
        snapshots.append(dict(heap.live))
        active.append(sum(heap.live.values()) + sum(heap.pending.values()))

    def play(history: Steps) -> None:
        for doing, size, which in history:
            if doing == "ask" and heap.live:
                heap.ask(sorted(heap.live)[which % len(heap.live)])
            elif doing == "complete" and heap.pending:
                heap.complete(sorted(heap.pending)[which % len(heap.pending)])
            else:
                heap.alloc(size)
            if heap.recording:
                snapshot()

    play(before)
    heap.recording = True
    snapshot()
    play(during)
    replay = Replay(heap.trace())
    assert replay.totals == [sum(live.values()) for live in snapshots]
    assert replay.active_totals == active
    for state, live in enumerate(snapshots):
        alive = replay.alive(state)
        assert {instance.address: instance.size_bytes for instance in alive} == live
        assert len(alive) == len(live)
    first, last = sorted(min(at, replay.events) for at in (one, other))
    peak = phase_peak(replay, span("forward", first, last), [], NO_SIZES)
    assert peak.requested_bytes == max(replay.totals[first : last + 1])
    assert peak.active_peak_bytes == max(active[first : last + 1]) >= peak.requested_bytes
    assert sum(peak.components.values()) + sum(peak.unnamed) == peak.requested_bytes


def rounded(size: int) -> int:
    return -(-size // 512) * 512


@settings(max_examples=200, deadline=None)
@given(steps)
def test_what_rounding_adds_is_never_negative_and_bounded(history: Steps) -> None:
    """Though the largest state of the rounded sizes may be another one than that of those asked for."""
    heap = Heap(recording=True)
    largest = 0
    for doing, size, which in history:
        if doing == "ask" and heap.live:
            heap.ask(sorted(heap.live)[which % len(heap.live)])
        elif doing == "complete" and heap.pending:
            heap.complete(sorted(heap.pending)[which % len(heap.pending)])
        else:
            heap.alloc(size)
        largest = max(largest, sum(map(rounded, heap.live.values())))
    replay = Replay(heap.trace())
    peak = phase_peak(replay, span("forward", 0, replay.events), [], NO_SIZES)
    most_alive = max(len(replay.alive(state)) for state in range(replay.events + 1))
    assert 0 <= largest - peak.requested_bytes < 512 * max(1, most_alive)


def test_what_another_stream_uses_is_active_and_not_alive() -> None:
    heap = Heap(recording=True)
    first, second = heap.alloc(100), heap.alloc(30)
    heap.ask(first)
    third = heap.alloc(50)
    assert third not in (first, second)
    heap.complete(first)
    replay = Replay(heap.trace())
    assert replay.totals == [0, 100, 130, 30, 80, 80]
    assert replay.active_totals == [0, 100, 130, 130, 180, 80]
    late = phase_peak(replay, span("backward", 3, 5), [], NO_SIZES)
    assert (late.requested_bytes, late.active_peak_bytes) == (80, 180)
    assert late.unnamed == (50, 30)


def test_frees_that_do_not_belong_together_are_refused() -> None:
    heap = Heap(recording=True)
    heap.ask(heap.alloc(100))
    heap.pending.clear()
    with pytest.raises(ValueError, match="neither completed nor pending"):
        Replay(heap.trace())
    other = Heap(recording=True)
    address = other.alloc(100)
    other.ask(address)
    other.pending[address] = 90
    other.complete(address)
    with pytest.raises(ValueError, match="asked for with another size"):
        Replay(other.trace())


def backward_of(heap: Heap) -> tuple[int, list[Seen]]:
    """A forward pass that keeps two activations and the logits: (weights, what was seen)."""
    weights = heap.alloc(1000)
    heap.recording = True
    kept = [heap.alloc(70), heap.alloc(50)]
    logits = heap.alloc(400)
    seen = [heap.seen(address, Component.ACTIVATIONS) for address in kept]
    seen += [heap.seen(weights, Component.PARAMETERS), heap.seen(logits, Component.LOGITS)]
    return weights, seen


def test_the_loss_backward_is_known_by_its_logits() -> None:
    heap = Heap()
    _, seen = backward_of(heap)
    first = heap.state
    gradient = heap.alloc(800)
    for address in (gradient, 512 * 4):
        heap.free(address)
    replay = Replay(heap.trace())
    peak = phase_peak(
        replay, span("backward", first, heap.state), seen, TransientSizes(logits=frozenset({800}))
    )
    assert peak.moment is Moment.LOSS_BACKWARD
    assert peak.components == {
        Component.PARAMETERS: 1000,
        Component.ACTIVATIONS: 120,
        Component.LOGITS: 1200,
    }
    assert peak.unnamed == ()


def test_a_gradient_of_the_size_of_logits_is_not_taken_for_them() -> None:
    heap = Heap()
    _, seen = backward_of(heap)
    first = heap.state
    heap.free(512 * 4)
    gradient = heap.alloc(30)
    seen.append(heap.seen(gradient, Component.GRADIENTS))
    temporary = heap.alloc(800)
    heap.free(temporary)
    sizes = TransientSizes(logits=frozenset({800}))
    peak = phase_peak(Replay(heap.trace()), span("backward", first, heap.state), seen, sizes)
    assert (peak.components[Component.WORKSPACE], Component.LOGITS in peak.components) == (800, False)
    optimizer = phase_peak(Replay(heap.trace()), span("optimizer", first, heap.state), seen, sizes)
    assert Component.LOGITS not in optimizer.components


def blocks_backward(heap: Heap, *, wide_block: int) -> PhasePeak:
    _, seen = backward_of(heap)
    first = heap.state
    heap.free(512 * 4)
    for block, kept in enumerate((512 * 3, 512 * 2)):
        temporary = heap.alloc(9000 if block == wide_block else 10)
        heap.free(temporary)
        heap.free(kept)
    return phase_peak(Replay(heap.trace()), span("backward", first, heap.state), seen, NO_SIZES)


def test_blocks_are_told_apart_by_the_activations_that_are_left() -> None:
    last = blocks_backward(Heap(), wide_block=0)
    assert (last.moment, last.components[Component.ACTIVATIONS]) == (Moment.LAST_BLOCK_BACKWARD, 120)
    assert last.components[Component.WORKSPACE] == 9000
    # Of 120 bytes 70 are left: still nearer to the start.
    middle = blocks_backward(Heap(), wide_block=1)
    assert (middle.moment, middle.components[Component.ACTIVATIONS]) == (Moment.LAST_BLOCK_BACKWARD, 70)


def test_gradients_at_the_end_make_the_first_block_the_peak() -> None:
    heap = Heap()
    _, seen = backward_of(heap)
    first = heap.state
    for address in (512 * 4, 512 * 3, 512 * 2):
        heap.free(address)
    gradient = heap.alloc(5000)
    seen.append(heap.seen(gradient, Component.GRADIENTS))
    peak = phase_peak(Replay(heap.trace()), span("backward", first, heap.state), seen, NO_SIZES)
    assert peak.moment is Moment.FIRST_BLOCK_BACKWARD
    assert peak.components == {Component.PARAMETERS: 1000, Component.GRADIENTS: 5000}


def test_an_address_that_is_used_again_keeps_both_names_apart() -> None:
    heap = Heap(recording=True)
    gathered = heap.alloc(300)
    seen = [heap.seen(gathered, Component.PARAMETERS)]
    heap.free(gathered)
    forward_end = heap.state
    again = heap.alloc(300)
    assert again == gathered
    seen.append(heap.seen(again, Component.ACTIVATIONS))
    replay = Replay(heap.trace())
    early = phase_peak(replay, span("forward", 0, forward_end), seen, NO_SIZES)
    late = phase_peak(replay, span("backward", forward_end, heap.state), seen, NO_SIZES)
    assert early.components == {Component.PARAMETERS: 300}
    assert late.components == {Component.ACTIVATIONS: 300}


def test_a_storage_of_another_size_is_not_the_one_that_was_seen() -> None:
    heap = Heap(recording=True)
    address = heap.alloc(300)
    wrong = Seen(heap.now, address, 200, Component.PARAMETERS)
    peak = phase_peak(Replay(heap.trace()), span("forward", 0, 1), [wrong], NO_SIZES)
    assert (peak.components, peak.unnamed) == ({}, (300,))


def test_of_several_names_the_more_lasting_one_holds() -> None:
    heap = Heap(recording=True)
    address = heap.alloc(300)
    seen = [heap.seen(address, name) for name in (Component.ACTIVATIONS, Component.GRADIENTS)]
    for order in (seen, seen[::-1]):
        peak = phase_peak(Replay(heap.trace()), span("forward", 0, 1), order, NO_SIZES)
        assert peak.components == {Component.GRADIENTS: 300}


def test_what_nobody_saw_is_workspace_only_if_it_stays_inside_the_phase() -> None:
    heap = Heap(recording=True)
    older = heap.alloc(5)
    library = heap.alloc(64)
    first = heap.state
    inside = heap.alloc(7)
    younger = heap.alloc(11)
    heap.free(inside)
    last = heap.state
    heap.free(younger)
    heap.free(older)
    peak = phase_peak(
        Replay(heap.trace()),
        span("forward", first, last),
        [],
        TransientSizes(workspaces=frozenset({heap.live[library]})),
    )
    assert peak.components == {Component.WORKSPACE: 7 + 64}
    assert peak.unnamed == (11, 5)


def test_a_clock_that_is_off_is_set_right_by_the_borders() -> None:
    heap = Heap(recording=True)
    heap.alloc(1)
    border = span("forward", 0, 1, began_us=heap.now - 10, ended_us=heap.now + 10)
    heap.alloc(1)
    replay = Replay(heap.trace())
    assert replay.clock_shift_us([border]) == 0
    for wrong in (-700, 900):
        shifted = span("forward", 0, 1, began_us=border.began_us + wrong, ended_us=border.ended_us + wrong)
        shift = replay.clock_shift_us([shifted])
        assert abs(shift + wrong) <= 20
        seen = in_trace_time([Seen(shifted.ended_us, 512, 1, Component.LOGITS)], shift)
        assert abs(seen[0].time_us - border.ended_us) <= 20
