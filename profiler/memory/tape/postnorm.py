"""Blocks that normalize what attention and MLP give, and nothing that they read (OLMo-2)."""

from __future__ import annotations

from llmtop.profiler.memory.tape.attention import Attention
from llmtop.profiler.memory.tape.blocks import Block, BlockKept, GatedMlp, Places
from llmtop.profiler.memory.tape.layers import Frame
from llmtop.profiler.memory.tape.machine import Tensor


class PostNormBlock(Block):
    """Products read the residual itself, so that its gradient is summed up one product after another."""

    def __init__(
        self, frame: Frame, *, norms: Places, attention: Attention, mlp: GatedMlp, hidden_bytes: int
    ) -> None:
        super().__init__(
            frame,
            norms=norms,
            attention=attention,
            mlp=mlp,
            hidden_bytes=hidden_bytes,
            parallel=False,
            dropout=False,
        )
        self.reading_attention, self.reading_mlp = attention, mlp

    def backward(self, gradient: Tensor, kept: BlockKept) -> Tensor:
        _, of_second, _, of_last = kept.norms
        self.frame.enter(2)
        branch = self._branch(gradient, self.norms.after_mlp, of_last)
        gradient = self.reading_mlp.backward(branch, kept.mlp, gradient)
        self.frame.enter(2)
        branch = self._branch(gradient, self.norms.after_attention, of_second)
        return self.reading_attention.backward(branch, kept.attention, gradient)
