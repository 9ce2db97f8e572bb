"""What one layer makes, keeps and drops, forward and backward, in the order of the operations.

From the modelling code of transformers 5.x, the derivatives of torch 2.11 and liger-kernel 0.8.5, and held to
recorded runs (`benchmarks/results/alloctraces`). Each layer has `forward(x)`, which gives its output and what
autograd keeps, and `backward(gradient, kept)`, which uses up both and gives the gradient of `x`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING

from msgspec import Struct

from llmtop.profiler.memory.tape.machine import Machine, Tensor

Kept = tuple[Tensor, ...]
Ready = Callable[[int, Tensor], None]
"""Called with the elements of a weight and its gradient, when that is complete."""


if TYPE_CHECKING:
    from typing import Protocol

    class Gathering(Protocol):
        """What ZeRO-3 does before a weight is used, and behind its last use for now."""

        def fetch(self, *slots: int) -> None: ...
        def release(self, slot: int) -> None: ...
        def enter(self, modules: int = 1) -> None: ...
        def learn(self, slot: int) -> None: ...
        def gathered(self, slot: int) -> Tensor | None: ...


_MULTIPROCESSORS, _BLOCKS_EACH = 132, 16
"""Of an H100 or H200: those with fewer get smaller buffers for a sum over tokens."""


class Frame(Struct, frozen=True):
    """What all layers of a model share."""

    machine: Machine
    ready: Ready
    tokens: int
    width: int
    """Bytes of a number in the model's precision."""
    saving: list[bool]
    """Whether autograd keeps anything: not inside a checkpointed forward pass."""
    casts_to_half: bool
    """Whether fp16 is another precision than the model's."""
    gathering: Gathering | None = None
    graph: list[Tensor] | None = None
    """What stays until the whole graph is gone: plain attributes of its nodes."""
    by_function: bool = False
    """Products are ZeRO-3's own function (`zero/linear.py`), which differentiates the input first."""

    def enter(self, modules: int = 1) -> None:
        """Modules without a sharded weight are entered."""
        if self.gathering is not None:
            self.gathering.enter(modules)

    def save(self, *tensors: Tensor) -> Kept:
        if not self.saving[0]:
            return ()
        for tensor in tensors:
            tensor.holders += 1
        return tensors


def sum_buffer_bytes(rows: int, columns: int) -> int:
    """The buffer in which a sum over `rows` of a 16 or 32-bit matrix is gathered from many thread blocks.

    torch `aten/src/ATen/native/cuda/Reduce.cuh:setReduceConfig`: 32 x 4 threads of four columns each.
    """
    values = ceil(rows / 4)
    if values < 256:
        return 0
    grid = ceil(columns / 4 / 32)
    target = _MULTIPROCESSORS * _BLOCKS_EACH
    blocks = max(min(ceil(target / grid), ceil(values / 16)), ceil(values / 256)) if grid <= target else 1
    return 4 * columns * blocks * 128 if blocks > 1 else 0


_DOWN, _UP = 1, 2
"""The slots of an adapter's two matrices, after their base's."""


class Linear:
    """A matrix product; with an adapter beside a frozen matrix, which may be packed in 4 bits."""

    def __init__(
        self,
        frame: Frame,
        rows: int,
        columns: int,
        *,
        bias: bool = False,
        trained: bool = True,
        rank: int = 0,
        bits: int = 16,
        slot: int = 0,
    ) -> None:
        """`bits` of a weight as it is kept; `slot` numbers the matrices of a block, for ZeRO-3."""
        self.frame, self.rows, self.columns, self.slot = frame, rows, columns, slot
        self.bias, self.trained, self.rank, self.bits = bias, trained, rank, bits
        self.out_bytes = frame.tokens * rows * frame.width
        self.in_bytes = frame.tokens * columns * frame.width
        self.weight_bytes = rows * columns * frame.width
        self.low_bytes = frame.tokens * rank * frame.width
        self.is_joined = bias and bits == 16 and not frame.by_function
        """One operation with the sum, which differentiates its input first."""

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        machine, gathering = self.frame.machine, self.frame.gathering
        if gathering is not None:
            gathering.fetch(self.slot)
        y = self._base(x)
        if gathering is not None:
            gathering.release(self.slot)
        if not self.rank:
            return y, self.frame.save(x) if self.trained else ()
        self._fetch(_DOWN)
        low = machine.new(self.low_bytes)
        self._release(_DOWN)
        self._fetch(_UP)
        raised = machine.new(self.out_bytes)
        self._release(_UP)
        scaled = machine.new(self.out_bytes)
        kept = self.frame.save(x, low)
        machine.drop_all(raised, low)
        total = machine.new(self.out_bytes)
        machine.drop_all(y, scaled)
        return total, kept

    def _fetch(self, adapter: int) -> None:
        if self.frame.gathering is not None:
            self.frame.gathering.fetch(self.slot + adapter)

    def _release(self, adapter: int) -> None:
        if self.frame.gathering is not None:
            self.frame.gathering.release(self.slot + adapter)

    def _base(self, x: Tensor) -> Tensor:
        """The product with the base weight, whatever that is packed in."""
        if self.bits == 8:
            return self._in_8_bits(x)
        if self.bits == 4:
            return self._in_4_bits()
        machine = self.frame.machine
        y = machine.new(self.out_bytes)
        machine.multiply()
        return y

    def _in_4_bits(self) -> Tensor:
        """bitsandbytes 0.50 `autograd/_functions.py:MatMul4Bit` keeps its weight as a plain attribute, so
        that one which ZeRO-3 gathered outlives its release."""
        machine, gathering, graph = self.frame.machine, self.frame.gathering, self.frame.graph
        if gathering is not None and graph is not None:
            held = gathering.gathered(self.slot)
            if held is not None:
                graph.append(machine.keep(held))
        unpacked = machine.new(self.weight_bytes)
        y = machine.new(self.out_bytes)
        machine.multiply()
        machine.drop(unpacked)
        return y

    def _in_8_bits(self, x: Tensor) -> Tensor:
        """bitsandbytes 0.50 `autograd/_functions.py:MatMul8bitLt`: the input quantized by way of fp16, its
        outliers looked for, the product in 32 bits and in fp16."""
        machine, frame = self.frame.machine, self.frame
        in_half = machine.new(self.in_bytes) if frame.casts_to_half else None
        quantized = machine.new(self.in_bytes // frame.width)
        sizes, outliers = machine.new(self.in_bytes), machine.new(self.in_bytes // frame.width)
        machine.drop_all(sizes, outliers, in_half)
        whole = machine.new(self.out_bytes // frame.width * 4)
        y = machine.new(self.out_bytes)
        if frame.casts_to_half:
            y = machine.made_from(y, self.out_bytes)
        machine.drop_all(whole, quantized)
        if frame.graph is not None:
            frame.graph.append(machine.keep(x))
        return y

    def recompute(self, x: Tensor) -> Kept:
        """The last product of a recomputation, which stops when all is kept that was kept before."""
        machine = self.frame.machine
        if not self.rank:
            return self.frame.save(x) if self.trained else ()
        y = self._base(x)
        self._fetch(_DOWN)
        low = machine.new(self.low_bytes)
        self._release(_DOWN)
        kept = self.frame.save(x, low)
        machine.drop_all(low, y)
        return kept

    def backward(self, gradient: Tensor, kept: Kept, held: Tensor | None = None) -> Tensor:
        """`held` is what the gradient of the input already is; the sum of both is given."""
        machine, ready = self.frame.machine, self.frame.ready
        if self.rank:
            return self._backward_adapted(gradient, kept, held)
        gathering = self.frame.gathering
        if gathering is not None:
            gathering.fetch(self.slot)
        weight, of_input = self._products()
        if self.bias and self.trained:
            machine.passing(sum_buffer_bytes(self.frame.tokens, self.rows))
        machine.drop_all(gradient, *kept)
        if gathering is not None:
            gathering.release(self.slot)
        if weight is not None and self.is_joined:
            ready(self.rows * self.columns, weight)
        total = machine.added(held, of_input, self.in_bytes)
        if weight is not None and not self.is_joined:
            ready(self.rows * self.columns, weight)
        return total

    def _products(self) -> tuple[Tensor | None, Tensor]:
        """The gradients of weight and input."""
        machine = self.frame.machine
        if self.frame.by_function and self.bits == 16:
            of_input = machine.new(self.in_bytes)
            machine.multiply()
            return machine.new(self.weight_bytes) if self.trained else None, of_input
        if self.is_joined:
            of_input = machine.view(self.in_bytes)
            machine.multiply()
            return machine.view(self.weight_bytes) if self.trained else None, of_input
        weight = machine.view(self.weight_bytes) if self.trained else None
        unpacked = machine.new(self.weight_bytes) if self.bits < 16 else None
        machine.multiply()
        of_input = machine.view(self.in_bytes)
        machine.drop(unpacked)
        return weight, of_input

    def _backward_adapted(self, gradient: Tensor, kept: Kept, held: Tensor | None) -> Tensor:
        machine, ready = self.frame.machine, self.frame.ready
        x, low = kept
        raised = machine.new(self.out_bytes)
        self._fetch(_UP)
        weight = machine.new(self.rows * self.rank * self.frame.width)
        machine.multiply()
        of_low = machine.new(self.low_bytes)
        machine.drop_all(raised, low)
        self._release(_UP)
        ready(self.rows * self.rank, weight)
        self._fetch(_DOWN)
        weight = machine.new(self.columns * self.rank * self.frame.width)
        of_input = machine.view(self.in_bytes)
        machine.drop_all(of_low, x)
        self._release(_DOWN)
        held = machine.added(held, of_input, self.in_bytes)
        ready(self.columns * self.rank, weight)
        gathering = self.frame.gathering
        if gathering is not None:
            gathering.fetch(self.slot)
        unpacked = machine.new(self.weight_bytes) if self.bits < 16 else None
        of_input = machine.view(self.in_bytes)
        machine.drop_all(unpacked, gradient)
        if gathering is not None:
            gathering.release(self.slot)
        return machine.added(held, of_input, self.in_bytes)


class RmsNorm:
    """Plain code: upcast, mean of squares, scaled, cast down, times the weight."""

    def __init__(
        self,
        frame: Frame,
        columns: int,
        *,
        trained: bool,
        rows: int = 1,
        fp32_weight: bool = False,
        weight_first: bool = False,
    ) -> None:
        """`rows` vectors a token; `fp32_weight`: the weight is applied before the cast (Gemma, OLMo-2);
        `weight_first`: its gradient is made before the other factor's, as it is the second one (Gemma)."""
        self.frame, self.trained, self.fp32_weight = frame, trained, fp32_weight
        self.weight_first = weight_first
        self.columns, self.numbers = columns, frame.tokens * rows * columns
        self.bytes = self.numbers * frame.width
        self.wide_bytes = self.numbers * 4
        self.buffer_bytes = sum_buffer_bytes(frame.tokens * rows, columns)
        self.casts = frame.width != 4

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        machine = self.frame.machine
        wide = machine.new(self.wide_bytes) if self.casts else machine.keep(x)
        machine.passing(self.wide_bytes)
        scaled = machine.new(self.wide_bytes)
        if self.fp32_weight:
            kept = self.frame.save(wide, scaled) if self.trained else self.frame.save(wide)
            machine.drop(wide)
            product = machine.new(self.wide_bytes)
            if self.weight_first:  # which is a line of its own
                machine.drop(scaled)
            y = machine.made_from(product, self.bytes) if self.casts else product
            if not self.weight_first:
                machine.drop(scaled)
            return y, kept
        kept = self.frame.save(wide)
        machine.drop(wide)
        narrow = machine.new(self.bytes) if self.casts else machine.keep(scaled)
        y = machine.new(self.bytes)
        kept += self.frame.save(narrow) if self.trained else ()
        machine.drop_all(narrow, scaled)
        return y, kept

    def backward(self, gradient: Tensor, kept: Kept) -> Tensor:
        machine = self.frame.machine
        if self.fp32_weight and self.casts:
            gradient = machine.made_from(gradient, self.wide_bytes)
        size = self.wide_bytes if self.fp32_weight else self.bytes
        product = machine.new(size) if self.trained and self.weight_first else None
        of_scaled = machine.new(size)
        if self.trained:
            product = product or machine.new(size)
            machine.passing(self.buffer_bytes)
            machine.drop(product)
        machine.drop_all(gradient, *kept[1:])
        if self.trained:
            self.frame.ready(self.columns, machine.new(self.columns * self.frame.width))
        if self.casts and not self.fp32_weight:
            of_scaled = machine.made_from(of_scaled, self.wide_bytes)
        of_rstd, of_wide = machine.new(self.wide_bytes), machine.new(self.wide_bytes)
        machine.drop_all(of_rstd, of_scaled)
        spread, power = machine.new(self.wide_bytes), machine.new(self.wide_bytes)
        doubled = machine.new(self.wide_bytes)
        of_square = machine.new(self.wide_bytes)
        machine.drop_all(doubled, power, spread, kept[0], of_square)
        if not self.casts:
            return of_wide
        return machine.made_from(of_wide, self.bytes)


class FusedNorm:
    """Liger's RMSNorm, whose backward writes over the gradient, and LayerNorm, which does not."""

    def __init__(self, frame: Frame, columns: int, *, trained: bool, in_place: bool, rows: int = 1) -> None:
        self.frame, self.in_place, self.columns, self.trained = frame, in_place, columns, trained
        self.bytes = frame.tokens * rows * columns * frame.width
        self.partial_bytes = _MULTIPROCESSORS * columns * 4 if trained else 0

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        return self.frame.machine.new(self.bytes), self.frame.save(x)

    def backward(self, gradient: Tensor, kept: Kept) -> Tensor:
        machine = self.frame.machine
        of_input = gradient if self.in_place else machine.new(self.bytes)
        machine.passing(self.partial_bytes)
        machine.drop_all(*kept)
        if self.in_place:
            gradient.is_view = True
        else:
            machine.drop(gradient)
        if self.trained:
            self.frame.ready(self.columns, machine.new(self.columns * self.frame.width))
        return of_input


Norm = RmsNorm | FusedNorm


class Dropout:
    """A mask of one byte a number, kept, and the masked copy."""

    def __init__(self, frame: Frame, size: int) -> None:
        self.frame, self.bytes = frame, size

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        """Drops `x`."""
        machine = self.frame.machine
        y, mask = machine.new(self.bytes), machine.new(self.bytes // self.frame.width)
        machine.drop(x)
        kept = self.frame.save(mask)
        machine.drop(mask)
        return y, kept

    def backward(self, gradient: Tensor, kept: Kept) -> Tensor:
        of_input = self.frame.machine.new(self.bytes)
        self.frame.machine.drop_all(gradient, *kept)
        return of_input
