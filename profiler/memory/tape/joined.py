"""Attention whose queries, keys and values are views of one product: gpt2, gpt_neox, phi3."""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.memory.tape.attention import EagerKernel, Heads, Kernel
from llmtop.profiler.memory.tape.layers import Frame, Kept, Linear
from llmtop.profiler.memory.tape.machine import Tensor
from llmtop.profiler.memory.tape.rotary import PartialRotary


class JoinedForm(Struct, frozen=True):
    """How a family's code takes the product apart and turns what it took."""

    rotary: str
    """`none`, `fused` (Liger's kernel, on copies) or `plain`: a part is turned and joined to the rest."""
    part: float
    """Of each head that is turned."""
    by_heads: bool
    """The parts of each head lie together, so that the gradient has to be put in rows again."""
    sliced: bool
    """Each part is a slice, whose gradient is as large as the product; else all are split at once."""
    copied: bool
    """The kernel's output has the layout of joined queries and is copied into rows."""


class JoinedAttention:
    """Beside `Attention` of the module of that name, with the same calls."""

    def __init__(
        self, frame: Frame, heads: Heads, *, kernel: Kernel, joined: Linear, output: Linear, form: JoinedForm
    ) -> None:
        self.frame, self.heads, self.kernel, self.form = frame, heads, kernel, form
        self.joined, self.output = joined, output
        self.rotary = PartialRotary(frame, heads.query, heads.kv, part=form.part, at_once=form.sliced)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        machine = self.frame.machine
        joined, of_joined = self.joined.forward(x)
        query, key, tables = self._turned(joined)
        attended, of_kernel = self.kernel.forward(query, key, joined)
        if self.form.copied:
            attended = machine.made_from(attended, self.heads.query)
        y, of_output = self.output.forward(attended)
        machine.drop_all(attended, query, key, joined)
        return y, [of_joined, tables, of_kernel, of_output]

    def leave(self) -> None:
        """The block's code has ended."""
        if isinstance(self.kernel, EagerKernel):
            self.kernel.leave()

    def _turned(self, joined: Tensor) -> tuple[Tensor, Tensor, Kept]:
        machine = self.frame.machine
        if self.form.rotary == "none":
            return machine.keep(joined), machine.keep(joined), ()
        if self.form.rotary == "fused":
            return machine.new(self.heads.query), machine.new(self.heads.kv), ()
        return self.rotary.forward(machine.keep(joined), machine.keep(joined))

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        of_joined, tables, of_kernel, of_output = kept
        attended = self.output.backward(gradient, of_output)
        query, key, value = self.kernel.backward(attended, of_kernel)
        if self.form.rotary == "plain":
            query, key = self.rotary.backward(query, key, tables)
        return self.joined.backward(self._together(query, key, value), of_joined)

    def _rows(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Plain products leave gradients head by head, and so does what turned queries and keys."""
        eager, turned = isinstance(self.kernel, EagerKernel), self.form.rotary == "plain"
        made_from = self.frame.machine.made_from
        value = made_from(value, self.heads.value) if eager else value
        key = made_from(key, self.heads.kv) if turned else key
        return made_from(query, self.heads.query) if turned or eager else query, key, value

    def _together(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        machine, size = self.frame.machine, self.joined.out_bytes
        if not self.form.by_heads:
            query, key, value = self._rows(query, key, value)
        if self.form.sliced:
            whole = machine.made_from(value, size)
            for part in (key, query):
                machine.drop_all(part, machine.new(size))
            return whole
        whole = machine.new(size)
        machine.drop_all(query, key, value)
        if self.form.by_heads:
            whole = machine.made_from(whole, size)
        return whole
