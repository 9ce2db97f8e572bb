"""A whole model: embedding, blocks, loss, and its forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from llmtop.profiler.memory.tape.blocks import Block, BlockKept
from llmtop.profiler.memory.tape.layers import Frame, Kept, Norm
from llmtop.profiler.memory.tape.loss import Loss
from llmtop.profiler.memory.tape.machine import Tensor


class Embedding(Struct, frozen=True):
    """Sizes in bytes, elements where it says so."""

    elements: int
    weight_bytes: int
    hidden_bytes: int
    trained: bool
    tied: bool
    positions: bool
    """Learned positions are looked up and added."""
    scaled: bool = False
    """What is looked up is multiplied."""


class Model:
    """The passes of one micro-batch."""

    def __init__(
        self,
        frame: Frame,
        *,
        embedding: Embedding,
        blocks: Sequence[Block],
        embedding_norm: Norm | None,
        final_norm: Norm | None,
        loss: Loss,
        constant_bytes: int,
        mask_bytes: int,
        checkpoint_every: int,
        reentrant: bool,
        at_block: Callable[[int], None] | None = None,
    ) -> None:
        self.frame, self.embedding, self.blocks = frame, embedding, blocks
        self.final_norm, self.loss, self.constant_bytes = final_norm, loss, constant_bytes
        self.embedding_norm = embedding_norm
        self.mask_bytes = mask_bytes
        self.checkpoint_every, self.reentrant = checkpoint_every, reentrant
        self.head_gradient: Tensor | None = None
        self.at_block = at_block

    def hold_head(self, elements: int, gradient: Tensor) -> None:
        """The head's gradient: a tied one waits for the embedding's."""
        if self.embedding.tied and elements == self.embedding.elements:
            self.head_gradient = gradient
        else:
            self.frame.ready(elements, gradient)

    def run(self) -> None:
        """Forward and backward."""
        machine, frame = self.frame.machine, self.frame
        machine.in_backward = False
        self._at(-1)
        frame.enter(2)  # the whole and the model in it
        if self.frame.gathering is not None:
            self.frame.gathering.fetch(0)
        embedded = machine.new(self.embedding.hidden_bytes)
        if self.frame.gathering is not None:
            self.frame.gathering.release(0)
        frame.enter()  # positions
        if self.embedding.positions or self.embedding.scaled:
            embedded = machine.made_from(embedded, self.embedding.hidden_bytes)
        machine.multiply()  # of positions and frequencies
        of_embedding: Kept = ()
        if self.embedding_norm is None:
            x = machine.keep(embedded)
        else:
            x, of_embedding = self.embedding_norm.forward(embedded)
        constant, mask = machine.new(self.constant_bytes), machine.new(self.mask_bytes)
        kept: list[BlockKept | Tensor] = []
        for index, block in enumerate(self.blocks):
            self._at(index)
            checkpointed = self._is_checkpointed(index)
            frame.saving[0] = not checkpointed
            y, of_block = self._block_forward(block, x, checkpointed=checkpointed)
            frame.saving[0] = True
            kept.append(machine.keep(x) if checkpointed else of_block)
            machine.drop(x)
            assert y is not None
            x = y
        # Checkpoints hold the mask to the end.
        gradient = self._head(x, embedded, None if self.checkpoint_every else mask)
        for index in reversed(range(len(self.blocks))):
            self._at(index)
            gradient = self._block_backward(self.blocks[index], gradient, kept.pop())
        machine.drop_all(constant, mask if self.checkpoint_every else None)
        if self.embedding_norm is not None:
            gradient = self.embedding_norm.backward(gradient, of_embedding)
        self._embedding_backward(gradient)
        self._drop_graph(0)

    def _block_forward(
        self, block: Block, x: Tensor, *, checkpointed: bool
    ) -> tuple[Tensor | None, BlockKept]:
        """Reentrant checkpoints make no graph in the forward pass; the others do, whose nodes hold what is no
        saved tensor."""
        before = 0 if self.frame.graph is None else len(self.frame.graph)
        y, kept = block.forward(x)
        if checkpointed and self.reentrant:
            self._drop_graph(before)
        return y, kept

    def _drop_graph(self, first: int) -> None:
        graph = self.frame.graph
        if graph is not None:
            self.frame.machine.drop_all(*graph[first:])
            del graph[first:]

    def _is_checkpointed(self, index: int) -> bool:
        return bool(self.checkpoint_every) and index % self.checkpoint_every == 0

    def _at(self, index: int) -> None:
        if self.at_block is not None:
            self.at_block(index)

    def _head(self, x: Tensor, embedded: Tensor, mask: Tensor | None) -> Tensor:
        """Final norm, head, loss, and their backward: the gradient of the last block's output."""
        machine = self.frame.machine
        self._at(len(self.blocks))
        if self.final_norm is None:
            machine.drop_all(mask, embedded)
            return self.loss.run(x)[0]
        normed, of_norm = self.final_norm.forward(x)
        self.blocks[-1].end_forward()
        machine.drop_all(x, embedded, mask)
        gradient, of_head = self.loss.run(normed)
        for tensor in of_head:  # autograd hands a weight its gradient before it goes on
            self.hold_head(self.embedding.elements, tensor)
        return self.final_norm.backward(gradient, of_norm)

    def _block_backward(self, block: Block, gradient: Tensor, kept: BlockKept | Tensor) -> Tensor:
        if isinstance(kept, BlockKept):
            return block.backward(gradient, kept)
        machine = self.frame.machine
        first = 0 if self.frame.graph is None else len(self.frame.graph)
        if self.reentrant:
            block.begin_reentrant()
        else:
            block.begin()
        y, of_block = block.forward(kept, ending=self.reentrant)
        if not self.reentrant:
            self._drop_graph(first)
            before = block.backward(gradient, of_block)
            machine.drop_all(y, kept)
            return before
        # The outer pass holds the gradient and the output while the inner one runs.
        before = block.backward(machine.keep(gradient), of_block)
        self._drop_graph(first)
        machine.drop_all(y, kept, gradient)
        return before

    def _embedding_backward(self, gradient: Tensor) -> None:
        machine, embedding, gathering = self.frame.machine, self.embedding, self.frame.gathering
        if embedding.scaled:
            gradient = machine.made_from(gradient, embedding.hidden_bytes)
        if gathering is not None:
            self._at(-1)
            gathering.fetch(0)
            gathering.release(0)
        if not embedding.trained:
            machine.drop(gradient)
            return
        dense = machine.made_from(gradient, embedding.weight_bytes)
        if self.head_gradient is not None:
            dense = machine.added(self.head_gradient, dense, embedding.weight_bytes)
            self.head_gradient = None
        self.frame.ready(embedding.elements, dense)
