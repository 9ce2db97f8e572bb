"""Attention whose queries, keys and values are views of one product: gpt2, gpt_neox, phi3."""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.memory.tape.attention import EagerKernel, Heads, Kernel
from llmtop.profiler.memory.tape.layers import Frame, Kept, Linear
from llmtop.profiler.memory.tape.machine import Tensor


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

    def forward(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        machine = self.frame.machine
        joined, of_joined = self.joined.forward(x)
        query, key = self._turned(joined, self.heads.query), self._turned(joined, self.heads.kv)
        attended, of_kernel = self.kernel.forward(query, key, joined)
        if self.form.copied:
            rows = machine.new(self.heads.query)
            machine.drop(attended)
            attended = rows
        y, of_output = self.output.forward(attended)
        machine.drop(attended, query, key, joined)
        return y, [of_joined, of_kernel, of_output]

    def leave(self) -> None:
        """The block's code has ended."""
        if isinstance(self.kernel, EagerKernel):
            self.kernel.leave()

    def _turned(self, joined: Tensor, size: int) -> Tensor:
        machine = self.frame.machine
        if self.form.rotary == "none":
            return machine.keep(joined)
        if self.form.rotary == "fused":
            return machine.new(size)
        part = self._part(size)
        by_cosine, negated, turned = machine.new(part), machine.new(part // 2), machine.new(part)
        machine.drop(negated)
        by_sine = machine.new(part)
        machine.drop(turned)
        whole = machine.new(part)
        machine.drop(by_cosine, by_sine)
        y = machine.new(size)
        machine.drop(whole)
        return y

    def _part(self, size: int) -> int:
        return round(self.form.part * size)

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        of_joined, of_kernel, of_output = kept
        attended = self.output.backward(gradient, of_output)
        query, key, value = self.kernel.backward(attended, of_kernel)
        key, query = self._turned_back(key, self.heads.kv), self._turned_back(query, self.heads.query)
        return self.joined.backward(self._together(query, key, value), of_joined)

    def _turned_back(self, gradient: Tensor, size: int) -> Tensor:
        """The gradients of the turned part and of the rest, each as large as the whole, and their sum."""
        if self.form.rotary != "plain":
            return gradient
        machine, part = self.frame.machine, self._part(size)
        by_sine, negated = machine.new(part), machine.new(part // 2)
        of_part = machine.new(part)
        machine.drop(negated)
        other_half = machine.new(part)
        machine.drop(by_sine, other_half)
        by_cosine = machine.new(part)
        machine.drop(by_cosine)
        rest = machine.new(size)
        machine.drop(gradient)
        whole = machine.new(size)
        machine.drop(of_part, rest)
        return whole

    def _together(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        machine, size = self.frame.machine, self.joined.out_bytes
        if self.form.sliced:
            whole = machine.new(size)
            machine.drop(value)
            for part in (key, query):
                machine.passing(size)
                machine.drop(part)
            return whole
        whole = machine.new(size)
        machine.drop(query, key, value)
        if self.form.by_heads:
            rows = machine.new(size)
            machine.drop(whole)
            whole = rows
        return whole
