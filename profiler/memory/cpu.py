"""Prediction for the CPU kind: what each rank's process will hold.

The same moments and tensors as on a GPU, with what a process has instead of a device: the interpreter
and its libraries, only the touched pages of large buffers, and the heap that malloc keeps once it was
used (glibc gives back blocks above 32 MiB only), which counts as fragmentation.
"""

from __future__ import annotations

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.assume import assumptions
from llmtop.profiler.memory.backward import pass_bytes
from llmtop.profiler.memory.result import Component, HostBytes, Moment, MomentBytes, Prediction
from llmtop.profiler.memory.sizes import Sizes, sizes_of
from llmtop.profiler.memory.states import StateBytes, state_bytes
from llmtop.profiler.shape import param_count

MIB = 1 << 20
RUNTIME_BYTES = 460 * MIB
"""Resident set of a rank without the model: Python, torch, transformers, DeepSpeed and gloo (torch 2.13 CPU,
transformers 5.24, deepspeed 0.19.8; 457 to 460 MiB for models of 0.1 to 21 million weights)."""
FIRST_STEP_BYTES = 20 * MIB
"""What libraries add in the first step: thread pools, oneDNN and gloo buffers."""
SHARED_BYTES = 60 * MIB
"""Of the runtime, library pages that all ranks of a machine share (resident minus proportional set)."""
UPPER_MARGIN = 1.12

Bytes = dict[Component, int]


def cpu_prediction(spec: RunSpec) -> Prediction:
    """Predict the resident set of one rank's process, and the machine's total."""
    sizes = sizes_of(spec)
    states = state_bytes(spec, sizes)
    moments = _moments(spec, sizes, states)
    largest = max(moments[1:], key=lambda moment: moment.total_bytes)
    peak = largest.total_bytes
    upper = round(peak * UPPER_MARGIN)
    ranks = spec.options.gpus
    machine = ranks * peak - (ranks - 1) * SHARED_BYTES
    memory = spec.gpu.memory_bytes
    host = HostBytes(total_bytes=machine, pinned_bytes=0, nvme_bytes=0, components={"processes": machine})
    return Prediction(
        params=param_count(spec.model),
        trainable_params=sizes.trainable,
        fits=None if memory is None else ranks * upper <= memory,
        peak_allocated_bytes=peak,
        peak_allocated_upper_bytes=upper,
        peak_reserved_bytes=(peak, upper),
        peak_device_bytes=None,
        host_bytes=machine,
        pinned_bytes=0,
        nvme_bytes=0,
        step_seconds=None,
        tokens_per_second=None,
        moments=moments,
        peak_moment=largest.name,
        host=host,
        device_memory_bytes=memory,
        assumptions=(
            "a rank's peak is its process's resident set; a step's time on this CPU is not predicted",
            *assumptions(spec, sizes, 0),
        ),
    )


def _moments(spec: RunSpec, sizes: Sizes, states: StateBytes) -> tuple[MomentBytes, ...]:
    passes = pass_bytes(spec, sizes, states)
    in_passes = (passes.forward_end, passes.loss_backward, passes.last_block, passes.first_block)
    heap = max(_heap(components) for components in in_passes)
    offloaded = _offloaded(spec, sizes)
    step = {
        Component.GRADIENTS: states.gradients_resident + states.step_gradients,
        Component.WORKSPACE: states.step_extra,
    }
    init: Bytes = {Component.PARAMETERS: states.parameters, Component.MASTER_PARAMETERS: states.master}
    steady: Bytes = {Component.GRADIENTS: states.gradients_resident}
    resident: Bytes = {
        Component.PARAMETERS: states.parameters,
        Component.OPTIMIZER_STATE: states.optimizer + offloaded.get(Component.OPTIMIZER_STATE, 0),
        Component.MASTER_PARAMETERS: states.master + offloaded.get(Component.MASTER_PARAMETERS, 0),
        Component.COMMUNICATION_BUFFERS: _touched_bucket(sizes),
    }
    table: list[MomentBytes] = [_moment(Moment.INIT, init, 0, sizes)]
    for name, components in zip(
        (
            Moment.FORWARD_END,
            Moment.LOSS_BACKWARD,
            Moment.LAST_BLOCK_BACKWARD,
            Moment.FIRST_BLOCK_BACKWARD,
        ),
        in_passes,
        strict=True,
    ):
        own = {
            Component.ACTIVATIONS: components[Component.ACTIVATIONS],
            Component.LOGITS: components[Component.LOGITS],
            Component.GRADIENTS: components[Component.GRADIENTS],
            # The reduce bucket and its flattened copy come and go inside backward.
            Component.WORKSPACE: components[Component.WORKSPACE] + _passing(components, states),
        }
        gathered = {Component.PARAMETERS: states.parameters + _gathered(sizes, states)}
        table.append(_moment(name, {**resident, **own, **gathered}, heap, sizes))
    table.append(_moment(Moment.OPTIMIZER_STEP, {**resident, **step}, heap, sizes))
    table.append(_moment(Moment.STEADY, {**resident, **steady}, heap, sizes))
    return tuple(table)


def _gathered(sizes: Sizes, states: StateBytes) -> int:
    """Gathered weights of stage 3, with the flat output of the gather and its copy."""
    return 3 * states.gathered if sizes.ranks > 1 else states.gathered


def _touched_bucket(sizes: Sizes) -> int:
    """Stage 3's permanent reduce bucket, as far as gradients touch it."""
    if sizes.stage != 3:
        return 0
    return min(sizes.zero.reduce_bucket_size, sizes.trainable) * sizes.dtype_bytes


def _passing(components: Bytes, states: StateBytes) -> int:
    return components[Component.COMMUNICATION_BUFFERS] - states.bucket_resident


def _heap(components: Bytes) -> int:
    """What comes from the heap in forward and backward: small blocks that malloc keeps afterwards."""
    return components[Component.ACTIVATIONS] + components[Component.LOGITS] + components[Component.WORKSPACE]


def _offloaded(spec: RunSpec, sizes: Sizes) -> Bytes:
    """On the CPU kind offloaded states lie in the same process."""
    if spec.options.offload_optimizer == "none":
        return {}
    return {
        Component.OPTIMIZER_STATE: 8 * sizes.shard,
        Component.MASTER_PARAMETERS: 8 * sizes.shard + sizes.dtype_bytes * sizes.shard,
    }


def _moment(name: Moment, components: Bytes, heap: int, sizes: Sizes) -> MomentBytes:
    """Add the runtime, and the heap that is kept but not in use."""
    used = components.get(Component.ACTIVATIONS, 0) + components.get(Component.LOGITS, 0)
    if sizes.stage == 0:
        used += components.get(Component.GRADIENTS, 0)  # whole gradients reuse the activations' heap
    # ZeRO-3 builds the whole model first and frees it in small pieces.
    pieces = sizes.dtype_bytes * sizes.trainable if sizes.stage == 3 else 0
    kept = max(0, heap - used) + pieces
    everything = {
        **components,
        Component.FRAGMENTATION: kept,
        Component.WORKSPACE: components.get(Component.WORKSPACE, 0) + FIRST_STEP_BYTES,
        Component.RUNTIME: RUNTIME_BYTES,
    }
    present = {component: size for component, size in everything.items() if size}
    return MomentBytes(name=name, components=present, total_bytes=sum(present.values()))
