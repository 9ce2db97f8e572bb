"""Recognises storages while one step runs: weights that come and go, gradients, what recomputation saves.

Everything that it hooks into is there for one step only; between sampled steps nothing is hooked. It
remembers numbers, never tensors.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

from llmtop.profiler.memory.result import Component
from llmtop.profiler.probes.activations import saved_as, to_keep
from llmtop.profiler.probes.classify import Storage
from llmtop.profiler.probes.peaktrace import Seen

logger = logging.getLogger(__name__)

_RECOMPUTATION = "_recomputation_hook"
"""torch `utils/checkpoint.py`: the saved-tensor hooks of non-reentrant recomputation, which hide others."""
_KEEPS_ITS_INPUT = "Linear8bitLt"
"""bitsandbytes 0.50 `autograd/_functions.py:MatMul8bitLt` keeps its input as a plain attribute of the graph,
which no saved-tensor hook sees."""


def now_us() -> int:
    return time.time_ns() // 1000


class StepWatch:
    """Attach before a step's last micro-batch, detach after the step."""

    def __init__(
        self,
        module: torch.nn.Module,
        device: torch.device,
        vocab_size: int,
        buffers: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """`buffers` lists the engine's communication buffers as they are when it is called."""
        self._module = module
        self._buffers = buffers
        self._device_type = device.type
        self._vocab_size = vocab_size
        self._handles: list[Any] = []
        self._broken = False
        self.seen: list[Seen] = []
        self.batch_shape: tuple[int, ...] = ()
        """Of the token ids that the model was given."""

    def attach(self) -> None:
        self.seen, self.batch_shape = [], ()
        self._handles = [self._module.register_forward_pre_hook(self._see_batch, with_kwargs=True)]
        parameters = list(self._module.parameters())
        if any(hasattr(parameter, "ds_id") for parameter in parameters):
            self._handles += [
                module.register_forward_pre_hook(self._see_gathered)
                for module in self._module.modules()
                if module._parameters
            ]
        self._handles += [
            module.register_forward_pre_hook(self._see_kept_input)
            for module in self._module.modules()
            if type(module).__name__ == _KEEPS_ITS_INPUT
        ]
        self._handles += [
            parameter.register_hook(self._see_gradient)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def see(self, tensor: torch.Tensor, component: Component) -> None:
        """Remember what a tensor's storage is now. Runs inside the training's own calls, so never raises."""
        if self._broken or tensor.device.type != self._device_type:
            return
        try:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if size:
                self.seen.append(Seen(now_us(), storage.data_ptr(), size, component))
        except Exception:
            self._broken = True
            logger.exception("storages are not recognised from here on")

    def see_storages(self, storages: Iterable[Storage]) -> None:
        now = now_us()
        self.seen += [Seen(now, address, size, component) for address, size, component in storages]

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass: what recomputation saves is activations too."""
        plain = getattr(checkpoint, _RECOMPUTATION, None)
        if plain is not None:
            setattr(checkpoint, _RECOMPUTATION, self._watched(plain))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            if plain is not None:
                setattr(checkpoint, _RECOMPUTATION, plain)

    def _watched(self, plain: Any) -> Any:
        # A class is a reference cycle: what it keeps stays until garbage is collected.
        watch: StepWatch = weakref.proxy(self)

        class Watched(plain):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                pack: Callable[[torch.Tensor], Any] = self.pack_hook  # type: ignore[has-type]

                def see_and_pack(tensor: torch.Tensor) -> Any:
                    watch.see(tensor, saved_as(tensor, watch._vocab_size))
                    return pack(tensor)

                self.pack_hook = see_and_pack

        return Watched

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.see(tensor, saved_as(tensor, self._vocab_size))
        return to_keep(tensor)

    def _see_batch(self, _: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = options.get("input_ids", arguments[0] if arguments else None)
        if isinstance(ids, torch.Tensor):
            self.batch_shape = tuple(ids.shape)
            self.see(ids, Component.ACTIVATIONS)

    def _see_gathered(self, module: torch.nn.Module, _: Any) -> None:
        # Registered after DeepSpeed's own hook, so the weights are gathered by now.
        for parameter in list(module._parameters.values()):
            if parameter is not None:
                self.see(parameter, Component.PARAMETERS)

    def _see_kept_input(self, _: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], torch.Tensor):
            self.see(arguments[0], Component.ACTIVATIONS)

    def _see_gradient(self, gradient: torch.Tensor) -> None:
        self.see(gradient, Component.GRADIENTS)
        # ZeRO-1/2 make their bucket after the first gradient and drop it before the pass is over.
        for buffer in self._buffers():
            self.see(buffer, Component.COMMUNICATION_BUFFERS)


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
