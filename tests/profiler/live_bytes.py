"""What is alive while a block is differentiated, followed on the meta device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every tensor that an operation makes, until nobody holds it."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak_bytes = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        address = storage._cdata
        if address in self._sizes:
            return
        self._sizes[address] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        self.bytes -= self._sizes.pop(address, 0)


def block_backward_bytes(model: Any, block: Any, ids: torch.Tensor) -> int:
    """What the backward pass of the model's last block needs beyond what is alive when it begins.

    Gradients of weights leave as soon as they are made, as ZeRO takes them.
    """
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    live = LiveBytes([*model.parameters(), *model.buffers()])
    begun: list[int] = []
    needed: list[int] = []

    def begin(_: torch.Tensor) -> None:
        live.peak_bytes = live.bytes
        begun.append(live.bytes)

    def end(_: torch.Tensor) -> None:
        needed.append(live.peak_bytes - begun[-1])

    def entered(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        given[0].register_hook(end)  # type: ignore[no-untyped-call]

    def left(_: Any, __: Any, made: Any) -> None:
        (made[0] if isinstance(made, tuple) else made).register_hook(begin)

    block.register_forward_pre_hook(entered)
    block.register_forward_hook(left)
    with live:
        hidden = model.base_model(input_ids=ids).last_hidden_state
        hidden.backward(torch.empty_like(hidden))
    return needed[0]
