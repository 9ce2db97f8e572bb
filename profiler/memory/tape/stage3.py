"""ZeRO-3 around a model: shards, gathered weights, the bucket, and a step by sub-groups.

After deepspeed 0.19.8 `runtime/zero/stage3.py`, `zero/partition_parameters.py` and
`zero/partitioned_param_coordinator.py`. Weights are gathered on a stream of their own and gradients reduced
on another, each with its own free blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from llmtop.profiler.memory.reduction import NORM_ELEMENTS
from llmtop.profiler.memory.tape.machine import Machine, Tensor
from llmtop.profiler.memory.tape.plan import Plan

GATHER, REDUCE = 1, 2
"""Streams."""
HEAD = -1
"""The slot of the head, which is in no block."""


class Weight:
    """One sharded tensor."""

    __slots__ = ("bytes", "elements", "gather", "index", "is_persistent", "tensor")

    def __init__(self, index: int, elements: int, bytes_: int) -> None:
        self.index, self.elements, self.bytes = index, elements, bytes_
        self.is_persistent = False
        """Whether it is so small that each rank keeps it whole."""
        self.tensor: Tensor | None = None
        """Its gathered form."""
        self.gather: Gather | None = None
        """With which it comes, until it is used."""


class Gather:
    """Some weights that come in one flat tensor, which stays until the last of them is used."""

    __slots__ = ("flat", "is_apart", "weights")

    def __init__(self, flat: Tensor, weights: list[Weight]) -> None:
        self.flat, self.weights, self.is_apart = flat, weights, False


class Coordinator:
    """Which weights are gathered when."""

    def __init__(
        self, machine: Machine, plan: Plan, weights: Sequence[Weight], starts: Sequence[int]
    ) -> None:
        """`weights` are the embedding, then the matrices of each block, from its start on, then an untied
        head."""
        self.machine, self.plan, self.weights, self.starts = machine, plan, weights, starts
        for weight in weights:
            weight.is_persistent = weight.elements <= plan.gathering.persistent
        self.block = -1
        self.uses: list[int] = []
        """The weights in the order of their uses, as the first step recorded them."""
        self.recording = True
        self.places: dict[int, list[int]] = {}
        """Where each weight is among the uses."""
        self.passed: list[int] = []
        """Elements that are used before each use."""
        self.at = 0
        self.queued = 0
        """Uses before this one are gathered, or about to be."""
        self.available = 0
        """Elements that are gathered, less those of earlier steps."""
        self.external: Weight | None = None
        """What the whole model's own code reads."""
        self.persistent: list[Tensor] = []
        """Small weights, whole from their first use on."""

    def at_block(self, block: int) -> None:
        self.block = block

    def begin(self) -> None:
        """A micro-batch begins."""
        if not self.persistent:
            self._gather_persistent()
        if self.uses and self.recording:
            self.recording = False
            if self.external is not None:
                self.uses.insert(0, self.external.index)
            self._index_uses()
        self.at = self.queued = self.available = 0
        if self.external is not None:
            self._use([self.external])

    def learn(self, slot: int) -> None:
        """In the first pass a module's code reads a weight that is not its own: the whole model's, which from
        then on holds it from the start of forward to the end of backward, where it is used again."""
        self.external = self.weight(slot)
        self.uses.append(self.external.index)

    def weight(self, slot: int) -> Weight:
        """The embedding's before the blocks, then a block's by its slot, then the head's."""
        if self.block < 0:
            return self.weights[0]
        if slot != HEAD:
            return self.weights[self.starts[self.block] + slot]
        return self.weights[0 if self.plan.tied else -1]

    def fetch(self, *slots: int) -> None:
        """A module with these weights of its own is entered."""
        weights: list[Weight] = []
        for slot in slots:
            weight = self.weight(slot)
            if not weight.is_persistent:
                weights.append(weight)
                if self.recording:
                    self.uses.append(weight.index)
        self._use(weights)

    def _gather_persistent(self) -> None:
        machine = self.machine
        machine.on_stream(GATHER)
        self.persistent = [machine.new(each.bytes) for each in self.weights if each.is_persistent]
        machine.on_stream(0)

    def gathered(self, slot: int) -> Tensor | None:
        """The whole weight, if it is there."""
        return self.weight(slot).tensor

    def _use(self, weights: list[Weight]) -> None:
        missing = [each for each in weights if each.tensor is None and each.gather is None]
        if missing:
            self._gather(missing)
        for weight in weights:
            if weight.gather is not None:
                self._wait(weight, weight.gather)
        self.at += len(weights)
        self.enter()

    def enter(self, modules: int = 1) -> None:
        """Modules are entered: each gathers ahead, those without a weight of their own too."""
        if not self.recording:
            for _ in range(modules):
                self._prefetch()

    def _gather(self, weights: list[Weight]) -> None:
        machine = self.machine
        machine.on_stream(GATHER)
        if self.plan.ranks == 1:  # from the host, each by itself
            for weight in weights:
                self.available += weight.elements
                weight.tensor = machine.new(weight.bytes)
        else:
            size = 0
            for weight in weights:
                self.available += weight.elements
                size += weight.bytes
            flat = machine.new(size)
            flat.holders += len(weights) - 1
            gather = Gather(flat, weights)
            for weight in weights:
                weight.gather = gather
        machine.on_stream(0)

    def _wait(self, weight: Weight, gather: Gather) -> None:
        """The first use of a gather of several takes it apart into a tensor for each."""
        machine, weight.gather = self.machine, None
        if len(gather.weights) == 1:
            weight.tensor = gather.flat
            return
        if not gather.is_apart:
            gather.is_apart = True
            machine.on_stream(GATHER)
            for each in gather.weights:
                each.tensor = machine.new(each.bytes)
            machine.on_stream(0)
        machine.drop(gather.flat)

    def _prefetch(self) -> None:
        settings, uses = self.plan.gathering, self.uses
        queued = max(self.queued, self.at)
        room = min(settings.max_live - self.available, settings.prefetch_bucket)
        wanted: list[Weight] = []
        total = 0
        while queued < len(uses) and total < room:
            weight = self.weights[uses[queued]]
            queued += 1
            if weight.tensor is None and weight.gather is None and weight not in wanted:
                wanted.append(weight)
                total += weight.elements
        self.queued = queued
        if wanted:
            self._gather(wanted)

    def release(self, slot: int) -> None:
        weight = self.weight(slot)
        if weight.tensor is None or weight.is_persistent:
            return
        if not self.recording and (weight is self.external or self._is_near(weight)):
            return
        self.machine.drop(weight.tensor)
        weight.tensor = None
        self.available -= weight.elements

    def _is_near(self, weight: Weight) -> bool:
        """Whether it is used again soon, or a prefetch has passed over its next use."""
        places = self.places.get(weight.index, [])
        following = bisect_left(places, self.at)
        if following == len(places):
            return False
        place = places[following]
        passed = self.passed[place] - self.passed[self.at]
        return place < self.queued or passed < self.plan.gathering.max_reuse

    def _index_uses(self) -> None:
        for place, index in enumerate(self.uses):
            self.places.setdefault(index, []).append(place)
        self.passed = [0, *accumulate(self.weights[index].elements for index in self.uses)]

    def end(self) -> None:
        """All is released at the end of a micro-batch."""
        for weight in self.weights:
            gather, weight.gather = weight.gather, None
            if gather is not None and (gather.is_apart or len(gather.weights) > 1):
                self.machine.drop(gather.flat)
            elif gather is not None:
                weight.tensor = gather.flat
            self.machine.drop(weight.tensor)
            weight.tensor = None


class Stage3:
    """The engine of stage 3."""

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self.machine, self.plan = machine, plan
        self.filled: list[int] = []
        self.filled_elements = 0
        self.large: Tensor | None = None
        self.moments: list[Tensor] = []
        self.coordinator: Coordinator | None = None
        self.boundary = True

    def _part(self, elements: int) -> int:
        return -(-elements // self.plan.ranks)

    def sub_groups(self) -> list[int]:
        """Elements of each, of this rank: tensors are added until the limit is passed."""
        groups: list[int] = []
        filled = 0
        for elements in self.plan.trained:
            filled += self._part(elements)
            if filled >= self.plan.sub_group:
                groups.append(filled)
                filled = 0
        return [*groups, filled] if filled else groups

    def start(self) -> None:
        """Weights are sharded one by one; then the trained shards are laid out anew, through the host."""
        machine, plan = self.machine, self.plan
        width = plan.width
        machine.drop_all(*self._shards())
        machine.release_cached()
        if not plan.params_away:
            machine.new(plan.share * width)
        groups = self.sub_groups()
        if not plan.offloaded:
            before: Tensor | None = None
            for elements in groups:
                wide = machine.new(4 * elements)
                machine.drop(before)
                before = wide
                machine.new(4 * elements)
            machine.drop(before)
            machine.passing(4 * max(groups))
        machine.new(plan.bucket * width)
        if not plan.offloaded:
            machine.new(plan.share * width)
        for elements in plan.trained:  # each is gathered once more to find its gradient's hook
            machine.passing(elements * width)

    def _shards(self) -> list[Tensor]:
        """Those of trained weights; those of frozen ones stay as they are."""
        machine, plan = self.machine, self.plan
        width, full = plan.width, not plan.frozen_bytes
        base = [elements * width for elements in plan.trained] if full else list(plan.frozen_bytes)
        trained: list[Tensor] = []
        if plan.packed:
            # A packed model is made whole, and sharded with its adapters when the engine is.
            whole = [machine.new(size) for size in base]
        else:
            whole = []
            head = base[:1] * plan.tied  # is made as well, and thrown away
            shards: list[Tensor] = []
            for size in base + head:
                each = machine.new(size)
                if not plan.params_away:
                    shards.append(machine.new(-(-size // plan.ranks)))
                machine.drop(each)
            for size in base + head:
                machine.passing(size)
            if head and shards:
                machine.drop(shards.pop())
            if full:
                trained = shards
        adapters = [] if full else [machine.new(elements * width) for elements in plan.trained]
        for each, size in zip(whole, base, strict=False):
            if not plan.params_away:
                machine.new(-(-size // plan.ranks))
            machine.drop(each)
        for each, elements in zip(adapters, plan.trained, strict=False):
            if not plan.params_away:
                trained.append(machine.new(self._part(elements) * width))
            machine.drop(each)
        return trained

    def begin(self, index: int, *, boundary: bool) -> None:
        self.boundary = boundary
        if self.coordinator is not None:
            self.coordinator.begin()

    def ready(self, elements: int, gradient: Tensor) -> None:
        if self.filled_elements + elements > self.plan.bucket:
            self._flush()
        self.filled.append(elements)
        self.filled_elements += elements
        if elements > self.plan.bucket:
            self.large = gradient
        else:
            self.machine.drop(gradient)

    def _flush(self) -> None:
        """The bucket is reduced; under offload its gradients go to the host, with their norms, in fp32."""
        machine, plan = self.machine, self.plan
        machine.on_stream(REDUCE)
        flat = machine.new(self.filled_elements * plan.width) if len(self.filled) > 1 else None
        before: Tensor | None = None
        for elements in self.filled if plan.offloaded else ():
            part = self._part(elements)
            held = machine.new(part * plan.width)
            machine.drop(before)
            before = held
            if self.boundary:
                machine.passing(8 * min(part, NORM_ELEMENTS))
                machine.passing(4 * part if plan.width != 4 else 0)
        machine.drop_all(before, flat, self.large)
        machine.on_stream(0)
        self.large = None
        self.filled, self.filled_elements = [], 0

    def end_backward(self) -> None:
        self._flush()
        if self.coordinator is not None:
            self.coordinator.end()

    def step(self) -> None:
        machine, plan = self.machine, self.plan
        if plan.offloaded:
            return
        for elements in plan.trained:
            machine.passing(8 * self._part(elements))
        first = not self.moments
        for elements in self.sub_groups():
            narrow = machine.new(plan.width * elements)
            if plan.width != 4:
                wide = machine.new(4 * elements)
                machine.drop(narrow)
            else:
                wide = narrow
            if first:
                for width in plan.rules.state_widths:
                    self.moments.append(machine.new(round(width * elements)))
            machine.passing(plan.rules.temporary_bytes * elements)
            machine.drop(wide)
