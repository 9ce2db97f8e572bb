"""Prediction for the CPU kind: what each rank's process will hold.

The same moments and tensors as on a GPU, with what a process has instead of a device: the interpreter and
its libraries, and of large buffers only the pages that are touched. That is what is in use; after its first
steps a rank keeps freed memory for the next step, and its heap lies in pieces: the process then holds more.
"""

from __future__ import annotations

from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.shape import param_count
from llmtop.profiler.cost.steptime import predict_step_seconds
from llmtop.profiler.memory.assume import assumptions
from llmtop.profiler.memory.backward import pass_bytes
from llmtop.profiler.memory.host import TORCH_ADAMW_BYTES
from llmtop.profiler.memory.lora import linear
from llmtop.profiler.memory.result import Component, HostBytes, Moment, MomentBytes, Prediction, moment_bytes
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.memory.states import (
    StateBytes,
    components_in_optimizer,
    state_bytes,
    sub_group_elements,
)
from llmtop.profiler.memory.swapped import (
    GRADIENT_BYTES,
    MOMENT_BYTES,
    STATE_BYTES,
    kept_param_bytes,
    on_drive_bytes,
    optimizer_buffer_bytes,
    param_buffer_bytes,
    swaps_optimizer,
)

MIB = 1 << 20
RUNTIME_BYTES = 447 * MIB
"""Resident set of a rank without the model: Python, torch, transformers, DeepSpeed and gloo (torch 2.13 CPU,
transformers 5.24, deepspeed 0.19.8; 444 to 450 MiB for models of 0.1 to 21 million weights)."""
CUDA_LIBRARIES_BYTES = 470 * MIB
"""More of it where torch was built with CUDA (torch 2.11+cu130: 897 MiB where the CPU build has 422)."""
BYTES_TOKENIZER_BYTES = 27 * MIB
"""Less of it where text is cut into bytes, since the tokenizers library then stays out."""
BF16_BYTES = 9 * MIB
"""More of it in bf16: code of oneDNN, which fp32 does not go through (9.3 MiB in a step of a toy, and 8.5 to
9.3 in eight runs; AVX-512)."""
BF16_SHAPE_BYTES = 1_710_000
"""That oneDNN generates for each shape of matrix in bf16: kernels of its product and of both gradients
(1.62 to 1.78 MiB for each of ten shapes, of 64 or 1,024 tokens; in fp32 0.1). They stay."""
ENGINE_BYTES = 10 * MIB
"""Engine, data and tokenizer beside the tensors, seen in the same runs."""
SHARED_BYTES = 80 * MIB
"""Of the runtime, library pages that all ranks of a machine share (resident minus proportional set)."""
UPPER_MARGIN = 1.12
KEPT_SHARE = 0.8
"""Of what comes and goes within a step, what the heap keeps beyond the peak of what is in use. Seen with
glibc 2.36 after 40 to 120 steps of the demo's model: 0.43 at micro-batch 8 x 512 tokens, 0.64 with eager
attention at 8 x 256, 0.7 at stages 0 and 3, 0.8 at 2 x 64, 0.9 to 1.2 at 8 x 128 and 1.5 with recomputation;
all within the upper margin."""

Bytes = dict[Component, int]
PASSES = (Moment.FORWARD_END, Moment.LOSS_BACKWARD, Moment.LAST_BLOCK_BACKWARD, Moment.FIRST_BLOCK_BACKWARD)


def cpu_prediction(spec: RunSpec, sizes: Sizes, states: StateBytes, *, in_words: bool) -> Prediction:
    """Predict the resident set of one rank's process, and the machine's total."""
    moments = _moments(spec, sizes, _in_process(spec, sizes, states))
    largest = max(moments[1:], key=lambda moment: moment.total_bytes)
    peak = largest.total_bytes
    upper = round(peak * UPPER_MARGIN)
    steady = next(moment.total_bytes for moment in moments if moment.name is Moment.STEADY)
    held = peak + round(KEPT_SHARE * (peak - steady))
    held_upper = round(held * UPPER_MARGIN)
    ranks = spec.options.gpus
    seconds = predict_step_seconds(spec, sizes)
    machine = ranks * held - (ranks - 1) * SHARED_BYTES
    memory = spec.gpu.memory_bytes
    nvme = ranks * on_drive_bytes(spec, sizes)
    host = HostBytes(total_bytes=machine, pinned_bytes=0, nvme_bytes=nvme, components={"processes": machine})
    return Prediction(
        params=param_count(spec.model),
        trainable_params=sizes.trainable,
        fits=None if memory is None else ranks * held_upper <= memory,
        needed_bytes=ranks * held_upper,
        peak_allocated_bytes=peak,
        peak_allocated_upper_bytes=upper,
        peak_reserved_bytes=(held, held_upper),
        peak_device_bytes=None,
        host_bytes=machine,
        pinned_bytes=0,
        nvme_bytes=nvme,
        step_seconds=seconds,
        tokens_per_second=spec.tokens_per_step / seconds if seconds else None,
        moments=moments,
        peak_moment=largest.name,
        host=host,
        device_memory_bytes=memory,
        assumptions=(
            "a rank's peak is what its process has in use, reserved is that and what its heap keeps",
            *assumptions(spec, sizes, 0),
        )
        if in_words
        else (),
    )


def _moments(spec: RunSpec, sizes: Sizes, states: StateBytes) -> tuple[MomentBytes, ...]:
    passes = pass_bytes(spec, sizes, states)
    libraries = CUDA_LIBRARIES_BYTES if spec.gpu.torch_with_cuda else 0
    runtime = RUNTIME_BYTES + libraries - (BYTES_TOKENIZER_BYTES if spec.options.tokenizer == "bytes" else 0)
    runtime += BF16_BYTES if spec.options.precision == "bf16" else 0
    resident = _resident(spec, sizes, states)
    parameters = states.parameters + states.secondary
    init = {Component.PARAMETERS: parameters, Component.MASTER_PARAMETERS: states.master}
    read, workspace = components_in_optimizer(states)
    step = {
        Component.PARAMETERS: parameters,
        Component.GRADIENTS: read,
        Component.WORKSPACE: workspace,
    }
    table = [_moment(Moment.INIT, init, runtime)]
    runtime += _generated_bytes(spec)
    in_passes = (passes.forward_end, passes.loss_backward, passes.last_block, passes.first_block)
    for name, components in zip(PASSES, in_passes, strict=True):
        # While stage 3 gathers in forward, the flat output of the gather lies beside the weights.
        copies = 2 if name is Moment.FORWARD_END and sizes.ranks > 1 else 1
        own = {
            Component.PARAMETERS: states.parameters + copies * states.gathered + states.secondary,
            Component.ACTIVATIONS: components[Component.ACTIVATIONS],
            Component.LOGITS: components[Component.LOGITS],
            Component.GRADIENTS: components[Component.GRADIENTS],
            # The reduce bucket and its flattened copy come and go inside backward.
            Component.WORKSPACE: components[Component.WORKSPACE] + _passing(components, states),
        }
        table.append(_moment(name, {**resident, **own}, runtime))
    steady = {Component.GRADIENTS: states.gradients_resident, Component.WORKSPACE: states.scales}
    table.append(_moment(Moment.OPTIMIZER_STEP, _in_step(spec, sizes, {**resident, **step}), runtime))
    table.append(_moment(Moment.STEADY, {**resident, **steady}, runtime))
    return tuple(table)


def _generated_bytes(spec: RunSpec) -> int:
    """Kernels for the matrices of this model, once each shape was multiplied by."""
    if spec.options.precision != "bf16":
        return 0
    head = (spec.model.vocab_size, spec.model.embedding_dim or spec.model.hidden_size)
    return BF16_SHAPE_BYTES * len({*(group.shape for group in linear(spec.model)), head})


def _in_process(spec: RunSpec, sizes: Sizes, states: StateBytes) -> StateBytes:
    """States where they are: what offload takes off a device lies in the same process, or on a drive."""
    options, width, shard = spec.options, sizes.dtype_bytes, sizes.shard
    if options.offload_param != "none":
        states = state_bytes(replace(spec, options=replace(options, offload_param="none")), sizes)
    if options.offload_param == "nvme":
        on_drive = width * shard - kept_param_bytes(spec, sizes)
        states = replace(states, parameters=states.parameters - on_drive)
    if options.offload_optimizer == "none":
        return states
    gradients = width * shard  # of stage 3's permanent buffer, or of the others' staging
    if swaps_optimizer(spec, sizes):
        return replace(states, gradients_resident=gradients)
    return replace(
        states, master=4 * shard, optimizer=MOMENT_BYTES * shard, gradients_resident=gradients + 4 * shard
    )


def _resident(spec: RunSpec, sizes: Sizes, states: StateBytes) -> Bytes:
    """What stays from step to step."""
    buffers = optimizer_buffer_bytes(spec, sizes) + param_buffer_bytes(spec, sizes)
    return {
        Component.PARAMETERS: states.parameters,
        Component.OPTIMIZER_STATE: states.optimizer,
        Component.MASTER_PARAMETERS: states.master,
        Component.COMMUNICATION_BUFFERS: _touched_bucket(sizes) + buffers,
    }


def _in_step(spec: RunSpec, sizes: Sizes, held: Bytes) -> Bytes:
    """`held` with what an offloaded optimizer has in its step.

    One that is swapped has its sub-group in the buffers, but for the moments of the first step, which torch
    makes beside them.
    """
    if spec.options.offload_optimizer == "none":
        return held
    group = sub_group_elements(sizes) if sizes.stage == 3 else sizes.shard
    own = TORCH_ADAMW_BYTES * group
    if not swaps_optimizer(spec, sizes):
        return {**held, Component.WORKSPACE: held[Component.WORKSPACE] + own}
    inside = (STATE_BYTES + GRADIENT_BYTES) * group
    return {
        **held,
        Component.MASTER_PARAMETERS: 4 * group,
        Component.OPTIMIZER_STATE: MOMENT_BYTES * group,
        Component.GRADIENTS: held[Component.GRADIENTS] + GRADIENT_BYTES * group,
        Component.COMMUNICATION_BUFFERS: max(0, held[Component.COMMUNICATION_BUFFERS] - inside),
        Component.WORKSPACE: held[Component.WORKSPACE] + MOMENT_BYTES * group + own,
    }


def _touched_bucket(sizes: Sizes) -> int:
    """Stage 3's permanent reduce bucket, as far as gradients touch it."""
    if sizes.stage != 3:
        return 0
    return min(sizes.zero.reduce_bucket_size, sizes.trainable) * sizes.dtype_bytes


def _passing(components: Bytes, states: StateBytes) -> int:
    return components[Component.COMMUNICATION_BUFFERS] - states.bucket_resident


def _moment(name: Moment, components: Bytes, runtime: int) -> MomentBytes:
    return moment_bytes(name, {**components, Component.RUNTIME: runtime + ENGINE_BYTES})
