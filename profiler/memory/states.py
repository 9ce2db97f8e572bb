"""What a GPU holds between steps, and what the optimizer step adds: ZeRO 0 to 3, offload, optimizers.

Follows deepspeed 0.19.8: `runtime/fp16/fused_optimizer.py` (stage 0), `runtime/zero/stage_1_and_2.py`
(stages 1 and 2), `runtime/zero/stage3.py` and `zero/partition_parameters.py` (stage 3).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.persistent import Persistent, persistent
from llmtop.profiler.memory.qat import qat_scales
from llmtop.profiler.memory.secondary import frozen_bytes, trained_bytes
from llmtop.profiler.memory.sizes import Sizes

MIB = 1 << 20
BNB_8BIT_STATE = 2 * (1 + 4 / 256)
"""Two one-byte moments with an fp32 scale per block of 256 (bitsandbytes 0.50, `optim/optimizer.py`)."""
BNB_8BIT_SCALES = 2 * 4 / 256


class StateBytes(Struct, frozen=True, kw_only=True):
    """Bytes on one GPU from the second step on."""

    parameters: int
    gathered: int
    """Full weights that ZeRO-3 keeps gathered during forward and backward, on top of its shard."""
    secondary: int = 0
    """ZeRO++'s second shards of trained weights: there but between the end of a step and the next forward."""
    master: int
    optimizer: int
    gradients_resident: int
    """ZeRO-3's permanent gradient buffer."""
    bucket_resident: int
    """ZeRO-3's permanent reduce bucket; gradient staging of an offloaded optimizer."""
    workspace: int
    outside_allocator: int
    """Managed memory of paged optimizers: on the device, not in the allocator."""
    step_fp32_gradients: int
    """Of `step_extra`, the fp32 copy that the optimizer itself reads."""
    step_gradients: int
    """Gradients of the backward pass that are alive at the step's worst point, residents not included."""
    step_extra: int
    """Copies that the step makes at that point, on top of everything else here."""
    init_peak: int
    """Largest sum while the engine is being made."""
    scales: int = 0
    """Of fake quantization: modules keep them from pass to pass."""


def cublas_workspace(spec: RunSpec) -> int:
    """Two workspaces (forward and backward threads): 32 MiB each from Hopper on, 8,320 KiB before.

    torch `aten/src/ATen/cuda/CublasHandlePool.cpp:parseChosenWorkspaceSize`.
    """
    if spec.on_cpu:
        return 0
    capability = spec.gpu.compute_capability
    recent = capability is None or float(capability) >= 9.0
    return 2 * (32 * MIB if recent else 8320 * 1024)


def _optimizer_bytes(spec: RunSpec, elements: int) -> tuple[int, int]:
    """Moments of `elements` weights: bytes in the allocator and bytes in managed memory outside it."""
    kind = spec.options.optimizer
    if kind == "adamw_8bit":
        return round(elements * BNB_8BIT_STATE), 0
    if kind == "paged_adamw_8bit":
        return round(elements * BNB_8BIT_SCALES), 2 * elements
    if kind == "paged_adamw_32bit":
        return 0, 8 * elements
    return 8 * elements, 0


def sub_group_elements(sizes: Sizes) -> int:
    """Largest stage-3 sub-group: shares are added until `sub_group_size` is reached, so it overshoots."""
    limit = sizes.zero.sub_group_size
    if sizes.shard <= limit:
        return sizes.shard
    return min(sizes.shard, limit + sizes.wide_linear // sizes.ranks // 2)


def step_components(states: StateBytes) -> tuple[int, int]:
    """(gradients, workspace) at the worst point of the optimizer step.

    Gradients are those of the backward pass and the fp32 copy that the optimizer reads; flat copies on the
    way from one to the other and the optimizer's own temporaries are workspace.
    """
    read = states.step_fp32_gradients
    gradients = states.gradients_resident + states.step_gradients + read
    return gradients, states.workspace + states.scales + states.step_extra - read


def components_in_optimizer(states: StateBytes) -> tuple[int, int]:
    """The same as a look at the tensors inside the optimizer sees them: what it reads is all there is.

    The gradients of the backward pass are gone by then, so what the peak had of them is workspace.
    """
    read = states.step_fp32_gradients or states.step_gradients
    transient = states.step_gradients + states.step_extra
    return states.gradients_resident + read, states.workspace + states.scales + transient - read


def unreleased_bytes(spec: RunSpec, sizes: Sizes) -> int:
    """Weights beyond the gathered ones that autograd may still hold after ZeRO-3 has released them.

    Seen with fp32 and with offloaded weights (H200, one model above `max_live_parameters`), not elsewhere:
    it belongs in an upper bound only.
    """
    options = spec.options
    seen = options.precision == "fp32" or options.offload_param != "none"
    if sizes.stage != 3 or sizes.checkpoint_every == 1 or not seen:
        return 0
    beyond = sizes.trainable + sizes.frozen - sizes.zero.max_live_parameters
    return max(0, min(beyond, sizes.largest_tensor + 4 * sizes.layer_params)) * sizes.dtype_bytes


def overgathered_bytes(spec: RunSpec, sizes: Sizes) -> int:
    """Weights that ZeRO-3 may hold beyond the gathered ones, by how far its prefetching has come: in an upper
    bound only.

    The last weight that is gathered ahead may pass `max_live_parameters` by all of itself; adapters, modules
    of their own, have that happen. Weights that are gathered at once, as small ones with a large one or a
    block's experts, lie in one flat tensor beside their copies (deepspeed 0.19.8,
    `partition_parameters.py:AllGatherCoalescedHandle`). Packed weights that the graph still holds are
    gathered again.
    """
    if sizes.stage != 3 or (sizes.ranks == 1 and spec.options.offload_param == "none"):
        return 0
    width, kept = sizes.dtype_bytes, persistent(spec, sizes)
    bucket = min(sizes.zero.prefetch_bucket_size, sizes.trainable + sizes.frozen)
    if sizes.packed_bytes:
        again = min(sizes.packed_bytes, sizes.zero.max_live_parameters * sizes.packed_bytes // sizes.frozen)
        embedding = 0 if spec.model.tied_embeddings else sizes.head_params
        return again + width * (embedding + max(sizes.head_params, sizes.experts) + bucket)
    if not sizes.lora_rank and not sizes.experts:
        return width * (sizes.wide_linear + bucket)
    left = sizes.trainable + sizes.frozen - kept.trained - kept.frozen
    beyond = max(0, width * left - _gathered_bytes(spec, sizes, kept))
    flat = width * _one_module(sizes)
    return flat + min(beyond, flat)


def gathered_elements(sizes: Sizes, whole: int = 0) -> int:
    """Weights that stage 3 holds gathered from the second step on: `max_live_parameters` bounds it.

    One rank has nothing to gather; nor have the `whole` elements that stay so.
    `zero/partitioned_param_coordinator.py:fetch_sub_module`.
    """
    everything = sizes.trainable + sizes.frozen - whole
    if sizes.ranks == 1:
        return 0
    live = max(sizes.zero.max_live_parameters, sizes.zero.max_reuse_distance // 2)
    overshoot = round(1.2 * sizes.model.hidden_size**2)
    return min(everything, max(live + overshoot, _one_module(sizes)))


def _one_module(sizes: Sizes) -> int:
    """Elements of the module with the largest weights, which are gathered at once whatever the limit."""
    return max(sizes.head_params, sizes.wide_linear, sizes.experts)


def _optimizer_temporary(spec: RunSpec) -> int:
    """Bytes per element that the optimizer's own arithmetic needs.

    torch's AdamW makes one fp32 temporary on CUDA (foreach) and two on the CPU (tensor by tensor).
    """
    if spec.on_cpu:
        return 8
    return 4 if spec.options.optimizer == "adamw_torch" else 0


def state_bytes(spec: RunSpec, sizes: Sizes) -> StateBytes:
    """Resident and step bytes of the spec's ZeRO stage."""
    if sizes.stage == 3:
        return _stage3(spec, sizes)
    states = _stage0(spec, sizes) if sizes.stage == 0 else _stage12(spec, sizes)
    scales = qat_scales(spec, sizes.dtype_bytes)
    return replace(states, scales=scales) if scales else states


def _stage0(spec: RunSpec, sizes: Sizes) -> StateBytes:
    width, count = sizes.dtype_bytes, sizes.trainable
    optimizer, outside = _optimizer_bytes(spec, count)
    mixed = width == 2
    fused = spec.options.optimizer == "adamw"
    # Every 16-bit gradient is cast to fp32, then the casts are flattened; unfused casts tensor by tensor.
    # A plain fp32 optimizer on the CPU goes tensor by tensor.
    plain = _optimizer_temporary(spec) * (sizes.largest_tensor if spec.on_cpu else count)
    step_extra = (8 * count if fused else 4 * count + plain) if mixed else plain
    # Both wrappers step once on zeros; the unfused one has them in both precisions.
    init = (18 * count if fused else 12 * count + optimizer + plain) if mixed else width * count
    return StateBytes(
        parameters=width * count + sizes.frozen_bytes,
        gathered=0,
        master=4 * count if mixed else 0,
        optimizer=optimizer,
        gradients_resident=0,
        bucket_resident=0,
        workspace=cublas_workspace(spec),
        outside_allocator=outside,
        step_fp32_gradients=4 * count if mixed else 0,
        step_gradients=width * count,
        step_extra=step_extra,
        init_peak=init + sizes.frozen_bytes,
    )


def _stage12(spec: RunSpec, sizes: Sizes) -> StateBytes:
    width, count, shard = sizes.dtype_bytes, sizes.trainable, sizes.shard
    offloaded = spec.options.offload_optimizer != "none"
    optimizer, outside = (0, 0) if offloaded else _optimizer_bytes(spec, shard)
    # Gradients of the share are flattened in 16 bits and cast to fp32 while the old ones are still held;
    # later the optimizer's own temporary lies beside the fp32 copy alone.
    held, cast = width * sizes.held_gradients, (width + 4 if width == 2 else 4) * shard
    own = (4 + _optimizer_temporary(spec)) * shard
    if own > held + cast:
        held, cast = 0, own
    init = (width * count + 8 * shard) if not offloaded else 2 * width * count
    return StateBytes(
        parameters=width * count + sizes.frozen_bytes,
        gathered=0,
        master=0 if offloaded else 4 * shard,
        optimizer=optimizer,
        gradients_resident=0,
        bucket_resident=width * sizes.largest_tensor if offloaded else 0,
        workspace=cublas_workspace(spec),
        outside_allocator=outside,
        step_fp32_gradients=0 if offloaded else 4 * shard,
        step_gradients=0 if offloaded else held,
        step_extra=0 if offloaded else cast,
        init_peak=max(init, 2 * width * count) + sizes.frozen_bytes,
    )


def _stage3_shards(spec: RunSpec, sizes: Sizes, kept: Persistent) -> int:
    """Bytes of this rank's shares, and of the scales of packed weights: these are plain attributes of their
    parameter (`Params4bit.quant_state`), so stage 3 neither shards nor offloads them."""
    width, ranks = sizes.dtype_bytes, sizes.ranks
    if spec.options.offload_param == "none":
        return width * sizes.shard + -(-(sizes.frozen_bytes - sizes.scale_bytes) // ranks) + sizes.scale_bytes
    # Shares of small frozen weights stay on the device (`partition_parameters.py:_partition_param`); those of
    # trained ones go into flat buffers on the host.
    return sizes.scale_bytes + (-(-width * kept.frozen // ranks) if ranks > 1 else 0)


def _kept_whole(spec: RunSpec, sizes: Sizes, kept: Persistent) -> int:
    """Bytes of small weights that stay gathered; on one rank the device's own share is the whole already."""
    if sizes.ranks == 1 and spec.options.offload_param == "none":
        return 0
    return sizes.dtype_bytes * (kept.trained + kept.frozen)


def _gathered_bytes(spec: RunSpec, sizes: Sizes, kept: Persistent) -> int:
    """Of full weights, those that stay whole left out."""
    width, whole = sizes.dtype_bytes, kept.trained + kept.frozen
    if sizes.packed_bytes:
        # bitsandbytes keeps each packed weight as a plain attribute of the graph (`MatMul4Bit`), so what
        # ZeRO-3 releases stays; beside them the largest weight that is not packed, or the experts, which no
        # quantization packs, as far as they are gathered at once.
        experts = min(sizes.experts * sizes.model.num_layers, gathered_elements(sizes, whole))
        return sizes.packed_bytes - width * kept.packed + max(sizes.head_params, experts) * width
    if spec.options.offload_param == "none":
        return width * gathered_elements(sizes, whole)
    # With the weights on the host, one rank too gathers what it uses. Without recomputation as much as the
    # largest tensor was seen beside it (H200), with it nothing.
    everything = sizes.trainable + sizes.frozen - whole
    gathered = min(everything, max(sizes.zero.max_live_parameters, _one_module(sizes)))
    beside = 0 if sizes.checkpoint_every == 1 else min(sizes.largest_tensor, everything - gathered)
    return width * (gathered + beside)


def _stage3(spec: RunSpec, sizes: Sizes) -> StateBytes:
    width, shard, ranks = sizes.dtype_bytes, sizes.shard, sizes.ranks
    offloaded = spec.options.offload_optimizer != "none"
    params_away = spec.options.offload_param != "none"
    optimizer, outside = (0, 0) if offloaded else _optimizer_bytes(spec, shard)
    sub_group = sub_group_elements(sizes)
    bucket = sizes.zero.reduce_bucket_size * width
    step = (6 if width == 2 else 4) * sub_group
    own = (4 + _optimizer_temporary(spec)) * sub_group
    kept = persistent(spec, sizes)
    weights = _stage3_shards(spec, sizes, kept)
    gathered_bytes = 0
    if ranks > 1 or params_away:
        gathered_bytes = _gathered_bytes(spec, sizes, kept)
    states = 0 if offloaded else 4 * shard
    init = weights + (0 if offloaded else 6 * shard) + bucket + 2 * sizes.largest_tensor
    if sizes.packed_bytes:
        # Packed weights are made whole on every rank; the engine shards them, one after another.
        init = max(init, sizes.frozen_bytes + width * sizes.trainable)
    second, second_frozen = (0, 0) if params_away else (trained_bytes(sizes), frozen_bytes(sizes))
    return StateBytes(
        parameters=weights + _kept_whole(spec, sizes, kept) + second_frozen,
        gathered=gathered_bytes,
        secondary=second,
        master=states,
        optimizer=optimizer,
        gradients_resident=0 if offloaded else width * shard,
        bucket_resident=bucket,
        workspace=cublas_workspace(spec),
        outside_allocator=outside,
        step_fp32_gradients=0 if offloaded else 4 * sub_group,
        step_gradients=0,
        step_extra=0 if offloaded else max(step, own),
        init_peak=init + second + second_frozen,
    )
