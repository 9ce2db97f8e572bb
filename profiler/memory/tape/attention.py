"""Attention of one block: fused kernels (SDPA by cuDNN, FlashAttention-2) and plain score matrices."""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.memory.tape.layers import Dropout, Frame, Kept, Linear, Norm
from llmtop.profiler.memory.tape.machine import Tensor
from llmtop.profiler.memory.tape.rotary import PartialRotary, Rotary


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
        machine.drop_all(*reversed(buffers), gradient, *kept)
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
        machine.drop_all(queries, keys)
        # Scaled, capped (divided, tanh, multiplied), masked.
        capped: Kept = ()
        for step in ("scaled", "divided", "tanh", "multiplied", "masked"):
            if step not in ("scaled", "masked") and not self.capped:
                continue
            scores = machine.made_from(scores, heads.scores)
            if step == "tanh":
                capped = save(scores)
        wide = machine.new(self.softmax_bytes) if self.casts_before else None
        softmax = machine.made_from(wide, self.softmax_bytes)
        kept = (*kept, *save(softmax))
        weights = machine.new(heads.scores) if self.casts else machine.keep(softmax)
        # Python's name holds the scores until the line is done.
        machine.drop_all(softmax, scores)
        dropped: Kept = ()
        if self.dropout is not None:
            weights, dropped = self.dropout.forward(weights)
        values = self._taken(values, heads.output)
        kept = (*kept, *save(weights, values), *capped, *dropped)
        attended = machine.new(heads.output)
        machine.drop(values)
        y = machine.new(heads.output)
        machine.drop_all(attended, *repeated)
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
        copied = machine.made_from(gradient, heads.output) if heads.several else gradient
        of_values = machine.new(heads.output)
        of_scores = machine.new(heads.scores)
        machine.drop_all(copied, values, weights)
        if self.dropout is not None:
            of_scores = self.dropout.backward(of_scores, (others.pop(),))
        if self.casts:
            of_scores = machine.made_from(of_scores, self.softmax_bytes)
        result = machine.new(self.softmax_bytes if self.casts_before or not self.casts else heads.scores)
        product = machine.new(self.softmax_bytes)
        machine.drop_all(product, of_scores, softmax)
        if self.casts_before:
            result = machine.made_from(result, heads.scores)
        # Through the cap (multiplied, tanh, divided) and the scale.
        for tanh in (None, *others, None, None) if self.capped else (None,):
            passed = machine.new(heads.scores)
            machine.drop_all(result, tanh)
            result = passed
        of_keys, of_query = machine.new(heads.query), machine.new(heads.query)
        machine.drop_all(result, keys, queries)
        # The heads were repeated before all products.
        of_value = self._of_group(of_values)
        return of_query, self._of_group(of_keys), of_value

    def _of_group(self, of_repeated: Tensor) -> Tensor:
        if not self.heads.grouped:
            return of_repeated
        return self.frame.machine.made_from(of_repeated, self.heads.kv)


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
        machine.drop_all(scaled, scaled_key, queries, keys, values, softmax)
        return machine.made_from(attended, heads.query), kept

    def backward(self, gradient: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
        machine, heads = self.frame.machine, self.heads
        values, queries, keys, softmax = kept
        copied = machine.made_from(gradient, heads.query)
        of_values, of_softmax = machine.new(heads.query), machine.new(heads.scores)
        machine.drop_all(copied, values)
        of_scores = machine.new(heads.scores)
        machine.passing(heads.scores)
        machine.drop_all(of_softmax, softmax)
        of_queries, of_keys = machine.new(heads.query), machine.new(heads.query)
        machine.drop_all(of_scores, queries, keys)
        of_query = machine.made_from(of_queries, heads.query)
        of_value = machine.made_from(of_values, heads.kv)
        of_key = machine.made_from(of_keys, heads.kv)
        return of_query, of_key, of_value


Kernel = FusedKernel | EagerKernel | MathKernel


class AttentionForm(Struct, frozen=True, kw_only=True):
    """How a family's code differs from Llama's."""

    rotary: str
    """`none`, `fused` (Liger's kernel, which writes over its input) or `plain`."""
    scales_query: bool = False
    """The queries are scaled, and not the scores (OPT)."""
    norms_last: bool = False
    """Queries and keys are normalized when the values are there too (Gemma-3)."""
    rotary_in_fp32: bool = False
    """Cosines and sines are in fp32, and so is what is multiplied with them (OLMo-2)."""
    views_last: bool = False
    """Heads are told apart when all is projected and normalized (OLMo-2)."""
    copied: bool = False
    """The kernel's output has the layout of joined queries and is copied into rows (GLM)."""


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
        form: AttentionForm,
        partial: PartialRotary | None = None,
    ) -> None:
        """`partial` turns positions in place of `form.rotary`."""
        self.frame, self.heads, self.kernel = frame, heads, kernel
        self.query, self.key, self.value, self.output = query, key, value, output
        self.query_norm, self.key_norm = query_norm, key_norm
        self.form, self.partial = form, partial
        self.turns_in_copies = form.rotary == "plain"
        self.leaves_heads = form.rotary == "none" and isinstance(kernel, EagerKernel)
        fused, wide = not self.turns_in_copies, form.rotary_in_fp32
        self.query_rotary = Rotary(frame, heads.query, fused=fused, wide=wide)
        self.key_rotary = Rotary(frame, heads.kv, fused=fused, wide=wide)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        machine = self.frame.machine
        query, of_query = self.query.forward(x)
        if self.form.scales_query:
            query = machine.made_from(query, self.heads.query)
        query_norm: Kept = ()
        if not self.form.norms_last:
            query, query_norm = self._normed(self.query_norm, query)
        key, of_key = self.key.forward(x)
        key_norm: Kept = ()
        if not self.form.norms_last:
            key, key_norm = self._normed(self.key_norm, key)
        value, of_value = self.value.forward(x)
        if self.form.norms_last:
            query, query_norm = self._normed(self.query_norm, query)
            key, key_norm = self._normed(self.key_norm, key)
        turned, turned_key, tables = self._turned(query, key)
        attended, of_kernel = self.kernel.forward(turned, turned_key, value)
        if self.form.copied:
            attended = machine.made_from(attended, self.heads.query)
        y, of_output = self.output.forward(attended)
        machine.drop_all(attended, turned, turned_key, value)
        return y, [of_query, query_norm, of_key, key_norm, of_value, tables, of_kernel, of_output]

    def _turned(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Kept]:
        """Drops both."""
        machine = self.frame.machine
        if self.partial is not None:
            return self.partial.forward(query, key)
        turned, turned_key = self.query_rotary.forward(query), self.key_rotary.forward(key)
        if self.query_rotary.is_cast:
            narrow, narrow_key = machine.new(self.heads.query), machine.new(self.heads.kv)
            machine.drop_all(turned, turned_key)
            turned, turned_key = narrow, narrow_key
        machine.drop_all(query, key)
        return turned, turned_key, ()

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

    def backward(self, gradient: Tensor, kept: list[Kept], held: Tensor | None = None) -> Tensor:
        """`held` is what the gradient of the input already is; the sum of both is given."""
        machine = self.frame.machine
        of_query, query_norm, of_key, key_norm, of_value, tables, of_kernel, of_output = kept
        attended = self.output.backward(gradient, of_output)
        query, key, value = self.kernel.backward(attended, of_kernel)
        query, key = self._turned_back(query, key, tables)
        if self.form.norms_last and self.key_norm is not None and self.query_norm is not None:
            key = self.key_norm.backward(key, key_norm)
            query = self.query_norm.backward(query, query_norm)
        if isinstance(self.kernel, EagerKernel):
            value = machine.made_from(value, self.heads.kv)
        if self.form.views_last:
            key = self._in_rows(key, self.heads.kv)
            query = self._in_rows(query, self.heads.query)
        of_input = self.value.backward(value, of_value, held)
        if self.key_norm is not None and not self.form.norms_last:
            key = self.key_norm.backward(key, key_norm)
        # Of one sequence the keys' lie as rows already where nothing was turned.
        if not self.form.views_last and (self.turns_in_copies or self.heads.several):
            key = self._in_rows(key, self.heads.kv)
        of_input = self.key.backward(key, of_key, of_input)
        if self.query_norm is not None and not self.form.norms_last:
            query = self.query_norm.backward(query, query_norm)
        if not self.form.views_last:
            query = self._in_rows(query, self.heads.query)
        if self.form.scales_query:
            query = machine.made_from(query, self.heads.query)
        return self.query.backward(query, of_query, of_input)

    def _turned_back(self, query: Tensor, key: Tensor, tables: Kept) -> tuple[Tensor, Tensor]:
        """The last of the forward pass is the first here: keys were turned after queries."""
        if self.partial is not None:
            return self.partial.backward(query, key, tables)
        key, query = self._widened(key, query)
        key = self.key_rotary.backward(key)
        return self.query_rotary.backward(query), key

    def _widened(self, key: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of what was turned in fp32."""
        if not self.query_rotary.is_cast:
            return key, query
        machine, wide = self.frame.machine, []
        for gradient, rotary in ((key, self.key_rotary), (query, self.query_rotary)):
            wide.append(machine.made_from(gradient, rotary.product_bytes))
        return wide[0], wide[1]

    def _in_rows(self, gradient: Tensor, size: int) -> Tensor:
        """Plain rotary code leaves gradients head by head, and so do plain products where nothing is turned;
        the projection's wants rows."""
        if not self.turns_in_copies and not self.leaves_heads:
            return gradient
        return self.frame.machine.made_from(gradient, size)
