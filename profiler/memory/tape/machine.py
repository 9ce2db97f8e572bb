"""Tensors on a simulated device: made, shared and dropped as torch's reference counts do it."""

from __future__ import annotations

from llmtop.profiler.memory.pool import Block, Pool

LEAST_BYTES = 16 * 1024
"""Smaller tensors are left out: all of a step's together fill a few segments of 2 MiB."""


Tensor = Block
"""Storage, and how many hold it."""


class Machine(Pool):
    """One device: its allocator, and what makes and drops tensors on it."""

    def __init__(self, room_bytes: int | None = None, workspace_bytes: int = 0) -> None:
        """`workspace_bytes`: of cuBLAS, in each thread that multiplies."""
        super().__init__(room_bytes, least_bytes=LEAST_BYTES)
        self.in_backward = False
        """Whose thread runs: the program's own, or that of the backward pass."""
        self._workspace_bytes = workspace_bytes
        self._without_workspace = {False, True}

    new, drop = Pool.allocate, Pool.free

    def drop_all(self, *tensors: Tensor | None) -> None:
        """One holder less of each, in this order."""
        for tensor in tensors:
            self.drop(tensor)

    def view(self, size: int) -> Tensor:
        """A new tensor of which the result is only a view, as matrix products of three dimensions return."""
        tensor = self.new(size)
        tensor.is_view = True
        return tensor

    def made_from(self, tensor: Tensor | None, size: int) -> Tensor:
        """A new tensor, whose source goes when it is there."""
        made = self.new(size)
        self.drop(tensor)
        return made

    def keep(self, tensor: Tensor) -> Tensor:
        """One holder more."""
        tensor.holders += 1
        return tensor

    def multiply(self) -> None:
        """cuBLAS takes its workspace at a thread's first product, and keeps it."""
        if self.in_backward in self._without_workspace:
            self._without_workspace.remove(self.in_backward)
            self.new(self._workspace_bytes)

    def added(self, held: Tensor | None, new: Tensor, size: int) -> Tensor:
        """The sum of two gradients of the same tensor: torch `autograd/input_buffer.cpp:accumulate` adds into
        the first where it owns it, and makes a third tensor otherwise."""
        if held is None:
            return new
        if held.is_view or held.holders > 1:
            total = self.new(size)
            self.drop_all(held, new)
            return total
        self.drop(new)
        return held
