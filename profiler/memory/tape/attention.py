"""Attention of one block: fused kernels (SDPA by cuDNN, FlashAttention-2) and plain score matrices."""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.memory.tape.layers import Dropout, Frame, Kept, Linear, Norm, Rotary
from llmtop.profiler.memory.tape.machine import Tensor


class Heads(Struct, frozen=True):
    """Sizes of one attention, in bytes of the micro-batch unless they say otherwise."""

    query: int
    kv: int
    value: int
    """Of the values' gradient; the keys' is `kv`."""
    output: int
    """Of what attention gives."""
    statistics: int
    """One fp32 for each query of each head."""
    wide_query: int
    """The queries in fp32."""
    scores: int
    """All score matrices in the model's precision."""
    wide_scores: int
    grouped: bool
    """Fewer heads of keys and values than of queries."""
    several: bool
    """More than one sequence: heads by row are then no view of what a plain product takes."""
    in_order: bool = False
    """Queries and keys lie head by head, as a plain product takes them; values do not."""


_CUDNN_BYTES = 256
"""Of cuDNN's workspace, beside the parts that grow with the batch."""


class FusedKernel:
    """SDPA or FlashAttention-2: queries, keys, values, output and statistics are kept."""

    def __init__(self, frame: Frame, heads: Heads, *, one_buffer: bool) -> None:
        self.frame, self.heads, self.one_buffer = frame, heads, one_buffer
        expanded = 2 * heads.query if heads.grouped else 0
        parts = [heads.statistics, heads.wide_query]
        # cuDNN asks for one workspace; FlashAttention makes each part for itself.
        if one_buffer:
            self.buffers = [sum(parts) + expanded + _CUDNN_BYTES]
        else:
            self.buffers = [*parts, *([heads.query, heads.query] if heads.grouped else [])]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Kept]:
        machine = self.frame.machine
        y, statistics = machine.new(self.heads.output), machine.new(self.heads.statistics)
        if self.one_buffer:
            kept = self.frame.save(key, query, value, statistics, y)
        else:
            kept = self.frame.save(query, key, value, y, statistics)
        machine.drop(statistics)
        return y, kept

    def backward(self, gradient: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
        machine, heads = self.frame.machine, self.heads
        of_query, of_key, of_value = machine.new(heads.query), machine.new(heads.kv), machine.new(heads.value)
        buffers = [machine.new(size) for size in self.buffers]
        machine.drop(*reversed(buffers), gradient, *kept)
        return of_query, of_key, of_value


class EagerKernel:
    """transformers' `eager_attention_forward`: keys and values repeated, scores, softmax in fp32, cast."""

    def __init__(
        self, frame: Frame, heads: Heads, *, capped: bool, half_to_float: bool, upcast: bool, dropout: bool
    ) -> None:
        """`half_to_float`: the softmax casts by itself; `upcast`: it is in fp32 at all."""
        self.frame, self.heads, self.capped = frame, heads, capped
        self.softmax_bytes = heads.wide_scores if upcast else heads.scores
        self.casts = frame.width != 4 and upcast
        self.casts_before = self.casts and not half_to_float
        self.dropout = Dropout(frame, heads.scores) if dropout else None
        self.returned: Tensor | None = None
        """The weights, which the block's code is given too and holds to its end."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Kept]:
        machine, heads, save = self.frame.machine, self.heads, self.frame.save
        repeated = [machine.new(heads.query), machine.new(heads.query)] if heads.grouped else []
        keys, values = repeated or (key, value)
        is_copied = heads.several and not heads.in_order
        queries = machine.new(heads.query) if is_copied else machine.keep(query)
        keys = machine.keep(keys) if heads.in_order else self._taken(keys, heads.query)
        scores = machine.new(heads.scores)
        kept = save(queries, keys)
        machine.drop(queries, keys)
        # Scaled, capped (divided, tanh, multiplied), masked.
        capped: Kept = ()
        for step in ("scaled", "divided", "tanh", "multiplied", "masked"):
            if step not in ("scaled", "masked") and not self.capped:
                continue
            following = machine.new(heads.scores)
            machine.drop(scores)
            scores = following
            if step == "tanh":
                capped = save(scores)
        wide = machine.new(self.softmax_bytes) if self.casts_before else None
        softmax = machine.new(self.softmax_bytes)
        machine.drop(wide)
        kept = (*kept, *save(softmax))
        weights = machine.new(heads.scores) if self.casts else machine.keep(softmax)
        # Python's name holds the scores until the line is done.
        machine.drop(softmax, scores)
        dropped: Kept = ()
        if self.dropout is not None:
            weights, dropped = self.dropout.forward(weights)
        values = self._taken(values, heads.output)
        kept = (*kept, *save(weights, values), *capped, *dropped)
        attended = machine.new(heads.output)
        machine.drop(values)
        y = machine.new(heads.output)
        machine.drop(attended, *repeated)
        self.returned = weights
        return y, kept

    def leave(self) -> None:
        self.frame.machine.drop(self.returned)
        self.returned = None

    def _taken(self, tensor: Tensor, size: int) -> Tensor:
        """As the product of matrices takes it; what was repeated is in order already."""
        machine, heads = self.frame.machine, self.heads
        return machine.new(size) if heads.several and not heads.grouped else machine.keep(tensor)

    def backward(self, gradient: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
        machine, heads = self.frame.machine, self.heads
        queries, keys, softmax, weights, values, *others = kept
        copied = machine.new(heads.output) if heads.several else machine.keep(gradient)
        machine.drop(gradient)
        of_values = machine.new(heads.output)
        of_scores = machine.new(heads.scores)
        machine.drop(copied, values, weights)
        if self.dropout is not None:
            of_scores = self.dropout.backward(of_scores, (others.pop(),))
        if self.casts:
            wide = machine.new(self.softmax_bytes)
            machine.drop(of_scores)
            of_scores = wide
        result = machine.new(self.softmax_bytes if self.casts_before or not self.casts else heads.scores)
        product = machine.new(self.softmax_bytes)
        machine.drop(product, of_scores, softmax)
        if self.casts_before:
            narrow = machine.new(heads.scores)
            machine.drop(result)
            result = narrow
        # Through the cap (multiplied, tanh, divided) and the scale.
        for tanh in (None, *others, None, None) if self.capped else (None,):
            passed = machine.new(heads.scores)
            machine.drop(result, tanh)
            result = passed
        of_keys, of_query = machine.new(heads.query), machine.new(heads.query)
        machine.drop(result, keys, queries)
        # The heads were repeated before all products.
        of_value = self._of_group(of_values)
        return of_query, self._of_group(of_keys), of_value

    def _of_group(self, of_repeated: Tensor) -> Tensor:
        if not self.heads.grouped:
            return of_repeated
        summed = self.frame.machine.new(self.heads.kv)
        self.frame.machine.drop(of_repeated)
        return summed


class MathKernel:
    """SDPA without a kernel for the case (grouped heads in fp32): torch's plain mathematics."""

    def __init__(self, frame: Frame, heads: Heads) -> None:
        self.frame, self.heads = frame, heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Kept]:
        machine, heads = self.frame.machine, self.heads
        scaled_key = machine.new(heads.kv)
        scaled = machine.new(heads.query)
        keys, values = machine.new(heads.query), machine.new(heads.query)
        queries = machine.new(heads.query)
        scores, softmax = machine.new(heads.scores), machine.new(heads.scores)
        machine.passing(heads.scores // 4)
        machine.drop(scores)
        attended = machine.new(heads.query)
        kept = self.frame.save(values, queries, keys, softmax)
        machine.drop(scaled, scaled_key, queries, keys, values, softmax)
        y = machine.new(heads.query)
        machine.drop(attended)
        return y, kept

    def backward(self, gradient: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
        machine, heads = self.frame.machine, self.heads
        values, queries, keys, softmax = kept
        copied = machine.new(heads.query)
        machine.drop(gradient)
        of_values, of_softmax = machine.new(heads.query), machine.new(heads.scores)
        machine.drop(copied, values)
        of_scores = machine.new(heads.scores)
        machine.passing(heads.scores)
        machine.drop(of_softmax, softmax)
        of_queries, of_keys = machine.new(heads.query), machine.new(heads.query)
        machine.drop(of_scores, queries, keys)
        of_query = machine.new(heads.query)
        machine.drop(of_queries)
        of_value = machine.new(heads.kv)
        machine.drop(of_values)
        of_key = machine.new(heads.kv)
        machine.drop(of_keys)
        return of_query, of_key, of_value


Kernel = FusedKernel | EagerKernel | MathKernel


class Attention:
    """Projections, norms and positions of queries and keys, the kernel, and the output's projection."""

    def __init__(
        self,
        frame: Frame,
        heads: Heads,
        *,
        kernel: Kernel,
        query: Linear,
        key: Linear,
        value: Linear,
        output: Linear,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
        rotary: str,
    ) -> None:
        self.frame, self.heads, self.kernel = frame, heads, kernel
        self.query, self.key, self.value, self.output = query, key, value, output
        self.query_norm, self.key_norm = query_norm, key_norm
        self.turns_in_copies = rotary == "plain"
        self.query_rotary = Rotary(frame, heads.query, fused=not self.turns_in_copies)
        self.key_rotary = Rotary(frame, heads.kv, fused=not self.turns_in_copies)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        machine = self.frame.machine
        query, of_query = self.query.forward(x)
        query, query_norm = self._normed(self.query_norm, query)
        key, of_key = self.key.forward(x)
        key, key_norm = self._normed(self.key_norm, key)
        value, of_value = self.value.forward(x)
        turned, turned_key = self.query_rotary.forward(query), self.key_rotary.forward(key)
        machine.drop(query, key)
        attended, of_kernel = self.kernel.forward(turned, turned_key, value)
        y, of_output = self.output.forward(attended)
        machine.drop(attended, turned, turned_key, value)
        return y, [of_query, query_norm, of_key, key_norm, of_value, of_kernel, of_output]

    def leave(self) -> None:
        """The block's code has ended."""
        if isinstance(self.kernel, EagerKernel):
            self.kernel.leave()

    def _normed(self, norm: Norm | None, x: Tensor) -> tuple[Tensor, Kept]:
        if norm is None:
            return x, ()
        y, kept = norm.forward(x)
        self.frame.machine.drop(x)
        return y, kept

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        machine = self.frame.machine
        of_query, query_norm, of_key, key_norm, of_value, of_kernel, of_output = kept
        attended = self.output.backward(gradient, of_output)
        query, key, value = self.kernel.backward(attended, of_kernel)
        # The last of the forward pass is the first here: keys were turned after queries, values are last.
        key = self.key_rotary.backward(key)
        query = self.query_rotary.backward(query)
        if isinstance(self.kernel, EagerKernel):
            rows = machine.new(self.heads.kv)
            machine.drop(value)
            value = rows
        of_input = self.value.backward(value, of_value)
        if self.key_norm is not None:
            key = self.key_norm.backward(key, key_norm)
        key = self._in_rows(key, self.heads.kv)
        of_input = self.key.backward(key, of_key, of_input)
        if self.query_norm is not None:
            query = self.query_norm.backward(query, query_norm)
        query = self._in_rows(query, self.heads.query)
        return self.query.backward(query, of_query, of_input)

    def _in_rows(self, gradient: Tensor, size: int) -> Tensor:
        """Plain rotary code leaves gradients head by head; the projection's wants rows."""
        if not self.turns_in_copies:
            return gradient
        rows = self.frame.machine.new(size)
        self.frame.machine.drop(gradient)
        return rows
