"""BLOOM's block: sums inside attention and MLP, scores that begin with slopes, its own function for GELU.

After transformers 5.24, `models/bloom/modeling_bloom.py`.
"""

from __future__ import annotations

from llmtop.profiler.memory.tape.attention import Heads
from llmtop.profiler.memory.tape.blocks import Block, BlockKept
from llmtop.profiler.memory.tape.layers import Frame, Kept, Linear
from llmtop.profiler.memory.tape.machine import Tensor


class BloomAttention:
    """One product for queries, keys and values, of which each is a slice; slopes and products in one sum."""

    def __init__(self, frame: Frame, heads: Heads, *, joined: Linear, output: Linear) -> None:
        self.frame, self.heads, self.joined, self.output = frame, heads, joined, output
        self.casts = frame.width != 4
        self.returned: Tensor | None = None
        """The weights, which the block's code is given too and gives to its caller."""
        self.zeros: Tensor | None = None
        """The gradient that a reentrant checkpoint makes of them."""
        self.handed_on: Tensor | None = None
        """Those of the block before, which the caller's name holds until the next block gives its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        """With the residual added."""
        machine, heads, save = self.frame.machine, self.heads, self.frame.save
        joined, of_joined = self.joined.forward(x)
        taken = [machine.new(heads.query) if heads.several else machine.keep(joined) for _ in range(3)]
        query, key, value = taken
        scores = machine.new(heads.scores)
        kept = save(query, key)
        masked = machine.new(heads.scores)
        wide = machine.new(heads.wide_scores) if self.casts else None
        softmax = machine.made_from(wide, heads.wide_scores)
        kept = (*kept, *save(softmax))
        weights = machine.made_from(softmax, heads.scores) if self.casts else softmax
        kept = (*kept, *save(weights, value))
        attended = machine.made_from(machine.new(heads.output), heads.output)
        y, of_output = self.output.forward(attended)
        total = machine.made_from(y, self.output.out_bytes)
        machine.drop_all(joined, *taken, scores, masked, attended)
        self.returned = weights
        return total, [of_joined, kept, of_output]

    def leave(self) -> None:
        """The block's code was left in the middle."""
        self.frame.machine.drop(self.returned)
        self.returned = None

    def hand_on(self) -> None:
        """The block's code has ended."""
        self.frame.machine.drop(self.handed_on)
        self.handed_on, self.returned = self.returned, None

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        machine, heads = self.frame.machine, self.heads
        of_joined, of_kernel, of_output = kept
        queries, keys, softmax, weights, values = of_kernel
        attended = self.output.backward(gradient, of_output)
        if heads.several:
            attended = machine.made_from(attended, heads.output)
        of_value, of_scores = machine.new(heads.output), machine.new(heads.scores)
        machine.drop_all(attended, values, weights)
        if self.zeros is not None:
            of_scores = machine.made_from(of_scores, heads.scores)
        if self.casts:
            of_scores = machine.made_from(of_scores, heads.wide_scores)
        result, product = machine.new(heads.wide_scores), machine.new(heads.wide_scores)
        machine.drop_all(product, of_scores, softmax)
        if self.casts:
            result = machine.made_from(result, heads.scores)
        of_query = machine.made_from(machine.new(heads.query), heads.query)
        of_key = machine.made_from(machine.new(heads.query), heads.query)
        machine.drop_all(result, queries, keys)
        whole = machine.made_from(of_value, self.joined.out_bytes)
        for part in (of_key, of_query):
            machine.drop_all(part, machine.new(self.joined.out_bytes))
        return self.joined.backward(whole, of_joined)


class BloomMlp:
    """Up, GELU as one function that keeps its input alone, down."""

    def __init__(self, frame: Frame, *, up: Linear, down: Linear) -> None:
        self.frame, self.up, self.down, self.bytes = frame, up, down, up.out_bytes

    def begin(self) -> None:
        """Nothing is asked for before the rest."""

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, list[Kept]]:
        """With the residual added."""
        machine = self.frame.machine
        inner, of_up = self.up.forward(x)
        half = machine.new(self.bytes)
        raised = machine.made_from(self._tanh(), self.bytes)
        active = machine.made_from(half, self.bytes)
        machine.drop(raised)
        of_active = self.frame.save(inner)
        machine.drop(inner)
        if not ending:
            of_down = self.down.recompute(active)
            machine.drop(active)
            return None, [of_up, of_active, of_down]
        y, of_down = self.down.forward(active)
        total = machine.made_from(y, self.down.out_bytes)
        machine.drop(active)
        return total, [of_up, of_active, of_down]

    def _tanh(self) -> Tensor:
        """Of the scaled input times one and its square."""
        machine = self.frame.machine
        scaled = machine.new(self.bytes)
        squared = machine.made_from(machine.new(self.bytes), self.bytes)
        product = machine.made_from(machine.made_from(squared, self.bytes), self.bytes)
        machine.drop(scaled)
        return machine.made_from(product, self.bytes)

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        machine = self.frame.machine
        of_up, of_active, of_down = kept
        active = self.down.backward(gradient, of_down)
        tanh = self._tanh()
        half = machine.new(self.bytes)
        rest = machine.made_from(machine.new(self.bytes), self.bytes)
        slope = machine.made_from(machine.new(self.bytes), self.bytes)
        slope = machine.made_from(slope, self.bytes)
        product = machine.made_from(rest, self.bytes)
        machine.drop(slope)
        first = machine.made_from(half, self.bytes)
        machine.drop(product)
        second = machine.made_from(machine.new(self.bytes), self.bytes)
        factor = machine.made_from(first, self.bytes)
        machine.drop(second)
        of_inner = machine.new(self.bytes)
        machine.drop_all(factor, tanh, active, *of_active)
        return self.up.backward(of_inner, of_up)


class BloomBlock(Block):
    """A name holds each norm's output until the next one is there; weights outlive the block."""

    def forward(self, x: Tensor, *, ending: bool = True) -> tuple[Tensor | None, BlockKept]:
        y, kept = self._forward(x, ending=ending)
        if y is None:
            self.attention.leave()
        else:
            self._weights().hand_on()
        return y, kept

    def end_forward(self) -> None:
        self._weights().hand_on()

    def begin_reentrant(self) -> None:
        weights = self._weights()
        weights.zeros = self.frame.machine.new(weights.heads.scores)

    def backward(self, gradient: Tensor, kept: BlockKept) -> Tensor:
        before = super().backward(gradient, kept)
        weights = self._weights()
        weights.hand_on()
        self.frame.machine.drop(weights.zeros)
        weights.zeros = None
        return before

    def _weights(self) -> BloomAttention:
        assert isinstance(self.attention, BloomAttention)
        return self.attention

    def _forward(self, x: Tensor, *, ending: bool) -> tuple[Tensor | None, BlockKept]:
        machine, norms = self.frame.machine, self.norms
        assert norms.before_attention is not None and norms.before_mlp is not None
        self.frame.enter(3)
        normed, of_first = norms.before_attention.forward(x)
        middle, of_attention = self.attention.forward(normed)
        self.frame.enter(2)
        second, of_second = norms.before_mlp.forward(middle)
        machine.drop(normed)
        y, of_mlp = self.mlp.forward(second, ending=ending)
        machine.drop_all(second, middle)
        return y, BlockKept([of_first, (), of_second, ()], [], of_attention, of_mlp)
