"""Step-time prediction: a roofline of arithmetic, memory traffic, links and the host.

Where the machine has been calibrated (`llmtop calibrate`), what it was measured to reach takes the place of
the preset's peak and of the share of it that other runs reached; on a CPU there is no prediction without.
Operations are those that the model needs (`flops.py`) and what is recomputed of them.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from llmtop.presets.spec import MachineFigures, ModelShape, RunOptions, RunSpec
from llmtop.profiler.cost.flops import active_weights, head_weights, model_flops
from llmtop.profiler.cost.links import LINK_EFFICIENCY, PCIE_FALLBACK, Links, links_of
from llmtop.profiler.cost.nvme import nvme_traffic, traffic_seconds, uses_nvme
from llmtop.profiler.cost.shape import Role, tensors
from llmtop.profiler.memory.blocks import SOFTMAX_AS_IT_IS, block_bytes, eager_square, plain_attention
from llmtop.profiler.memory.lora import linear
from llmtop.profiler.memory.qat import rounding_traffic
from llmtop.profiler.memory.secondary import group_ranks
from llmtop.profiler.memory.sizes import Sizes, checkpointed_blocks, quantized_weights, sizes_of

# Fitted to 40 H200 runs (torch 2.11, transformers 5.17, DeepSpeed 0.19.8), none of them held out: the sum is
# within about 10 % of most of them. What a calibration has measured replaces them.
GEMM_EFFICIENCY = 0.72
"""Of the dense peak that a training step's matrix products reach."""
ATTENTION_EFFICIENCY, WIDE_HEADS, SDPA_ATTENTION = 0.265, 1.3, 1.25
"""The same of FlashAttention-2 with heads of 64, and how much more heads of 128 and SDPA's kernels reach:
lengths from 2,048 to 32,768 tell it from the matrix products."""
BANDWIDTH_EFFICIENCY = 0.65
ACTIVATION_PASSES = 6.0
"""Times that a kept activation crosses memory in forward and backward: each small operation reads and writes
it. A third of it is forward."""
LOGIT_PASSES = 65
"""Bytes moved per logit on the plain loss path."""
OPTIMIZER_BYTES = 65
"""Moved per weight: gradients read, cast and flattened, master, moments read and written, weights written."""
TORCH_OPTIMIZER = 2.06
"""The same with torch's AdamW, relative: by its operations one after another (decay, both moments, root,
division, sum, update), each of which reads and writes, 101 bytes to the 49 of one kernel (torch 2.11,
`optim/adamw.py:_multi_tensor_adamw`)."""
LAUNCH_SECONDS = 2.0e-3
"""Per block and micro-batch: small kernels and gaps between them, on a busy device."""
ADAPTER_LAUNCH = 2.3
"""The same with adapters on every matrix, relative."""
OPERATION_SECONDS = 1.75e-5
"""Of the host for one operation of autograd, forward and backward, where no calibration has measured it
(`launch_seconds`): by a 135M model on an H200, whose 30 blocks of 512 tokens wait for nothing else."""
BLOCK_OPERATIONS, PARAMETER_OPERATIONS = 118, 9.7
"""What the host does for a block of a Llama in units of that, and DeepSpeed's hooks for each trained tensor
of it at ZeRO-0 to 2 (transformers 5.17, DeepSpeed 0.19.8; `benchmarks.host_operations`)."""
MICRO_STEP_OPERATIONS, STEP_OPERATIONS = 100, 200
"""The same of embedding, head and loss; of the engine's step."""
RECOMPUTED_OPERATIONS = 180
"""What a block's recomputation adds: most of it is keeping and giving back what the block saves."""
ADAPTER_OPERATIONS = 410
"""A block with adapters on every matrix, whatever is frozen in it."""
INT8_HOST_SECONDS = 6.5e-4
"""The same of each matrix in 8 bits (bitsandbytes 0.50): five operations of its own and a dozen kernels, and
the host waits for the device's answer whether there are outliers (`backends/cuda/ops.py`)."""
RECOMPUTED_LAUNCHES = 0.4
"""Of a block's launches, those that its recomputation makes again."""
LIGER_OPERATIONS = 15
"""What each of Liger's functions in a block costs the host beyond the operations of torch that it replaces:
its launches of Triton's kernels. Qwen2.5-0.5B on an H200 in micro-batches of 1 and 2 (`tune.jsonl`)."""
LIGER_FUNCTIONS = {"rms_norm": 2, "rope": 1, "glu": 1}
"""Of a block of a Llama; with the kernels' words of `presets/liger.py`."""
STAGE3_HOST_SECONDS, STAGE3_RECOMPUTED = 0.0172, 0.28
"""Host time per block and micro-batch with ZeRO-3's hooks, the floor of small micro-batches, and what its
recomputation adds, relative: the hooks are passed once more."""
DEQUANTIZED_PER_SECOND = 1.2e11
"""4-bit weights expanded per second in each pass (bitsandbytes 0.50)."""
EIGHT_BIT_SECONDS, PAGED_SECONDS = 1.8e-11, 2.9e-11
"""What bitsandbytes' AdamW takes longer for each weight than DeepSpeed's fused one (0.50)."""
CPU_ADAM_BYTES_PER_SECOND = 60e9
"""Host memory traffic of a CPU optimizer step on one socket."""

CPU_OPERATIONS_PER_BLOCK = 60
"""Of autograd in one block of a Llama, by its code: norms, rotation, matrices, attention, views."""

NVME_BYTES_PER_SECOND = 5e9
"""Of a drive that nobody has measured yet, each way; the ranks of a host share it."""


class StepTime(Struct, frozen=True, kw_only=True):
    """Seconds of one optimizer step, by what they are spent on."""

    arithmetic: float
    memory: float
    optimizer: float
    communication: float
    """Of which nothing is taken to happen beside the arithmetic."""
    offload: float
    launch: float
    host_floor: float
    """Time that the host needs for the step whatever the device does."""

    @property
    def total(self) -> float:
        device = self.arithmetic + self.memory + self.launch + self.optimizer + self.communication
        return max(device, self.host_floor) + self.offload


def _recomputed(spec: RunSpec) -> float:
    """The share of the blocks that run forward a second time."""
    options, layers = spec.options, spec.model.num_layers
    every = options.checkpointing_every if options.gradient_checkpointing else 0
    return checkpointed_blocks(layers, every) / layers


def _arithmetic_seconds(spec: RunSpec, matmul: float, attention_rate: float) -> float:
    """Matrix products and attention of one optimizer step on one GPU, recompute included."""
    options, model = spec.options, spec.model
    tokens = options.micro_batch * options.seq_len * options.grad_accum
    flops, again = model_flops(spec), _recomputed(spec)
    # What adapters take is in `ADAPTER_LAUNCH`: their matrices are too thin to be limited by arithmetic.
    products = flops.needed - flops.needed_attention - flops.adapters
    products += again * 2 * (active_weights(model) - head_weights(model))
    # Forward is a third of the attention's three passes.
    attention = flops.needed_attention * (1 + again / 3)
    return tokens * (products / matmul + attention / attention_rate)


def _rates(spec: RunSpec, peak: float) -> tuple[float, float]:
    """Operations per second of the matrix products and of the attention."""
    figures = spec.gpu.measured
    if figures is None:
        return peak * GEMM_EFFICIENCY, peak * _attention_efficiency(spec)
    matmul = figures.matmul_flops_per_second
    return matmul, matmul if plain_attention(spec) else figures.attention_flops_per_second


def _attention_efficiency(spec: RunSpec) -> float:
    """Whole score matrices are matrix products like others; what they cost beside is memory traffic."""
    if plain_attention(spec):
        return GEMM_EFFICIENCY
    reached = ATTENTION_EFFICIENCY * (WIDE_HEADS if spec.model.head_dim >= 128 else 1.0)
    return reached * (SDPA_ATTENTION if spec.options.attention == "sdpa" else 1.0)


def _cuda_step(spec: RunSpec, sizes: Sizes) -> StepTime | None:
    gpu, options, model = spec.gpu, spec.options, spec.model
    peak = gpu.dense_flops_per_second.get(options.precision)
    bandwidth = gpu.memory_bandwidth_bytes_per_second
    links = links_of(spec)
    if peak is None or bandwidth is None or not links.known:
        return None
    measured = gpu.measured
    bandwidth = measured.memory_bytes_per_second if measured else bandwidth * BANDWIDTH_EFFICIENCY
    micro_steps, layers, again = options.grad_accum, model.num_layers, _recomputed(spec)
    fused_loss = "fused_linear_cross_entropy" in sizes.liger
    logits = 0 if fused_loss else LOGIT_PASSES * model.vocab_size * sizes.tokens * micro_steps
    offloaded = options.offload_optimizer != "none"
    blocks = layers * micro_steps * (1 + RECOMPUTED_LAUNCHES * again)
    launch = LAUNCH_SECONDS * blocks * (ADAPTER_LAUNCH if options.lora_rank else 1.0)
    hooks = STAGE3_HOST_SECONDS * (1 + STAGE3_RECOMPUTED * again) * layers * micro_steps
    quantized = quantized_weights(model) if options.quantization != "none" else 0
    expansions = (2 + again) * micro_steps
    expanding = quantized * expansions / DEQUANTIZED_PER_SECOND
    return StepTime(
        arithmetic=_arithmetic_seconds(spec, *_rates(spec, peak)) + expanding,
        memory=(_activation_traffic(spec, sizes) + logits) / bandwidth,
        optimizer=0.0 if offloaded else sizes.shard * _optimizer_seconds(options, bandwidth),
        communication=_communication(spec, sizes, links),
        offload=_offload(spec, sizes),
        launch=launch,
        host_floor=_host_speed(measured)
        * max(_host_seconds(spec, sizes, again), hooks if sizes.stage == 3 else 0.0),
    )


def _host_speed(measured: MachineFigures | None) -> float:
    """Seconds of this machine's host for one of the host that the constants are of."""
    return 1.0 if measured is None else measured.launch_seconds / OPERATION_SECONDS


def _host_seconds(spec: RunSpec, sizes: Sizes, again: float) -> float:
    """Of launching one step, whatever the device does; `again` of the blocks run forward twice."""
    options, layers = spec.options, spec.model.num_layers
    int8 = INT8_HOST_SECONDS * _packed_in_block(spec) if options.quantization == "int8" else 0.0
    ligers = LIGER_OPERATIONS * sum(LIGER_FUNCTIONS.get(kernel, 0) for kernel in sizes.liger)
    block = OPERATION_SECONDS * (_block_operations(spec) + ligers) + int8
    block += again * (OPERATION_SECONDS * RECOMPUTED_OPERATIONS + RECOMPUTED_LAUNCHES * int8)
    others = MICRO_STEP_OPERATIONS * options.grad_accum + STEP_OPERATIONS
    return layers * options.grad_accum * block + OPERATION_SECONDS * others


def _block_operations(spec: RunSpec) -> float:
    return ADAPTER_OPERATIONS if spec.options.lora_rank else _model_operations(spec.model)


@lru_cache(maxsize=256)
def _model_operations(model: ModelShape) -> float:
    """Of a block whose weights are trained, in the mean."""
    groups = [group for group in tensors(model) if group.per_layer]
    # Experts lie in two tensors, however many they are (transformers 5).
    held = sum(group.count for group in groups if group.role != Role.EXPERT) / model.num_layers
    held += 2 if any(group.role == Role.EXPERT for group in groups) else 0
    return BLOCK_OPERATIONS + PARAMETER_OPERATIONS * held


def _packed_in_block(spec: RunSpec) -> float:
    """Matrices of a block that are packed, in the mean."""
    return sum(group.count for group in linear(spec.model)) / spec.model.num_layers


def _optimizer_seconds(options: RunOptions, bandwidth: float) -> float:
    """Of one weight."""
    moved = OPTIMIZER_BYTES / bandwidth
    if options.optimizer == "adamw_torch":
        return moved * TORCH_OPTIMIZER
    if options.optimizer == "paged_adamw_8bit":
        return moved + PAGED_SECONDS
    return moved + (EIGHT_BIT_SECONDS if options.optimizer == "adamw_8bit" else 0.0)


def _activation_traffic(spec: RunSpec, sizes: Sizes) -> float:
    """Bytes that activations move through device memory in one step."""
    model, again, width = spec.model, _recomputed(spec), sizes.dtype_bytes
    square = kept_square = 0.0
    if plain_attention(spec):
        scores = model.num_heads * sizes.seq_len
        kept_square = scores * eager_square(spec, width)
        forward, backward = _score_traffic(spec, width)
        square = scores * (forward * (1 + again) + backward)
    passes = ACTIVATION_PASSES * (1 + again / 3)
    per_token = passes * (block_bytes(spec, sizes).saved - kept_square) + square
    traffic = per_token * model.num_layers * sizes.tokens * spec.options.grad_accum
    return traffic + rounding_traffic(spec, sizes.dtype_bytes)


def _score_traffic(spec: RunSpec, width: int) -> tuple[int, int]:
    """Bytes that each score of plain attention moves in its forward and in its backward pass.

    Forward, by operation: written by the product, scaled, masked, softmax, read by the product with the
    values; where the softmax is in fp32 it is cast before and after. Backward: the softmax as two operations
    (the product with what was kept, then the kernel), the scale, and the products on both sides.
    transformers 5.17, `eager_attention_forward`.
    """
    capped = 6 * width if spec.model.attention_softcap else 0
    if width == 4 or spec.model.family in SOFTMAX_AS_IT_IS:
        return 8 * width + capped, 12 * width + capped
    return 8 * width + 16 + capped, 8 * width + 32 + capped


def _communication(spec: RunSpec, sizes: Sizes, links: Links) -> float:
    """Seconds on the links between GPUs: a ring moves (N-1)/N of the bytes in each of its passes."""
    ranks = sizes.ranks
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    trained = share * sizes.trainable * sizes.dtype_bytes
    buckets = max(1, -(-sizes.trainable // max(1, sizes.zero.reduce_bucket_size)))
    if sizes.stage == 3:
        micro_steps = spec.options.grad_accum
        reduced = links.collective(trained * micro_steps, buckets * micro_steps)
        return reduced + _gathering(spec, sizes, links)
    # Stage 2 reduces after each micro-batch; the figures that were fitted within a node do not count that.
    times = spec.options.grad_accum if sizes.stage == 2 and links.nodes > 1 else 1
    return links.collective(2 * trained * times, 2 * buckets * times) + links.collective(trained, buckets)


def _gathering(spec: RunSpec, sizes: Sizes, links: Links) -> float:
    """ZeRO-3 gathers every weight in forward and again in backward, block by block.

    With second shards the first forward of a step alone goes over all ranks, the others stay in their group
    (`partition_parameters.py:all_gather_coalesced`).
    """
    everything = (sizes.trainable + sizes.frozen) * sizes.dtype_bytes
    passes, blocks = 2 * spec.options.grad_accum, spec.model.num_layers + 2
    whole = (sizes.ranks - 1) / sizes.ranks * everything
    group = group_ranks(sizes)
    if group == 1:
        return links.collective(whole * passes, blocks * passes)
    near = (group - 1) / group * everything * (passes - 1)
    return links.collective(whole, blocks) + links.collective(near, blocks * (passes - 1), group)


def _pcie_rate(spec: RunSpec) -> float:
    measured = spec.gpu.measured
    if measured is not None and measured.pcie_bytes_per_second is not None:
        return measured.pcie_bytes_per_second
    return (spec.gpu.pcie_bytes_per_second or PCIE_FALLBACK) * LINK_EFFICIENCY


def _offload(spec: RunSpec, sizes: Sizes) -> float:
    """Seconds of moving states over PCIe and of the optimizer on the host."""
    options, width = spec.options, sizes.dtype_bytes
    pcie = _pcie_rate(spec)
    seconds = 0.0
    if options.offload_optimizer != "none":
        gpus = options.gpus
        seconds += 2 * width * sizes.shard / pcie
        seconds += 28 * sizes.shard * gpus / CPU_ADAM_BYTES_PER_SECOND
    if uses_nvme(spec):
        seconds += traffic_seconds(nvme_traffic(spec), NVME_BYTES_PER_SECOND, NVME_BYTES_PER_SECOND) or 0.0
    if options.offload_param != "none":
        passes = 2 + _recomputed(spec)
        seconds += passes * width * (sizes.shard + sizes.frozen // sizes.ranks) * options.grad_accum / pcie
    return seconds


def step_time(spec: RunSpec, sizes: Sizes | None = None) -> StepTime | None:
    """The itemised prediction; None where the hardware's figures are not known."""
    sizes = sizes_of(spec) if sizes is None else sizes
    if not spec.on_cpu:
        return _cuda_step(spec, sizes)
    # Between processes of a CPU nothing has been measured, nor are packed weights.
    if spec.gpu.measured is None or sizes.ranks > 1 or spec.options.quantization != "none":
        return None
    return _cpu_step(spec, sizes, spec.gpu.measured)


def _cpu_step(spec: RunSpec, sizes: Sizes, figures: MachineFigures) -> StepTime:
    """One rank's step from measured figures alone."""
    micro_steps, model, again = spec.options.grad_accum, spec.model, _recomputed(spec)
    logits = model.vocab_size * sizes.tokens * micro_steps
    operations = CPU_OPERATIONS_PER_BLOCK * model.num_layers * micro_steps * (1 + again / 3)
    return StepTime(
        arithmetic=_arithmetic_seconds(spec, *_rates(spec, 0.0)),
        memory=_activation_traffic(spec, sizes) / figures.memory_bytes_per_second
        + logits * figures.loss_seconds_per_logit,
        optimizer=sizes.shard * figures.optimizer_seconds_per_weight,
        communication=0.0,
        offload=0.0,
        launch=operations * figures.launch_seconds,
        host_floor=0.0,
    )


def predict_step_seconds(spec: RunSpec, sizes: Sizes | None = None) -> float | None:
    """Seconds of one optimizer step of the whole job, or None where they cannot be told.

    `sizes` saves taking the spec's counts again where the caller has them.
    """
    parts = step_time(spec, sizes)
    return None if parts is None else parts.total
