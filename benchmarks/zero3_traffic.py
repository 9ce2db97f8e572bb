"""Bytes that the collectives of one step at ZeRO-3 carry, by arithmetic alone.

After deepspeed 0.19.8: `runtime/zero/partitioned_param_coordinator.py` (when a weight is gathered, gathered
ahead and let go), `runtime/zero/partition_parameters.py` (padding; hpZ's second shards),
`runtime/zero/stage3.py` (`_post_step` gathers the persistent weights again, gradients are reduced after every
micro-batch), `runtime/comm/coalesced_collectives.py` (padding of gradients). Of a step in its steady state:
the order of the modules is known, so the first micro-batch of a run, which records it, is another matter.

Not counted are the few bytes of norms, overflow flags, losses and barriers. Weights or gradients that
travel quantized (ZeRO++'s qwZ and qgZ), leaves of several modules and NVMe are not covered.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

from msgspec import Struct

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
Phase = Literal["forward", "backward", "step"]
Way = Literal["forward", "recompute", "backward", "after_forward", "after_backward"]
"""A module is entered (the first three) or left. `recompute` is a forward pass that a checkpoint makes in the
backward pass."""


class Weight(Struct, frozen=True, kw_only=True):
    """One sharded tensor."""

    elements: int
    width: int
    """Bytes of one element as it is gathered."""
    trained: bool = True


class Visit(NamedTuple):
    """A module is entered or left."""

    module: int
    way: Way


class Tour(Struct, frozen=True, kw_only=True):
    """How one micro-batch goes through a model. It depends on the model alone, not on how it is sharded."""

    weights: tuple[Weight, ...]
    """In the order in which the model names them."""
    modules: tuple[tuple[int, ...], ...]
    """The places of each module's own weights in `weights`; weights of two modules stand in both."""
    visits: tuple[Visit, ...]


class Sharding(Struct, frozen=True, kw_only=True):
    """How ZeRO-3 is set; sizes in elements, as DeepSpeed counts them."""

    ranks: int
    gradient_bytes: int
    """Of one element as it is reduced."""
    grad_accum: int = 1
    prefetch: int = 50_000_000
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000
    persistence: int = 100_000
    model_persistence: int = sys.maxsize
    hpz: int = 1
    """Ranks that hold a second shard of all weights together; 1: none."""
    reduce_scatter: bool = True


class Moved(NamedTuple):
    """Collectives of one kind within one phase, between groups of so many ranks."""

    kind: Kind
    phase: Phase
    ranks: int


Traffic = dict[Moved, int]
"""Bytes of the tensors in their full shape, as each rank sees them, of one step."""


def ring_bytes(kind: Kind, tensor_bytes: int, ranks: int) -> int:
    """What each rank sends, and as much receives, for a tensor of this size in its full shape.

    A ring passes each of n parts over n - 1 of its n edges: once for a gather or a scatter, twice for an
    all-reduce, which is one after the other. A gather or a scatter cannot do with less, as long as nothing
    but the ranks adds or copies (NVLink's multicast does).
    """
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (ranks - 1) * tensor_bytes // ranks


def sent_bytes(traffic: Traffic) -> int:
    """What each rank sends in one step."""
    return sum(ring_bytes(moved.kind, size, moved.ranks) for moved, size in traffic.items())


def step_traffic(tour: Tour, sharding: Sharding) -> Traffic:
    """One whole step: its micro-batches, and the update after them."""
    gathering = _Gathering(tour, sharding)
    traffic: Counter[Moved] = Counter()
    for _ in range(sharding.grad_accum):
        gathering.micro_batch()
        kind: Kind = "reduce_scatter" if sharding.reduce_scatter else "all_reduce"
        traffic[Moved(kind, "backward", sharding.ranks)] += _reduced_bytes(tour.weights, sharding)
    traffic.update(gathering.carried)
    persistent = (tour.weights[place] for place in gathering.persistent)
    traffic[Moved("all_gather", "step", sharding.ranks)] += sum(
        _padded(weight.elements, sharding.ranks) * weight.width for weight in persistent
    )
    return {moved: size for moved, size in traffic.items() if size and moved.ranks > 1}


def persistent_places(weights: Iterable[Weight], sharding: Sharding) -> tuple[int, ...]:
    """The small weights that stay whole (`parameter_offload.py:mark_persistent_parameters`)."""
    found: list[int] = []
    total = 0
    for place, weight in enumerate(weights):
        small = weight.elements <= sharding.persistence
        if small and total + weight.elements <= sharding.model_persistence:
            found.append(place)
            total += weight.elements
    return tuple(found)


def _padded(elements: int, ranks: int) -> int:
    return -(-elements // ranks) * ranks


def _reduced_bytes(weights: Iterable[Weight], sharding: Sharding) -> int:
    """Gradients of one micro-batch. Only what is scattered is padded."""
    ranks = sharding.ranks if sharding.reduce_scatter else 1
    trained = sum(_padded(weight.elements, ranks) for weight in weights if weight.trained)
    return trained * sharding.gradient_bytes


class _Gathering:
    """The coordinator of the weights over the micro-batches of one step."""

    def __init__(self, tour: Tour, sharding: Sharding) -> None:
        self.tour, self.sharding = tour, sharding
        self.persistent = persistent_places(tour.weights, sharding)
        self.carried: Counter[Moved] = Counter()
        self._order = [visit.module for visit in tour.visits if not visit.way.startswith("after")]
        """The modules as they are entered."""
        self._uses = [
            (place, at) for at, module in enumerate(self._order) for place in sorted(self._own(module))
        ]
        """Each weight that is needed, and at which of the entries."""
        self._whole = set(self.persistent)
        """After a step the persistent weights are gathered."""
        self._second: set[int] = set()
        """hpZ: weights that have a second shard. A step makes those of trained weights worthless."""
        if sharding.hpz > 1:
            frozen = {place for place, weight in enumerate(tour.weights) if not weight.trained}
            self._second = frozen - self._whole

    def _own(self, module: int) -> set[int]:
        return set(self.tour.modules[module])

    def micro_batch(self) -> None:
        """Forward and backward. What is still whole afterwards are the persistent weights."""
        self._at = 0
        self._available = 0
        self._queue = deque(self._uses)
        self._fetched_for: dict[int, int] = {}
        """By weight the last entry that it is, or was, there for."""
        self._users: dict[int, set[int]] = {}
        """By weight the modules that were entered and not left."""
        self._ahead: set[int] = set()
        """On their way, since a prefetch."""
        self._inside_backward: dict[int, set[int]] = {}
        """Modules in their backward pass, and the frozen weights that were gathered anew for them."""
        for visit in self.tour.visits:
            if visit.way.startswith("after"):
                self._leave(visit)
            else:
                self._enter(visit)
        # What no module has let go (`release_backward_leftovers`), and what was gathered ahead for nothing.
        for module, recomputed in self._inside_backward.items():
            for place in self._own(module) | recomputed:
                self._users.get(place, set()).discard(module)
                if place not in self.persistent:
                    self._release(place)
        ahead, self._ahead = self._ahead, set()
        for place in ahead:
            self._release(place)

    def _enter(self, visit: Visit) -> None:
        phase: Phase = "forward" if visit.way == "forward" else "backward"
        if visit.way == "backward":
            self._inside_backward.setdefault(visit.module, set())
        own = self._own(visit.module)
        self._gather(own - self._whole, phase)
        self._ahead -= own
        for place in own:
            self._users.setdefault(place, set()).add(visit.module)
            if visit.way == "recompute" and self._inside_backward and not self.tour.weights[place].trained:
                owner = next(reversed(self._inside_backward))
                self._inside_backward[owner].add(place)
                self._users[place].add(owner)
        self._take_from_queue(own)
        self._prefetch(phase)
        self._at += 1

    def _take_from_queue(self, own: set[int]) -> None:
        """What is here need not be gathered ahead, unless an earlier prefetch has taken it already."""
        late = {place for place in own if self._fetched_for.get(place, -1) < self._at}
        taken: set[int] = set()
        while self._queue and len(taken) < len(late):
            place, at = self._queue.popleft()
            self._fetched_for[place] = at
            taken.add(place)

    def _prefetch(self, phase: Phase) -> None:
        sharding = self.sharding
        if not sharding.prefetch:
            return
        room = min(sharding.max_live - self._available, sharding.prefetch)
        wanted: set[int] = set()
        elements = 0
        while self._queue and elements < room:
            place, at = self._queue.popleft()
            self._fetched_for[place] = max(self._fetched_for.get(place, -1), at)
            if place not in self._whole and place not in wanted:
                wanted.add(place)
                elements += self.tour.weights[place].elements
        self._gather(wanted, phase)
        self._ahead |= wanted

    def _gather(self, places: set[int], phase: Phase) -> None:
        ranks = self.sharding.ranks
        for place in places:
            weight = self.tour.weights[place]
            group = self.sharding.hpz if place in self._second else ranks
            # Shards of both kinds are cut from a weight that is padded for all ranks.
            self.carried[Moved("all_gather", phase, group)] += _padded(weight.elements, ranks) * weight.width
            self._available += weight.elements
            self._whole.add(place)

    def _leave(self, visit: Visit) -> None:
        own = self._own(visit.module)
        let_go = self._let_go(own)
        held = own
        if visit.way == "after_backward":
            recomputed = self._inside_backward.pop(visit.module, set())
            let_go |= recomputed - set(self.persistent)
            held = own | recomputed
        for place in held:
            self._users.get(place, set()).discard(visit.module)
            if place in let_go:
                self._release(place)

    def _let_go(self, own: set[int]) -> set[int]:
        """All but what stays, a prefetch has passed over, or is needed again soon."""
        found = {
            place
            for place in own
            if place not in self.persistent and self._fetched_for.get(place, -1) <= self._at
        }
        passed = 0
        for module in self._order[self._at :]:
            if passed >= self.sharding.max_reuse:
                break
            for place in self.tour.modules[module]:
                found.discard(place)
                passed += self.tour.weights[place].elements
        return found

    def _release(self, place: int) -> None:
        if place not in self._whole or self._users.get(place) or place in self._ahead:
            return
        self._whole.discard(place)
        self._available -= self.tour.weights[place].elements
        if self.sharding.hpz > 1:
            self._second.add(place)
