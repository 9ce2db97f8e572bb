"""What DeepSpeed makes and drops around a model: at its start, as gradients come, and in the step.

After deepspeed 0.19.8 `runtime/fp16/fused_optimizer.py` (stage 0) and `runtime/zero/stage_1_and_2.py`
(stages 1 and 2).
"""

from __future__ import annotations

from collections.abc import Sequence

from llmtop.profiler.memory.reduction import ALLREDUCE_ELEMENTS
from llmtop.profiler.memory.tape.machine import Machine, Tensor
from llmtop.profiler.memory.tape.plan import Plan


class Engine:
    """Stages 0 to 2. `Stage3` in its own module has the same four calls."""

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self.machine, self.plan = machine, plan
        self.total = sum(plan.trained)
        first = plan.rank * plan.share
        self.own = range(first, min(self.total, first + plan.share))
        """Where this rank's share lies among all trained elements."""
        self.held, self.own_parts = _overlapping(plan.trained, self.own)
        self.place = 0
        self.whole: list[tuple[int, Tensor]] = []
        """Gradients as autograd leaves them."""
        self.accumulated: Tensor | None = None
        self.buckets: list[Tensor] = []
        self.filled: list[int] = []
        """Elements of what the bucket holds."""
        self.filled_elements = 0
        """Of all of it: asked for at every gradient, of which adapters have a thousand."""
        self.owners: set[int] = set()
        """The ranks that it is for."""
        self.reaches_share = False
        """Whether some of that belongs to this rank's share."""
        self.large: Tensor | None = None
        """The gradient of a weight that is larger than the bucket."""
        self.index = 0
        self.share: Tensor | None = None
        self.moments: list[Tensor] = []
        self.boundary = True
        self.staging: Tensor | None = None

    # The start

    def start(self) -> None:
        """The model's weights one by one, then flat; the master weights; a step on zeros."""
        machine, plan = self.machine, self.plan
        weights = [machine.new(elements * plan.width) for elements in plan.trained]
        for size in plan.frozen_bytes:
            machine.new(size)
        total = self.total
        if plan.stage == 0:
            self._start_unsharded(weights, total)
            return
        machine.passing(max(plan.trained) * plan.width)
        machine.release_cached()
        machine.new(total * plan.width)
        machine.drop_all(*weights)
        share = plan.share
        if plan.width == 4:
            copy = machine.new(4 * share)
            if plan.offloaded:
                machine.drop(copy)
        else:
            narrow = machine.new(plan.width * share)
            if plan.offloaded:
                machine.drop(narrow)
            else:
                machine.new(4 * share)
                machine.drop(narrow)
        if plan.offloaded:
            self.staging = machine.new(max(plan.trained) * plan.width)
        else:
            machine.passing(4 * share)

    def _start_unsharded(self, weights: list[Tensor], total: int) -> None:
        machine, plan = self.machine, self.plan
        if plan.width == 4:
            return
        machine.passing(max(plan.trained) * plan.width)
        if not plan.rules.fused:
            self._start_by_tensor()
            return
        clones = [machine.new(elements * plan.width) for elements in plan.trained]
        machine.new(total * plan.width)
        machine.drop_all(*reversed(clones))
        machine.drop_all(*weights)
        narrow = machine.new(total * plan.width)
        machine.new(4 * total)
        machine.drop(narrow)
        zeros = machine.new(4 * total)
        self._make_moments(total)
        machine.drop(zeros)

    def _start_by_tensor(self) -> None:
        """`fp16/unfused_optimizer.py`: nothing is flat."""
        machine, plan = self.machine, self.plan
        for elements in plan.trained:
            narrow = machine.new(elements * plan.width)
            machine.new(4 * elements)
            machine.drop(narrow)
        zeros = [machine.new(elements * width) for width in (plan.width, 4) for elements in plan.trained]
        self._make_moments_by_tensor()
        machine.drop_all(*zeros)

    def _make_moments_by_tensor(self) -> None:
        machine, rules = self.machine, self.plan.rules
        self.moments = [
            machine.new(round(each * elements))
            for elements in self.plan.trained
            for each in rules.state_widths
        ]
        machine.drop_all(*[machine.new(rules.temporary_bytes * elements) for elements in self.plan.trained])

    # Gradients

    def begin(self, index: int, *, boundary: bool) -> None:
        """Micro-batch `index` of a step begins; `boundary`: it is the last."""
        self.index, self.boundary = index, boundary
        self.place = self.total  # gradients come from the last weight to the first

    def ready(self, elements: int, gradient: Tensor) -> None:
        """A weight's gradient is complete."""
        plan = self.plan
        if plan.stage:
            self._open_buckets()
        if plan.stage == 2:
            self._into_bucket(elements, gradient)
            return
        at_once = plan.stage == 1 and plan.overlap and self.boundary
        if self.index:  # added to that of the micro-batch before
            self.machine.drop(gradient)
            if at_once:
                self._into_bucket(*self.whole.pop(0))
        elif at_once:
            self._into_bucket(elements, gradient)
        else:
            self.whole.append((elements, gradient))

    def _open_buckets(self) -> None:
        plan = self.plan
        if not self.buckets and plan.contiguous:
            count = 2 if plan.overlap else 1
            self.buckets = [self.machine.new(plan.bucket * plan.width) for _ in range(count)]

    def _into_bucket(self, elements: int, gradient: Tensor) -> None:
        plan = self.plan
        if self.filled_elements + elements > plan.bucket:
            self._flush()
        # Without overlap ZeRO-1 goes over all gradients at the end, in the model's order.
        if plan.stage == 2 or plan.overlap:
            self.place -= elements
            at = self.place
        else:
            at = self.place
            self.place += elements
        self.filled.append(elements)
        self.filled_elements += elements
        last = at + elements - 1
        self.reaches_share |= at < self.own.stop and last >= self.own.start
        self.owners |= {at // plan.share, last // plan.share}
        if elements > plan.bucket:
            self.large = gradient  # stays whole until it is reduced
        else:
            self.machine.drop(gradient)

    def _flush(self) -> None:
        """Gradients of the bucket are reduced and this rank's part of them is copied out."""
        if not self.filled:
            return
        machine, plan = self.machine, self.plan
        machine.on_stream(1 if plan.overlap else 0)
        if len(self.owners) > 1:  # the parts of several ranks are made one tensor to be reduced
            machine.passing(self.filled_elements * plan.width)
        self.owners = set()
        if plan.offloaded:
            self._to_host()
        elif self.share is None and self.reaches_share:
            self.share = machine.new(self.held * plan.width)
        self.reaches_share = False
        machine.drop(self.large)
        self.large = None
        self.filled, self.filled_elements = [], 0
        machine.on_stream(0)

    def _to_host(self) -> None:
        """Each gradient's norm in fp64, and its fp32 copy on the way to the host."""
        if not self.boundary:
            return
        for elements in self.filled:
            self.machine.passing(8 * elements)
            if self.plan.width != 4:
                self.machine.passing(4 * elements)

    def end_backward(self) -> None:
        """The epilogue of a micro-batch."""
        machine, plan = self.machine, self.plan
        if plan.stage == 1 and self.boundary and not plan.overlap:
            whole, self.whole = self.whole, []
            self.place = 0
            for elements, gradient in reversed(whole):
                self._into_bucket(elements, gradient)
        if plan.stage == 0 and plan.ranks > 1 and self.boundary:
            self._allreduce()
        if plan.stage == 0 or (plan.stage == 1 and not self.boundary):
            return
        self._flush()
        if self.accumulated is None:
            self.accumulated, self.share = self.share, None
        machine.drop_all(self.share, *self.buckets)
        self.share, self.buckets = None, []

    def _allreduce(self) -> None:
        """Stage 0 flattens gradients in pieces, in the model's order, to reduce them
        (`runtime/engine.py:allreduce_no_retain`)."""
        filled = 0
        for elements in self.plan.trained:
            filled += elements
            if filled > ALLREDUCE_ELEMENTS:
                self.machine.passing(filled * self.plan.width)
                filled = 0
        self.machine.passing(filled * self.plan.width)

    # The step

    def step(self) -> None:
        """The optimizer's step of a boundary."""
        machine, plan = self.machine, self.plan
        if plan.stage == 0:
            self._step_unsharded()
            return
        if plan.offloaded:
            return
        for elements in self.own_parts:
            machine.passing(8 * elements)
        flat = machine.new(plan.share * plan.width)
        if plan.width != 4:
            wide = machine.new(4 * plan.share)
            machine.drop(flat)
        else:
            wide = flat
        machine.drop(self.accumulated)
        self.accumulated = None
        self._make_moments(plan.share)
        machine.passing(plan.rules.temporary_bytes * plan.share)
        machine.drop(wide)

    def _make_moments(self, elements: int) -> None:
        if self.moments:
            return
        for width in self.plan.rules.state_widths:
            self.moments.append(self.machine.new(round(width * elements)))

    def _step_unsharded(self) -> None:
        machine, plan, total = self.machine, self.plan, self.total
        if plan.width == 4:
            if not self.moments:
                self._make_moments_by_tensor()
            else:
                self._foreach()
        elif not plan.rules.fused:
            wide = [machine.new(4 * elements) for elements in plan.trained]
            self._foreach()
            machine.drop_all(*wide)
        else:
            wide = [machine.new(4 * elements) for elements in plan.trained]
            flat = machine.new(4 * total)
            machine.drop_all(*reversed(wide))
            machine.drop_all(*(gradient for _, gradient in self.whole))
            self.whole = []
            self._make_moments(total)
            machine.passing(plan.rules.temporary_bytes * total)
            machine.drop(flat)
        machine.drop_all(*(gradient for _, gradient in self.whole))
        self.whole = []

    def _foreach(self) -> None:
        """torch's AdamW makes a temporary of every tensor before it drops the first."""
        machine, rules = self.machine, self.plan.rules
        machine.drop_all(*[machine.new(rules.temporary_bytes * elements) for elements in self.plan.trained])


def _overlapping(weights: Sequence[int], own: range) -> tuple[int, list[int]]:
    """Elements of the tensors that lie in a share at least in part, and how many of each lie in it."""
    held, parts, place = 0, [], 0
    for elements in weights:
        inside = min(place + elements, own.stop) - max(place, own.start)
        if inside > 0:
            held += elements
            parts.append(inside)
        place += elements
    return held, parts
