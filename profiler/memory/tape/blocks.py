"""One block of a model: attention and MLP with their norms and residual sums, and its recomputation."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from llmtop.profiler.memory.tape.layers import Dropout, Frame, Kept, Linear, Norm
from llmtop.profiler.memory.tape.machine import Tensor


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
            machine.drop(gate, up)
        else:
            self.frame.enter()
            active = machine.new(self.bytes)
            of_active = save(gate)
            machine.drop(gate)
            up, of_up = self.up.forward(x)
            product = machine.new(self.bytes)
            of_product = (*of_active, *save(active, up))
            machine.drop(active, up)
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
        machine.drop(product, up, active)
        of_input = self.up.backward(up_gradient, of_up, held)
        self.frame.enter()
        gate_gradient = machine.new(self.bytes)
        machine.drop(active_gradient, gate)
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
            machine.drop(gate, up, joined)
        else:
            self.frame.enter()
            active = machine.new(self.bytes)
            product = machine.new(self.bytes)
            of_product = save(joined, active)
            machine.drop(active, joined)
        y, of_down = self.down.forward(product) if ending else (None, self.down.recompute(product))
        machine.drop(product)
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
            machine.drop(product, kept_active)
            gate = machine.new(self.bytes)
            machine.drop(active, joined)
        whole = machine.new(2 * self.bytes)
        machine.drop(gate, up)
        return self.joined.backward(whole, of_joined)


class PlainMlp(_AtOnce):
    """Up, activation, down."""

    def __init__(self, frame: Frame, *, up: Linear, down: Linear, python_gelu: bool, in_place: bool) -> None:
        """`python_gelu`: the activation is written as arithmetic; `in_place`: it keeps its output alone."""
        self.frame, self.up, self.down = frame, up, down
        self.python_gelu, self.in_place = python_gelu, in_place
        self.bytes = up.out_bytes

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, list[Kept]]:
        machine, save = self.frame.machine, self.frame.save
        inner, of_up = self.up.forward(x)
        if self.python_gelu:
            half = machine.new(self.bytes)
            cubed = inner
            for _ in range(4):  # cubed, times a constant, added, times a constant
                following = machine.new(self.bytes)
                if cubed is not inner:
                    machine.drop(cubed)
                cubed = following
            tanh = machine.new(self.bytes)
            machine.drop(cubed)
            raised = machine.new(self.bytes)
            active = machine.new(self.bytes)
            of_active = save(inner, half, tanh, raised)
            machine.drop(half, tanh, raised)
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
            machine.drop(active, half, raised)
            of_tanh = machine.new(self.bytes)
            machine.drop(of_raised, tanh)
            of_sum = machine.new(self.bytes)
            machine.drop(of_tanh)
            of_cube = machine.new(self.bytes)
            power, cubed = machine.new(self.bytes), machine.new(self.bytes)
            machine.drop(of_cube, power, inner, cubed)
            scaled = machine.new(self.bytes)
            machine.drop(of_half, scaled)
            return self.up.backward(of_sum, of_up)
        of_inner = machine.new(self.bytes)
        machine.drop(active, *of_active)
        return self.up.backward(of_inner, of_up)


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


class BlockKept(Struct, frozen=True):
    """What one block's forward pass leaves to its backward pass."""

    norms: list[Kept]
    dropouts: list[Kept]
    attention: list[Kept]
    mlp: list[Kept]


class Block:
    """Norm, attention, sum, norm, MLP, sum; of four norms two follow attention and MLP."""

    def __init__(
        self,
        frame: Frame,
        *,
        norms: list[Norm],
        attention: Attending,
        mlp: Mlp,
        hidden_bytes: int,
        parallel: bool,
        dropout: bool,
    ) -> None:
        self.frame, self.norms, self.attention, self.mlp = frame, norms, attention, mlp
        self.hidden_bytes, self.parallel = hidden_bytes, parallel
        self.dropout = Dropout(frame, hidden_bytes) if dropout else None

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, BlockKept]:
        """`x` stays the caller's. Without `ending` the pass stops at the last product, as a recomputation
        does that has all that it was asked for (torch `utils/checkpoint.py`, early stop)."""
        y, kept = self._forward(x, ending=ending)
        self.attention.leave()
        return y, kept

    def _forward(self, x: Tensor, *, ending: bool) -> tuple[Tensor | None, BlockKept]:
        machine = self.frame.machine
        between = self._sum
        first, last = self.norms[0], self.norms[-1 if len(self.norms) < 4 else 2]
        self.frame.enter(3)  # the block, its norm, its attention
        normed, of_first = first.forward(x)
        attended, of_attention = self.attention.forward(normed)
        if self.parallel:
            return self._parallel(x, normed, attended, of_first, of_attention)
        machine.drop(normed)
        of_norms, of_dropouts = [of_first], []
        if self.dropout is not None:
            attended, of_dropout = self.dropout.forward(attended)
            of_dropouts.append(of_dropout)
        if len(self.norms) == 4:
            after, kept = self.norms[1].forward(attended)
            machine.drop(attended)
            attended = after
            of_norms.append(kept)
        middle = between(attended)
        self.frame.enter(2)
        normed, kept = last.forward(middle)
        of_norms.append(kept)
        ends_in_product = len(self.norms) < 4 and self.dropout is None
        out, of_mlp = self.mlp.forward(normed, ending=ending or not ends_in_product)
        machine.drop(normed)
        if self.dropout is not None and out is not None:
            out, of_dropout = self.dropout.forward(out)
            of_dropouts.append(of_dropout)
        if len(self.norms) == 4 and out is not None:
            after, kept = self.norms[3].forward(out)
            machine.drop(out)
            out = after
            of_norms.append(kept)
        if not ending or out is None:
            machine.drop(out, middle)
            return None, BlockKept(of_norms, of_dropouts, of_attention, of_mlp)
        y = between(out)
        machine.drop(middle)
        return y, BlockKept(of_norms, of_dropouts, of_attention, of_mlp)

    def _sum(self, branch: Tensor) -> Tensor:
        total = self.frame.machine.new(self.hidden_bytes)
        self.frame.machine.drop(branch)
        return total

    def _parallel(
        self, x: Tensor, normed: Tensor, attended: Tensor, of_first: Kept, of_attention: list[Kept]
    ) -> tuple[Tensor, BlockKept]:
        machine = self.frame.machine
        kept: Kept = ()
        if len(self.norms) > 1:
            machine.drop(normed)
            normed, kept = self.norms[1].forward(x)
        out, of_mlp = self.mlp.forward(normed)
        machine.drop(normed)
        partial = machine.new(self.hidden_bytes)
        machine.drop(out, attended)
        y = machine.new(self.hidden_bytes)
        machine.drop(partial)
        return y, BlockKept([of_first, kept], [], of_attention, of_mlp)

    def begin(self) -> None:
        """What the backward pass does before it asks for anything that was kept."""
        self.mlp.begin()

    def backward(self, gradient: Tensor, kept: BlockKept) -> Tensor:
        machine = self.frame.machine
        if self.parallel:
            return self._parallel_backward(gradient, kept)
        of_norms = list(kept.norms)
        self.frame.enter(2)
        branch = machine.keep(gradient)
        if len(self.norms) == 4:
            branch = self.norms[3].backward(branch, of_norms.pop())
        if self.dropout is not None:
            branch = self.dropout.backward(branch, kept.dropouts[1])
        branch = self.mlp.backward(branch, kept.mlp)
        branch = self.norms[-1 if len(self.norms) < 4 else 2].backward(branch, of_norms.pop())
        gradient = machine.added(gradient, branch, self.hidden_bytes)
        self.frame.enter(2)
        branch = machine.keep(gradient)
        if len(self.norms) == 4:
            branch = self.norms[1].backward(branch, of_norms.pop())
        if self.dropout is not None:
            branch = self.dropout.backward(branch, kept.dropouts[0])
        branch = self.attention.backward(branch, kept.attention)
        branch = self.norms[0].backward(branch, of_norms.pop())
        return machine.added(gradient, branch, self.hidden_bytes)

    def _parallel_backward(self, gradient: Tensor, kept: BlockKept) -> Tensor:
        machine = self.frame.machine
        branch = self.mlp.backward(machine.keep(gradient), kept.mlp)
        if len(self.norms) > 1:
            branch = self.norms[1].backward(branch, kept.norms[1])
            gradient = machine.added(gradient, branch, self.hidden_bytes)
            branch = self.attention.backward(machine.keep(gradient), kept.attention)
        else:
            other = self.attention.backward(machine.keep(gradient), kept.attention)
            branch = machine.added(branch, other, self.hidden_bytes)
        branch = self.norms[0].backward(branch, kept.norms[0])
        return machine.added(gradient, branch, self.hidden_bytes)
