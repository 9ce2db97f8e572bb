"""Exact bytes of a DeepSpeed engine's tensors by component, counted once per storage.

The attribute names are those of the tested DeepSpeed series; all are read with a default, because
they change between releases and an absent one only means that the tensor does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from msgspec import Struct

from llmtop.profiler.memory.result import Component
from llmtop.profiler.probes.resident import resident_bytes
from llmtop.profiler.probes.swapping import on_drive_bytes, swap_buffers

# First match wins where two names share one storage, so views of a flat group count as the group.
_PARAMETER_GROUPS = (
    "bit16_groups_flat",  # ZeRO-1/2
    "fp16_groups_flat",  # stage 0, FP16_Optimizer
    "bf16_groups_flat",  # BF16_Optimizer
    "fp16_partitioned_groups_flat",  # ZeRO-3
    "lp_param_buffer",
    "param_groups_fp16_flat_cpu_memory",
    "param_buffer_of_bit16_for_cpu_offload_groups",
)
_MASTER_GROUPS = (
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
    "fp32_partitioned_groups_flat",
)
_GRADIENT_GROUPS = (
    "averaged_gradients",
    "all_grad_tensors",
    "grads_in_partition",
    "fp32_groups_gradients_flat",
    "grad_partitions_flat_buffer",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
    "accumulated_grads_in_cpu",
    "single_partition_of_fp32_grads",
)
_BUFFER_GROUPS = (
    "ipg_buckets",
    "extra_large_param_to_reduce",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
)
_DEPTH = 6
_UNTOUCHED_FROM_BYTES = 1 << 20
"""On the CPU kind larger storages may be buffers that nobody filled: only touched pages count."""


class Storage(NamedTuple):
    address: int
    size_bytes: int
    component: Component


class Classified(Struct, frozen=True, kw_only=True):
    """Bytes by component, on the device that computes, in host memory and on a drive."""

    device: dict[str, int]
    host: dict[str, int]
    drive: dict[str, int]
    storages: tuple[Storage, ...] = ()
    """Those on the device that computes, whole."""

    def addresses_of(self, component: Component) -> set[int]:
        return {storage.address for storage in self.storages if storage.component is component}


class _Ledger:
    def __init__(self, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._seen: set[int] = set()
        self.device: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.storages: list[Storage] = []

    def add(self, component: Component, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size, address = storage.nbytes(), storage.data_ptr()
            if not size or address in self._seen:
                continue
            self._seen.add(address)
            # On the CPU kind the process is the device: nothing is offloaded from it.
            on_device = self._on_cpu or tensor.device.type != "cpu"
            if on_device:
                self.storages.append(Storage(address, size, component))
            if self._on_cpu and size > _UNTOUCHED_FROM_BYTES:
                size = resident_bytes(address, size)
            side = self.device if on_device else self.host
            side[component] = side.get(component, 0) + size


def classify(engine: Any, *, on_cpu: bool, modules: Sequence[torch.nn.Module] = ()) -> Classified:
    """Walk everything that the engine keeps between calls. Local to the rank: no collective.

    `modules` are those of the engine's module where they are known: to walk them takes a third of the time.
    """
    ledger = _Ledger(on_cpu)
    wrapper = engine.optimizer
    inner = getattr(engine, "basic_optimizer", None) or getattr(wrapper, "optimizer", None) or wrapper
    modules = modules or modules_of(engine.module)
    parameters = _parameters(modules)
    ledger.add(Component.PARAMETERS, _group_tensors(wrapper, _PARAMETER_GROUPS))
    ledger.add(Component.PARAMETERS, _parameter_tensors(parameters))
    ledger.add(Component.PARAMETERS, _buffers(modules))
    ledger.add(Component.PARAMETERS, _eight_bit_tensors(modules))
    # A bare torch optimizer steps on the parameters themselves: those are already counted.
    ledger.add(Component.MASTER_PARAMETERS, _group_tensors(wrapper, _MASTER_GROUPS))
    ledger.add(Component.OPTIMIZER_STATE, _state_tensors(inner))
    ledger.add(Component.COMMUNICATION_BUFFERS, _group_tensors(wrapper, _BUFFER_GROUPS))
    ledger.add(Component.COMMUNICATION_BUFFERS, _in_flight(wrapper))
    ledger.add(Component.GRADIENTS, _group_tensors(wrapper, _GRADIENT_GROUPS))
    ledger.add(Component.GRADIENTS, _gradients(parameters, inner))
    # Last: what is in such a buffer now is there as what it is.
    ledger.add(Component.COMMUNICATION_BUFFERS, swap_buffers(wrapper, parameters))
    return Classified(
        device=ledger.device,
        host=ledger.host,
        drive=on_drive_bytes(wrapper, parameters),
        storages=tuple(ledger.storages),
    )


def buffer_tensors(engine: Any) -> Iterator[torch.Tensor]:
    """Buckets and buffers that the engine keeps now: those of ZeRO-1/2 live in the backward pass only."""
    yield from _group_tensors(engine.optimizer, _BUFFER_GROUPS)


def parameter_storages(module: torch.nn.Module) -> set[int]:
    """Addresses of the storages that hold weights now."""
    modules = modules_of(module)
    held = (*_parameter_tensors(_parameters(modules)), *_buffers(modules))
    return {tensor.untyped_storage().data_ptr() for tensor in held}


def modules_of(root: torch.nn.Module) -> list[torch.nn.Module]:
    """As `root.modules()`, in whatever order: that one makes each a name, which takes longer."""
    found: dict[int, torch.nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in module._modules.values() if child is not None]
    return list(found.values())


def _parameters(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Those of tied modules more than once."""
    return [
        parameter for module in modules for parameter in module._parameters.values() if parameter is not None
    ]


def _buffers(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    return [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]


def _parameter_tensors(parameters: list[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield parameter.data
        # ZeRO-3: this rank's shard, and the secondary one of hpZ.
        for name in ("ds_tensor", "ds_secondary_tensor"):
            yield from _tensors(getattr(parameter, name, None))
        # bitsandbytes: scales and double-quantization state of a 4-bit or 8-bit weight.
        yield from _quantization_tensors(parameter)


def _quantization_tensors(parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        for name in ("absmax", "code", "offset"):
            yield from _tensors(getattr(state, name, None))
        state = getattr(state, "state2", None)
    for name in ("CB", "SCB"):
        yield from _tensors(getattr(parameter, name, None))


def _eight_bit_tensors(modules: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Weights of 8 bits and the scales of their rows: bitsandbytes moves these from the parameter to the
    state of its module in the first forward pass (`nn/modules.py:Linear8bitLt.init_8bit_state`)."""
    for module in modules:
        # A module that is asked for what it has not looks through all that it holds.
        state = vars(module).get("state")
        if state is not None:
            for name in ("CB", "SCB"):
                yield from _tensors(getattr(state, name, None))


def _state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for state in list(getattr(optimizer, "state", {}).values()):
        yield from _tensors(state)


def _gradients(parameters: list[torch.nn.Parameter], optimizer: Any) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield from _tensors(parameter.grad)
        yield from _tensors(getattr(parameter, "grad_accum", None))
    for group in getattr(optimizer, "param_groups", []):
        for parameter in group["params"]:
            yield from _tensors(parameter.grad)


def _in_flight(wrapper: Any) -> Iterator[torch.Tensor]:
    """ZeRO-3: what weights are being gathered into ahead of their use."""
    coordinator = getattr(getattr(wrapper, "parameter_offload", None), "param_coordinator", None)
    registry = getattr(coordinator, "_PartitionedParameterCoordinator__inflight_param_registry", {})
    for handle in list(registry.values()):
        for one in getattr(handle, "handles", [handle]):
            yield from _tensors(getattr(one, "partitions", None))
            yield from _tensors(getattr(one, "_AllGatherHandle__param_buffer", None))
            yield from _tensors(getattr(getattr(one, "quantization", None), "quantized_param", None))


def _group_tensors(owner: Any, names: tuple[str, ...]) -> Iterator[torch.Tensor]:
    for name in names:
        yield from _tensors(getattr(owner, name, None))


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Tensors in nested lists and dictionaries, and in the small holders that DeepSpeed uses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (str, bytes, int, float)):
        return
    elif isinstance(value, dict):
        for item in list(value.values()):
            yield from _tensors(item, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for item in list(value):
            yield from _tensors(item, depth - 1)
    else:
        for name in ("buffer", "flat_partition"):
            yield from _tensors(getattr(value, name, None), depth - 1)
