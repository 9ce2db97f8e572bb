"""An MLP of experts: the chosen experts of all tokens in one product, and a shared expert.

After transformers 5.24 `integrations/moe.py:grouped_mm_experts_forward`, which is its choice on CUDA, the
blocks of `models/{mixtral,qwen2_moe,qwen3_moe,deepseek_v2,deepseek_v3}`, and liger-kernel 0.8.5
`ops/fused_moe.py`.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.memory.tape.blocks import GatedMlp
from llmtop.profiler.memory.tape.layers import Frame, Kept
from llmtop.profiler.memory.tape.machine import Tensor
from llmtop.profiler.memory.tape.router import Router

TUNING_BYTES = 256 * 1024**2
"""What Triton clears between two tries of a kernel that is tuned (triton 3.6, `testing.py:do_bench`)."""


_OF_ROUTER = 3
"""How many things a router keeps."""


class ExpertSizes(Struct, frozen=True):
    """Bytes, unless it says elements."""

    places: int
    weights: int
    """Of the chosen scores, sorted."""
    rows: int
    """The hidden states of all tokens, once for each expert that they go to."""
    weighted: int
    """The same in the precision that they are weighted in."""
    inner: int
    """As many rows of the experts' width."""
    hidden: int
    """The hidden states."""
    summed: int
    """The same in the precision that rows are weighted in."""
    joined_elements: int
    """Of the weights of gate and up of all experts."""
    down_elements: int


class GroupedExperts:
    """Rows sorted by expert, one product of all gates and ups, one of all downs, and the rows' sums."""

    keeps = 8

    def __init__(self, frame: Frame, sizes: ExpertSizes, *, trained: bool, slots: tuple[int, int]) -> None:
        self.frame, self.sizes, self.trained, self.slots = frame, sizes, trained, slots
        self.is_wide = sizes.weighted > sizes.rows
        self.begun: Tensor | None = None
        """The gradient of the sum, once for each of the rows."""

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, list[Kept]]:
        """`x` stays the caller's. Without `ending` it stops where the last is kept."""
        machine, save, sizes, frame = self.frame.machine, self.frame.save, self.sizes, self.frame
        if frame.gathering is not None:
            frame.gathering.fetch(*self.slots)
        sorted_places, order = machine.new(sizes.places), machine.new(sizes.places)
        tokens = machine.new(sizes.places)
        rows = machine.new(sizes.rows)
        of_rows = save(tokens)
        machine.drop(tokens)
        weights = machine.new(sizes.weights)
        of_weights = save(order)
        joined = machine.new(2 * sizes.inner)
        machine.multiply()
        of_joined = save(rows) if self.trained else ()
        frame.enter()
        active = machine.new(sizes.inner)
        of_active = save(joined)
        product = machine.new(sizes.inner)
        of_product = save(active)
        machine.drop_all(active, joined)
        out = machine.new(sizes.rows)
        of_down = save(product) if self.trained else ()
        machine.drop(product)
        weighted = machine.new(sizes.weighted)
        of_out = save(out, weights)
        back = machine.new(sizes.places)
        machine.passing(sizes.places)
        of_back = save(back)
        kept = [of_rows, of_weights, of_joined, of_active, of_product, of_down, of_out, of_back]
        local = (sorted_places, order, rows, weights, out)
        if not ending:
            machine.drop_all(*local, weighted, back)
            return None, kept
        again = machine.made_from(weighted, sizes.weighted)
        summed = machine.new(sizes.summed)
        y = machine.new(sizes.hidden) if self.is_wide else machine.keep(summed)
        machine.drop_all(*local, again, back, summed)  # in the order of the code's names
        if frame.gathering is not None:
            for slot in self.slots:
                frame.gathering.release(slot)
        return y, kept

    def begin(self) -> None:
        """What needs nothing that was kept."""
        machine, sizes = self.frame.machine, self.sizes
        wide = machine.new(sizes.summed) if self.is_wide else None
        self.begun = machine.new(sizes.weighted)
        machine.drop(wide)

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        machine, sizes, frame = self.frame.machine, self.sizes, self.frame
        of_rows, of_weights, of_joined, of_active, of_product, of_down, of_out, of_back = kept
        if frame.gathering is not None:
            frame.gathering.fetch(*self.slots)
        if self.begun is None:
            self.begin()
        machine.drop(gradient)
        again = machine.new(sizes.weighted)
        machine.drop_all(self.begun, *of_back)
        self.begun = None
        of_weight, rows = machine.new(sizes.weighted), machine.new(sizes.weighted)
        if self.is_wide:
            rows = machine.made_from(rows, sizes.rows)
        machine.drop_all(of_weight, again, *of_out)
        product = self._product(rows, of_down, sizes.inner, sizes.down_elements)
        up, active = machine.new(sizes.inner), machine.new(sizes.inner)
        machine.drop_all(product, *of_product)
        gate = machine.new(sizes.inner)
        machine.drop_all(active, *of_active)
        joined = machine.new(2 * sizes.inner)
        machine.drop_all(gate, up)
        rows = self._product(joined, of_joined, sizes.rows, sizes.joined_elements)
        machine.drop_all(*of_weights)
        of_input = machine.new(sizes.hidden)
        machine.drop_all(rows, *of_rows)
        if frame.gathering is not None:
            for slot in self.slots:
                frame.gathering.release(slot)
        return of_input

    def _product(self, gradient: Tensor, kept: Kept, input_bytes: int, elements: int) -> Tensor:
        """The gradients of all experts' weights, whole, and of what they were multiplied with."""
        machine = self.frame.machine
        weight = machine.new(elements * self.frame.width) if self.trained else None
        machine.multiply()
        of_input = machine.new(input_bytes)
        machine.drop_all(gradient, *kept)
        if weight is not None:
            self.frame.ready(elements, weight)
        return of_input


class FusedExperts:
    """Liger's experts: gate and up are kept alone, and the weights' gradients come both in one call."""

    keeps = 1

    def __init__(self, frame: Frame, sizes: ExpertSizes, *, trained: bool, slots: tuple[int, int]) -> None:
        self.frame, self.sizes, self.trained, self.slots = frame, sizes, trained, slots
        self.untuned = {False, True}
        """Of the forward and of the backward pass."""

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, list[Kept]]:
        """A recomputation ends when the call is over: an own function keeps what it keeps at its end."""
        machine, sizes, frame = self.frame.machine, self.sizes, self.frame
        if frame.gathering is not None:
            frame.gathering.fetch(*self.slots)
        short = sizes.places // 2
        places = machine.new(short)
        orders = [machine.new(short) for _ in range(3)]
        joined = machine.new(2 * sizes.inner)
        product = machine.new(sizes.inner)
        self._tune(backward=False)
        rows = machine.new(sizes.rows)
        y = machine.new(sizes.hidden)
        kept = frame.save(x, joined, *orders)
        machine.drop_all(joined, product, rows, places, *orders)
        if frame.gathering is not None:
            for slot in self.slots:
                frame.gathering.release(slot)
        if not ending:
            machine.drop(y)
            return None, [kept]
        return y, [kept]

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        """Gradients of frozen weights are made too, and thrown away."""
        machine, sizes, frame = self.frame.machine, self.sizes, self.frame
        if frame.gathering is not None:
            frame.gathering.fetch(*self.slots)
        joined, product = machine.new(2 * sizes.inner), machine.new(sizes.inner)
        self._tune(backward=True)
        down = machine.new(sizes.down_elements * frame.width)
        rows = machine.new(sizes.rows)
        of_input = machine.new(sizes.hidden)
        both = machine.new(sizes.joined_elements * frame.width)
        machine.drop_all(joined, product, rows, gradient, *kept[0])
        if frame.gathering is not None:
            for slot in self.slots:
                frame.gathering.release(slot)
        if self.trained:
            frame.ready(sizes.joined_elements, both)
            frame.ready(sizes.down_elements, down)
        else:
            machine.drop_all(both, down)
        return of_input

    def _tune(self, *, backward: bool) -> None:
        """Triton tries the kernels' forms at their first call."""
        if backward in self.untuned:
            self.frame.machine.passing(TUNING_BYTES)
            self.untuned.remove(backward)


Experts = GroupedExperts | FusedExperts


class ExpertsMlp:
    """Router, experts and the sum with a shared expert, with the calls of the other MLPs."""

    def __init__(
        self,
        frame: Frame,
        *,
        router: Router,
        experts: Experts,
        shared: GatedMlp | None,
        gated: bool,
        hidden_bytes: int,
    ) -> None:
        """`gated`: the shared expert comes first and is multiplied with a gate (Qwen2-MoE)."""
        self.frame, self.router, self.experts, self.shared = frame, router, experts, shared
        self.gated, self.hidden_bytes = gated, hidden_bytes

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, list[Kept]]:
        machine, save = self.frame.machine, self.frame.save
        shared: Tensor | None = None
        of_shared: list[Kept] = []
        if self.shared is not None and self.gated:
            shared, of_shared = self.shared.forward(x)
        routed, of_router = self.router.forward(x)
        y, of_experts = self.experts.forward(x, ending=ending or self.shared is not None)
        of_gate: Kept = ()
        if self.shared is not None and not self.gated:
            shared, of_shared = self.shared.forward(x, ending=ending)
        elif shared is not None:
            of_gate = save(x, shared) if self.router.trained else save(shared)
            if ending:
                shared = machine.made_from(shared, self.hidden_bytes)
        if self.shared is not None:
            y = self._sum(y, shared, ending=ending)
        machine.drop_all(routed.logits, routed.places, routed.weights)
        return y, [*of_router, of_gate, *of_experts, *of_shared]

    def begin(self) -> None:
        """A shared expert's part, or its gate's, comes first, and asks for what was kept at once."""
        if self.shared is None and isinstance(self.experts, GroupedExperts):
            self.experts.begin()

    def _sum(self, y: Tensor | None, shared: Tensor | None, *, ending: bool) -> Tensor | None:
        total = self.frame.machine.new(self.hidden_bytes) if ending else None
        self.frame.machine.drop_all(y, shared)
        return total

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        machine = self.frame.machine
        of_router, of_gate, rest = kept[:_OF_ROUTER], kept[_OF_ROUTER], kept[_OF_ROUTER + 1 :]
        of_experts, of_shared = rest[: self.experts.keeps], rest[self.experts.keeps :]
        held: Tensor | None = None
        of_product: Tensor | None = None
        if self.shared is not None and not self.gated:
            held = self.shared.backward(machine.keep(gradient), of_shared)
        elif self.shared is not None:
            of_product = machine.new(self.hidden_bytes)
            machine.drop_all(*of_gate[-1:])
            held = machine.new(self.hidden_bytes)
            machine.drop_all(*of_gate[:-1])
        held = machine.added(held, self.experts.backward(gradient, of_experts), self.hidden_bytes)
        held = machine.added(held, self.router.backward(of_router), self.hidden_bytes)
        if self.shared is not None and of_product is not None:
            held = self.shared.backward(of_product, of_shared, held)
        return held
