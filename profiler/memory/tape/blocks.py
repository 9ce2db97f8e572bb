"""One block of a model: attention and MLP with their norms and residual sums, and its recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from llmtop.profiler.memory.tape.layers import Dropout, Frame, Kept, Linear, Norm
from llmtop.profiler.memory.tape.machine import Tensor

if TYPE_CHECKING:
    from typing import Protocol

    class Mlp(Protocol):
        """`GatedMlp`, `JoinedMlp`, `PlainMlp` and `ExpertsMlp`."""

        def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, list[Kept]]: ...
        def begin(self) -> None: ...
        def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor: ...

    class Attending(Protocol):
        """`Attention`, `JoinedAttention` and `LatentAttention`."""

        def forward(self, x: Tensor) -> tuple[Tensor, list[Kept]]: ...
        def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor: ...
        def leave(self) -> None: ...


class _AtOnce:
    """Its backward pass begins with something that was kept."""

    def begin(self) -> None:
        """Nothing comes before that."""


class GatedMlp(_AtOnce):
    """Gate, activation, up, product, down; Liger computes the activation anew and writes over its inputs."""

    def __init__(self, frame: Frame, *, gate: Linear, up: Linear, down: Linear, fused: bool) -> None:
        self.frame, self.gate, self.up, self.down, self.fused = frame, gate, up, down, fused
        self.bytes = gate.out_bytes

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, list[Kept]]:
        machine, save = self.frame.machine, self.frame.save
        gate, of_gate = self.gate.forward(x)
        if self.fused:
            up, of_up = self.up.forward(x)
            product = machine.new(self.bytes)
            of_product = save(gate, up)
            machine.drop_all(gate, up)
        else:
            self.frame.enter()
            active = machine.new(self.bytes)
            of_active = save(gate)
            machine.drop(gate)
            up, of_up = self.up.forward(x)
            product = machine.new(self.bytes)
            of_product = (*of_active, *save(active, up))
            machine.drop_all(active, up)
        y, of_down = self.down.forward(product) if ending else (None, self.down.recompute(product))
        machine.drop(product)
        return y, [of_gate, of_up, of_product, of_down]

    def backward(self, gradient: Tensor, kept: list[Kept], held: Tensor | None = None) -> Tensor:
        """`held` is what the gradient of the input already is; the sum of both is given."""
        machine = self.frame.machine
        of_gate, of_up, of_product, of_down = kept
        product = self.down.backward(gradient, of_down)
        if self.fused:
            gate, up = of_product
            machine.drop(product)
            of_input = self.up.backward(up, of_up, held)
            return self.gate.backward(gate, of_gate, of_input)
        gate, active, up = of_product
        up_gradient, active_gradient = machine.new(self.bytes), machine.new(self.bytes)
        machine.drop_all(product, up, active)
        of_input = self.up.backward(up_gradient, of_up, held)
        self.frame.enter()
        gate_gradient = machine.new(self.bytes)
        machine.drop_all(active_gradient, gate)
        return self.gate.backward(gate_gradient, of_gate, of_input)


class JoinedMlp(_AtOnce):
    """As `GatedMlp`, with gate and up in one product (Phi-3)."""

    def __init__(self, frame: Frame, *, joined: Linear, down: Linear, fused: bool) -> None:
        self.frame, self.joined, self.down, self.fused = frame, joined, down, fused
        self.bytes = joined.out_bytes // 2

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, list[Kept]]:
        machine, save = self.frame.machine, self.frame.save
        joined, of_joined = self.joined.forward(x)
        if self.fused:  # Liger's kernel takes both halves as copies
            gate, up = machine.new(self.bytes), machine.new(self.bytes)
            product = machine.new(self.bytes)
            of_product = save(gate, up)
            machine.drop_all(gate, up, joined)
        else:
            self.frame.enter()
            active = machine.new(self.bytes)
            product = machine.new(self.bytes)
            of_product = save(joined, active)
            machine.drop(active)
        y, of_down = self.down.forward(product) if ending else (None, self.down.recompute(product))
        # A name for the gate, which is a view of both, is there to the end.
        machine.drop_all(product, None if self.fused else joined)
        return y, [of_joined, of_product, of_down]

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        machine = self.frame.machine
        of_joined, of_product, of_down = kept
        product = self.down.backward(gradient, of_down)
        if self.fused:
            machine.drop(product)
            gate, up = of_product
        else:
            joined, kept_active = of_product
            active, up = machine.new(self.bytes), machine.new(self.bytes)
            machine.drop_all(product, kept_active)
            gate = machine.new(self.bytes)
            machine.drop_all(active, joined)
        whole = machine.new(2 * self.bytes)
        machine.drop_all(gate, up)
        return self.joined.backward(whole, of_joined)


class PlainMlp(_AtOnce):
    """Up, activation, down."""

    def __init__(
        self,
        frame: Frame,
        *,
        up: Linear,
        down: Linear,
        python_gelu: bool,
        in_place: bool,
        inline: bool = False,
    ) -> None:
        """`python_gelu`: the activation is written as arithmetic; `in_place`: it keeps its output alone;
        `inline`: the block's own code, whose name for the input is given away after the first product."""
        self.frame, self.up, self.down, self.inline = frame, up, down, inline
        self.python_gelu, self.in_place = python_gelu, in_place
        self.bytes = up.out_bytes

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, list[Kept]]:
        machine, save = self.frame.machine, self.frame.save
        inner, of_up = self.up.forward(x)
        if self.inline:
            machine.drop(x)
        if self.python_gelu:
            half = machine.new(self.bytes)
            cubed = inner
            for _ in range(4):  # cubed, times a constant, added, times a constant
                following = machine.new(self.bytes)
                if cubed is not inner:
                    machine.drop(cubed)
                cubed = following
            tanh = machine.made_from(cubed, self.bytes)
            raised = machine.new(self.bytes)
            active = machine.new(self.bytes)
            of_active = save(inner, half, tanh, raised)
            machine.drop_all(half, tanh, raised)
        else:
            active = machine.new(self.bytes)
            of_active = save(active) if self.in_place else save(inner)
        machine.drop(inner)
        y, of_down = self.down.forward(active) if ending else (None, self.down.recompute(active))
        machine.drop(active)
        return y, [of_up, of_active, of_down]

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        machine = self.frame.machine
        of_up, of_active, of_down = kept
        active = self.down.backward(gradient, of_down)
        if self.python_gelu:
            inner, half, tanh, raised = of_active
            of_raised, of_half = machine.new(self.bytes), machine.new(self.bytes)
            machine.drop_all(active, half, raised)
            of_tanh = machine.new(self.bytes)
            machine.drop_all(of_raised, tanh)
            of_sum = machine.made_from(of_tanh, self.bytes)
            of_cube = machine.new(self.bytes)
            power, tripled, cubed = (machine.new(self.bytes) for _ in range(3))
            machine.drop_all(of_cube, power, tripled, inner, cubed)
            scaled = machine.new(self.bytes)
            machine.drop_all(of_half, scaled)
            return self.up.backward(of_sum, of_up)
        of_inner = machine.new(self.bytes)
        machine.drop_all(active, *of_active)
        return self.up.backward(of_inner, of_up)


class BlockKept(Struct, frozen=True):
    """What one block's forward pass leaves to its backward pass."""

    norms: list[Kept]
    """In the order of `Places`."""
    dropouts: list[Kept]
    attention: list[Kept]
    mlp: list[Kept]


class Places(Struct, frozen=True):
    """The norms of a block, each where it is."""

    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None


class Block:
    """Attention, sum, MLP, sum, with norms before or after attention and MLP, or both."""

    def __init__(
        self,
        frame: Frame,
        *,
        norms: Places,
        attention: Attending,
        mlp: Mlp,
        hidden_bytes: int,
        parallel: bool,
        dropout: bool,
        viewed: bool = False,
        scaled: bool = False,
        holds_attended: bool = False,
    ) -> None:
        """`viewed`: the MLP is written in the block's code (`PlainMlp.inline`) and takes all tokens as rows,
        as the sum behind it does, so that gradients come as views; `scaled`: what attention and MLP give is
        multiplied before it is added (Granite); `holds_attended`: a name holds what attention gave to the
        end (GPT-2)."""
        self.frame, self.norms, self.attention, self.mlp = frame, norms, attention, mlp
        self.hidden_bytes, self.parallel, self.viewed = hidden_bytes, parallel, viewed
        self.scaled, self.holds_attended = scaled, holds_attended
        self.dropout = Dropout(frame, hidden_bytes) if dropout else None

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, BlockKept]:
        """`x` stays the caller's. Without `ending` the pass stops at the last product, as a recomputation
        does that has all that it was asked for (torch `utils/checkpoint.py`, early stop)."""
        y, kept = self._forward(x, ending=ending)
        self.attention.leave()
        return y, kept

    def _forward(self, x: Tensor, *, ending: bool) -> tuple[Tensor | None, BlockKept]:
        machine, norms = self.frame.machine, self.norms
        self.frame.enter(3)  # the block, its norm, its attention
        normed, of_first = self._before(norms.before_attention, x)
        attended, of_attention = self.attention.forward(normed)
        if self.parallel:
            return self._parallel(x, normed, attended, of_first, of_attention)
        machine.drop(normed)
        of_dropouts: list[Kept] = []
        attended = self._dropped(attended, of_dropouts)
        attended, of_second = self._after(norms.after_attention, attended)
        held = machine.keep(attended) if self.holds_attended else None
        middle = self._sum(attended)
        self.frame.enter(2)
        normed, of_third = self._before(norms.before_mlp, middle)
        ends_in_product = norms.after_mlp is None and self.dropout is None and not self.scaled
        out, of_mlp = self.mlp.forward(normed, ending=ending or not ends_in_product)
        if not self.viewed:
            machine.drop(normed)
        of_last: Kept = ()
        if out is not None:
            out = self._dropped(out, of_dropouts)
            out, of_last = self._after(norms.after_mlp, out)
        kept = BlockKept([of_first, of_second, of_third, of_last], of_dropouts, of_attention, of_mlp)
        if not ending or out is None:
            machine.drop_all(out, middle, held)
            return None, kept
        y = self._sum(out)
        machine.drop_all(middle, held)
        return y, kept

    def _before(self, norm: Norm | None, x: Tensor) -> tuple[Tensor, Kept]:
        return (self.frame.machine.keep(x), ()) if norm is None else norm.forward(x)

    def _after(self, norm: Norm | None, branch: Tensor) -> tuple[Tensor, Kept]:
        """Drops what it takes."""
        if norm is None:
            return branch, ()
        normed, kept = norm.forward(branch)
        self.frame.machine.drop(branch)
        return normed, kept

    def _dropped(self, branch: Tensor, kept: list[Kept]) -> Tensor:
        if self.dropout is None:
            return branch
        branch, mask = self.dropout.forward(branch)
        kept.append(mask)
        return branch

    def _sum(self, branch: Tensor) -> Tensor:
        if not self.scaled:
            return self.frame.machine.made_from(branch, self.hidden_bytes)
        product = self.frame.machine.new(self.hidden_bytes)
        total = self.frame.machine.made_from(product, self.hidden_bytes)
        self.frame.machine.drop(branch)
        return total

    def _parallel(
        self, x: Tensor, normed: Tensor, attended: Tensor, of_first: Kept, of_attention: list[Kept]
    ) -> tuple[Tensor, BlockKept]:
        machine = self.frame.machine
        kept: Kept = ()
        if self.norms.before_mlp is not None:
            machine.drop(normed)
            normed, kept = self.norms.before_mlp.forward(x)
        out, of_mlp = self.mlp.forward(normed)
        machine.drop(normed)
        partial = machine.new(self.hidden_bytes)
        y = machine.new(self.hidden_bytes)
        machine.drop_all(partial, out, attended)
        return y, BlockKept([of_first, (), kept, ()], [], of_attention, of_mlp)

    def end_forward(self) -> None:
        """The code that called the blocks one after another has ended."""

    def begin_reentrant(self) -> None:
        """What a reentrant checkpoint does before its block is recomputed."""

    def begin(self) -> None:
        """What the backward pass does before it asks for anything that was kept."""
        self.mlp.begin()

    def backward(self, gradient: Tensor, kept: BlockKept) -> Tensor:
        if self.parallel:
            return self._parallel_backward(gradient, kept)
        norms, (of_first, of_second, of_third, of_last) = self.norms, kept.norms
        self.frame.enter(2)
        gradient.is_view |= self.viewed
        branch = self._branch(gradient, norms.after_mlp, of_last)
        if self.dropout is not None:
            branch = self.dropout.backward(branch, kept.dropouts[1])
        branch = self.mlp.backward(branch, kept.mlp)
        gradient = self._joined(gradient, branch, norms.before_mlp, of_third)
        gradient.is_view |= self.viewed
        self.frame.enter(2)
        branch = self._branch(gradient, norms.after_attention, of_second)
        if self.dropout is not None:
            branch = self.dropout.backward(branch, kept.dropouts[0])
        branch = self.attention.backward(branch, kept.attention)
        return self._joined(gradient, branch, norms.before_attention, of_first)

    def _branch(self, gradient: Tensor, after: Norm | None, kept: Kept) -> Tensor:
        """From the sum's gradient, which stays, to that of what attention or MLP gave."""
        branch = self.frame.machine.keep(gradient)
        if self.scaled:
            branch = self.frame.machine.made_from(branch, self.hidden_bytes)
        return branch if after is None else after.backward(branch, kept)

    def _joined(self, gradient: Tensor, branch: Tensor, before: Norm | None, kept: Kept) -> Tensor:
        if before is not None:
            branch = before.backward(branch, kept)
        return self.frame.machine.added(gradient, branch, self.hidden_bytes)

    def _parallel_backward(self, gradient: Tensor, kept: BlockKept) -> Tensor:
        machine = self.frame.machine
        branch = self.mlp.backward(machine.keep(gradient), kept.mlp)
        if self.norms.before_mlp is not None:
            branch = self.norms.before_mlp.backward(branch, kept.norms[2])
            attended = machine.keep(gradient)
            gradient = machine.added(gradient, branch, self.hidden_bytes)
            branch = self.attention.backward(attended, kept.attention)
        else:
            other = self.attention.backward(machine.keep(gradient), kept.attention)
            branch = machine.added(branch, other, self.hidden_bytes)
        return self._joined(gradient, branch, self.norms.before_attention, kept.norms[0])
