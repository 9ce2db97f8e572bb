"""The final norm, the head and the loss, forward and backward: the plain path, and Liger's two losses."""

from __future__ import annotations

from llmtop.profiler.memory.loss import liger_chunk_tokens
from llmtop.profiler.memory.tape.layers import Frame, Linear
from llmtop.profiler.memory.tape.machine import Tensor


class PlainLoss:
    """transformers' `ForCausalLMLoss`; with `fused` Liger's cross-entropy over whole logits."""

    def __init__(
        self, frame: Frame, head: Linear, *, capped: bool, fused: bool, scaled: bool = False
    ) -> None:
        """`scaled`: logits are divided by a number (Granite)."""
        self.frame, self.head, self.capped, self.fused = frame, head, capped, fused
        self.scaled = scaled
        self.bytes = head.out_bytes
        self.wide_bytes = self.bytes // frame.width * 4
        self.casts = frame.width != 4

    def run(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Forward and backward; gives the gradient of `x`, which it drops, and of the head where trained."""
        machine = self.frame.machine
        logits, of_head = self.head.forward(x)
        machine.drop(x)
        if self.scaled:
            logits = machine.made_from(logits, self.bytes)
        tanh: Tensor | None = None
        if self.capped:  # divided, tanh (kept), multiplied
            divided = machine.made_from(logits, self.bytes)
            tanh = machine.made_from(divided, self.bytes)
            logits = machine.new(self.bytes)
        wide = machine.new(self.wide_bytes) if self.casts else machine.keep(logits)
        gradient = self._fused(wide, logits) if self.fused else self._plain(wide, logits)
        if self.capped:
            for held in (None, tanh, None):
                passed = machine.new(self.bytes)
                machine.drop_all(gradient, held)
                gradient = passed
        if self.scaled:
            gradient = machine.made_from(gradient, self.bytes)
        return self.head.backward(gradient, of_head), []

    def _plain(self, wide: Tensor, logits: Tensor) -> Tensor:
        machine = self.frame.machine
        softmax = machine.new(self.wide_bytes)
        machine.drop_all(wide, logits)
        machine.in_backward = True
        of_softmax = machine.new(self.wide_bytes)
        of_wide = machine.new(self.wide_bytes)
        machine.drop_all(of_softmax, softmax)
        return self._narrowed(of_wide)

    def _fused(self, wide: Tensor, logits: Tensor) -> Tensor:
        self.frame.machine.drop(logits)
        self.frame.machine.in_backward = True
        return self._narrowed(wide)

    def _narrowed(self, wide: Tensor) -> Tensor:
        if not self.casts:
            return wide
        return self.frame.machine.made_from(wide, self.bytes)


class ChunkedLoss:
    """Liger's fused head and loss: the gradients are made in the forward pass, chunk by chunk."""

    def __init__(self, frame: Frame, head: Linear, *, sharded: bool, watched: bool) -> None:
        """`sharded`: ZeRO-3 learns in the first pass that the loss reads the head, which is not its own, and
        gathers it on the spot (`zero/parameter_offload.py:ZeROOrderedDict`).

        `watched`: what is saved is counted, as an alias (`probes/activations.py:to_keep`). The head's
        gradient, which this loss saves, has two holders then: autograd adds a tied one's to it in a third.
        """
        self.frame, self.head, self.is_unknown, self.watched = frame, head, sharded, watched
        chunk = liger_chunk_tokens(frame.tokens, head.rows, head.columns)
        self.chunk_bytes = chunk * head.rows * frame.width

    def run(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        machine, gathering = self.frame.machine, self.frame.gathering
        gathered = machine.new(self.head.weight_bytes) if self.is_unknown else None
        if gathering is not None and self.is_unknown:
            gathering.learn(self.head.slot)
        elif gathering is not None:
            gathering.fetch(self.head.slot)
        self.is_unknown = False
        gradient = machine.view(self.head.in_bytes)
        made = machine.view if self.watched else machine.new
        of_head = [made(self.head.weight_bytes)] if self.head.trained else []
        machine.passing(self.chunk_bytes)
        machine.drop_all(x, gathered)
        if gathering is not None:
            gathering.release(self.head.slot)
        machine.in_backward = True
        return gradient, of_head


Loss = PlainLoss | ChunkedLoss
