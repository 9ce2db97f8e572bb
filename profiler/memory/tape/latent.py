"""Attention whose keys and values are expanded from a latent (DeepSeek-V2 and -V3).

After transformers 5.24 `models/deepseek_v2/modeling_deepseek_v2.py` and `models/deepseek_v3/...`.
"""

from __future__ import annotations

from msgspec import Struct

from llmtop.profiler.memory.tape.attention import EagerKernel, Heads, Kernel
from llmtop.profiler.memory.tape.layers import Frame, Kept, Linear, Norm
from llmtop.profiler.memory.tape.machine import Tensor


class LatentSizes(Struct, frozen=True):
    """In bytes of the micro-batch."""

    query: int
    """As large as the keys: a part that is not turned and one that is, for each head."""
    latent: int
    """The latent of keys and values beside the one turned key that all heads share."""
    expanded: int
    """The keys' part that is not turned and the values."""
    plain: int
    """Of that the keys' part."""
    value: int
    turned_query: int
    turned_key: int
    """Of one head."""
    wide_query: int
    """Both turned parts in fp32."""
    wide_key: int
    table: int
    """Of the positions' complex numbers."""


class LatentAttention:
    """Beside `Attention` of the module of that name, with the same calls."""

    def __init__(
        self,
        frame: Frame,
        heads: Heads,
        sizes: LatentSizes,
        *,
        kernel: Kernel,
        queries: tuple[Linear, Norm, Linear] | Linear,
        compress: Linear,
        norm: Norm,
        expand: Linear,
        output: Linear,
        interleaved: bool,
        copied: bool,
        padded: bool,
    ) -> None:
        """`interleaved`: positions are turned in halves, in the model's precision (V3), else as complex
        numbers in fp32; `copied`: the kernel's output is put in rows; `padded`: the kernel takes values as
        wide as keys."""
        self.frame, self.heads, self.sizes, self.kernel = frame, heads, sizes, kernel
        self.queries, self.compress, self.norm = queries, compress, norm
        self.expand, self.output = expand, output
        self.interleaved, self.copied, self.padded = interleaved, copied, padded
        self.casts = frame.width != 4

    def forward(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        machine, sizes = self.frame.machine, self.sizes
        raw, of_queries = self._queries(x)
        compressed, of_compress = self.compress.forward(x)
        normed, of_norm = self.norm.forward(compressed)
        turned = self._turned()
        query = machine.new(sizes.query)
        expanded, of_expand = self.expand.forward(normed)
        key = machine.new(sizes.query)
        value = machine.new(sizes.query) if self.padded else machine.keep(expanded)
        attended, of_kernel = self.kernel.forward(query, key, value)
        machine.drop(value)
        if self.copied:
            attended = machine.made_from(attended, self.sizes.value)
        y, of_output = self.output.forward(attended)
        machine.drop_all(attended, raw, *turned, compressed, normed, query, key, expanded)
        return y, [of_compress, of_norm, of_expand, of_kernel, of_output, *of_queries]

    def leave(self) -> None:
        """The block's code has ended."""
        if isinstance(self.kernel, EagerKernel):
            self.kernel.leave()

    def _queries(self, x: Tensor) -> tuple[Tensor, list[Kept]]:
        if isinstance(self.queries, Linear):
            raw, kept = self.queries.forward(x)
            return raw, [kept]
        down, norm, up = self.queries
        latent, of_down = down.forward(x)
        normed, of_norm = norm.forward(latent)
        self.frame.machine.drop(latent)
        raw, of_up = up.forward(normed)
        self.frame.machine.drop(normed)
        return raw, [of_down, of_norm, of_up]

    def _turned(self) -> tuple[Tensor, Tensor]:
        """Of queries and of the one key."""
        machine, sizes = self.frame.machine, self.sizes
        if self.interleaved:
            return self._turned_in_halves(sizes.turned_query), self._turned_in_halves(sizes.turned_key)
        if not self.casts:
            return machine.new(sizes.wide_query), machine.new(sizes.wide_key)
        wide = machine.new(sizes.wide_query), machine.new(sizes.wide_key)
        turned = []
        for size, narrow in ((sizes.wide_query, sizes.turned_query), (sizes.wide_key, sizes.turned_key)):
            turned.append(machine.made_from(machine.new(size), narrow))
        machine.drop_all(*wide)
        return turned[0], turned[1]

    def _turned_in_halves(self, size: int) -> Tensor:
        machine, halves = self.frame.machine, []
        for _ in range(2):
            by_cosine, by_sine = machine.new(size // 2), machine.new(size // 2)
            halves.append(machine.new(size // 2))
            machine.drop_all(by_cosine, by_sine)
        y = machine.new(size)
        machine.drop_all(*reversed(halves))
        return y

    def backward(self, gradient: Tensor, kept: list[Kept]) -> Tensor:
        machine, sizes = self.frame.machine, self.sizes
        of_compress, of_norm, of_expand, of_kernel, of_output, *of_queries = kept
        attended = self.output.backward(gradient, of_output)
        if self.padded:
            attended = machine.made_from(attended, sizes.query)
        query, key, value = self.kernel.backward(attended, of_kernel)
        if self.padded:
            value = machine.made_from(value, sizes.value)
        shared, plain = self._taken_apart(key)
        whole = machine.new(sizes.expanded)
        machine.drop_all(plain, value)
        rows = machine.made_from(whole, sizes.expanded)
        of_latent = self.expand.backward(rows, of_expand)
        key, turned = self._turned_back(shared)
        of_latent = self.norm.backward(of_latent, of_norm)
        compressed = machine.new(sizes.latent)
        machine.drop_all(of_latent, key)
        of_input = self.compress.backward(compressed, of_compress)
        whole = machine.new(sizes.query)
        machine.drop_all(query, turned)
        rows = machine.made_from(whole, sizes.query)
        return self._of_queries(rows, of_queries, of_input)

    def _of_queries(self, rows: Tensor, kept: list[Kept], held: Tensor) -> Tensor:
        if isinstance(self.queries, Linear):
            return self.queries.backward(rows, kept[0], held)
        down, norm, up = self.queries
        of_down, of_norm, of_up = kept
        latent = norm.backward(up.backward(rows, of_up), of_norm)
        return down.backward(latent, of_down, held)

    def _taken_apart(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The keys were copied into their place in two parts: the gradients of the shared part, summed over
        heads, and of the plain one."""
        machine, sizes = self.frame.machine, self.sizes
        first = machine.new(sizes.query)
        turned = machine.new(sizes.turned_query)
        machine.drop(key)
        second = machine.new(sizes.query)
        plain = machine.new(sizes.plain)
        machine.drop_all(second, first)
        shared = machine.made_from(turned, sizes.turned_key)
        return shared, plain

    def _turned_back(self, shared: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of what was turned: of the key, and of the queries."""
        machine, sizes = self.frame.machine, self.sizes
        if self.interleaved:
            return self._halves_turned_back(shared)
        products: list[Tensor] = []
        for size, narrow in ((sizes.wide_key, shared), (sizes.wide_query, None)):
            wide = machine.new(size) if self.casts else narrow
            if self.casts:
                machine.drop(narrow)
            table = machine.new(sizes.table)
            products.append(machine.new(size))
            machine.drop_all(table, wide)
        if not self.casts:
            return products[0], products[1]
        narrowed = []
        for size, product in zip((sizes.turned_key, sizes.turned_query), products, strict=True):
            narrowed.append(machine.made_from(product, size))
        return narrowed[0], narrowed[1]

    def _halves_turned_back(self, shared: Tensor) -> tuple[Tensor, Tensor]:
        machine, sizes = self.frame.machine, self.sizes
        halves: list[tuple[Tensor, Tensor]] = []
        for size, given in ((sizes.turned_key, shared), (sizes.turned_query, None)):
            first, second = machine.new(size // 2), machine.new(size // 2)
            negated = machine.new(size // 2)
            added = machine.new(size // 2)
            machine.drop_all(negated, added)
            other = machine.new(size // 2)
            machine.drop_all(given, other)
            halves.append((first, second))
        whole = []
        for size, (first, second) in zip((sizes.turned_key, sizes.turned_query), halves, strict=True):
            even = machine.made_from(second, size)
            odd = machine.new(size)
            machine.drop_all(first, odd)
            whole.append(even)
        return whole[0], whole[1]
