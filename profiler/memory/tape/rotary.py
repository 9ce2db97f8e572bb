"""Positions turned into queries and keys, or into a part of each head, which is then joined to its rest.

After transformers 5.24, `apply_rotary_pos_emb` of `models/{llama,olmo2,glm4,gpt_neox,phi3}`.
"""

from __future__ import annotations

from llmtop.profiler.memory.tape.layers import Frame, Kept
from llmtop.profiler.memory.tape.machine import Tensor


class Rotary:
    """Positions turned into queries or keys: plain code, or Liger's kernel, which writes over its input."""

    def __init__(self, frame: Frame, bytes_: int, *, fused: bool, wide: bool = False) -> None:
        """`wide`: cosines and sines are in fp32, and so is what is multiplied with them."""
        self.frame, self.bytes, self.fused = frame, bytes_, fused
        self.is_cast = wide and not fused and frame.width != 4
        self.product_bytes = bytes_ // frame.width * 4 if self.is_cast else bytes_

    def forward(self, x: Tensor) -> Tensor:
        machine = self.frame.machine
        if self.fused:
            return machine.keep(x)
        by_cosine = machine.new(self.product_bytes)
        negated = machine.new(self.bytes // 2)
        turned = machine.made_from(negated, self.bytes)
        by_sine = machine.made_from(turned, self.product_bytes)
        y = machine.new(self.product_bytes)
        machine.drop_all(by_cosine, by_sine)
        return y

    def backward(
        self, gradient: Tensor | None, cosines: Tensor | None = None, sines: Tensor | None = None
    ) -> Tensor:
        """Drops the gradient and each table after its last use; None: it stays."""
        machine = self.frame.machine
        if self.fused and gradient is not None:
            return gradient
        by_sine = self._product()
        machine.drop(sines)
        negated = machine.new(self.bytes // 2)
        of_input = machine.made_from(negated, self.bytes)
        other_half = machine.new(self.bytes)
        machine.drop_all(by_sine, other_half)
        by_cosine = self._product()
        machine.drop_all(gradient, cosines, by_cosine)
        return of_input

    def _product(self) -> Tensor:
        """Of a gradient with sines or cosines, as wide as what was multiplied."""
        product = self.frame.machine.new(self.product_bytes)
        if not self.is_cast:
            return product
        return self.frame.machine.made_from(product, self.bytes)


class PartialRotary:
    """Queries and keys together; GLM makes tables for it in every block."""

    def __init__(
        self, frame: Frame, query: int, key: int, *, part: float, table: int = 0, at_once: bool = False
    ) -> None:
        """`query`, `key` and `table` in bytes; `part` of each head is turned; `at_once`: the queries are
        joined before the keys are turned (Phi-3)."""
        self.part, self.at_once = part, at_once
        self.frame, self.query, self.key, self.table = frame, query, key, table
        self.query_rotary = Rotary(frame, round(part * query), fused=False)
        self.key_rotary = Rotary(frame, round(part * key), fused=False)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Kept]:
        """Drops both."""
        machine = self.frame.machine
        cosines, sines = machine.new(self.table), machine.new(self.table)
        query_part = self.query_rotary.forward(query)
        turned = machine.made_from(query_part, self.query) if self.at_once else None
        key_part = self.key_rotary.forward(key)
        turned = turned or machine.made_from(query_part, self.query)
        turned_key = machine.made_from(key_part, self.key)
        kept = self.frame.save(cosines, sines)
        machine.drop_all(cosines, sines, query, key)
        return turned, turned_key, kept

    def backward(self, query: Tensor, key: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
        """The keys' first; the tables go with their last use, the queries'."""
        cosines, sines = kept
        key_part = self.key_rotary.backward(None)
        query_part = self.query_rotary.backward(None, cosines, sines)
        key = self._whole(key, key_part, self.key)
        return self._whole(query, query_part, self.query), key

    def _whole(self, gradient: Tensor, of_part: Tensor, size: int) -> Tensor:
        """The gradients of the part and of the rest, each as large as the whole, and their sum; a part that
        is the whole is no slice."""
        machine = self.frame.machine
        rest = machine.made_from(gradient, size)
        whole = machine.new(size) if self.part < 1 else None
        machine.drop_all(of_part, whole)
        return rest
