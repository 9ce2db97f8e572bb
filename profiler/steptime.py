"""Step-time prediction, first version: a roofline of arithmetic, memory traffic, links and the host.

FLOPs follow the standard count (Kaplan et al., arXiv 2001.08361, section 2.1; PaLM, arXiv 2204.02311,
appendix B): 2 per weight and token forward, 4 backward (2 where the weights are frozen), and
4 * layers * width * length per token for attention, halved by causality.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from llmtop.presets.spec import ModelShape, RunSpec
from llmtop.profiler.memory.blocks import block_bytes, eager_square, plain_attention
from llmtop.profiler.memory.sizes import Sizes, checkpointed_blocks, quantized_weights, sizes_of
from llmtop.profiler.shape import Role, param_count, tensors

# Fitted to 27 H200 runs (torch 2.11, transformers 5.17, DeepSpeed 0.19.8); the sum is within about 10 %
# of most of them. Calibration on the machine itself will replace these.
GEMM_EFFICIENCY = 0.56
"""Of the dense peak that a training step's matrix products and attention reach."""
BANDWIDTH_EFFICIENCY = 0.65
LINK_EFFICIENCY = 0.75
ACTIVATION_PASSES = 3.0
"""Times that a kept activation crosses memory in forward and backward."""
SQUARE_PASSES = 12.0
"""The same for the score matrices of eager attention."""
LOGIT_PASSES = 43
"""Bytes moved per logit on the plain loss path."""
OPTIMIZER_BYTES = 49
"""Moved per weight: gradients read, cast and flattened, master, moments read and written, weights written."""
LAUNCH_SECONDS = 2.7e-3
"""Per block and micro-batch: launches, small kernels and gaps between them."""
ADAPTER_LAUNCH = 1.8
"""The same with adapters on every matrix, relative."""
STAGE3_HOST_SECONDS = 0.02
"""Host time per block and micro-batch of ZeRO-3's hooks: the floor of small micro-batches."""
DEQUANTIZED_PER_SECOND = 1.2e11
"""4-bit weights expanded per second in each pass (bitsandbytes 0.50)."""
CPU_ADAM_BYTES_PER_SECOND = 60e9
"""Host memory traffic of a CPU optimizer step on one socket."""


class StepTime(Struct, frozen=True, kw_only=True):
    """Seconds of one optimizer step, by what they are spent on."""

    arithmetic: float
    memory: float
    optimizer: float
    communication: float
    offload: float
    launch: float
    host_floor: float
    """Time that the host needs for the step whatever the device does."""

    @property
    def total(self) -> float:
        device = self.arithmetic + self.memory + self.launch + self.optimizer + self.communication
        return max(device, self.host_floor) + self.offload


@lru_cache(maxsize=1024)
def active_params(model: ModelShape) -> int:
    """Weights that one token passes through in matrix products; a tied head counts, a lookup does not."""
    lookup = {Role.EMBEDDING, Role.POSITION, Role.NORM, Role.BIAS}
    count = sum(g.total for g in tensors(model) if g.role not in lookup and g.role is not Role.EXPERT)
    if model.tied_embeddings:
        count += model.vocab_size * (model.embedding_dim or model.hidden_size)
    if model.moe is not None:
        experts = sum(g.total for g in tensors(model) if g.role is Role.EXPERT)
        count += experts * model.moe.experts_per_token // model.moe.num_experts
    return count


def _recomputed(spec: RunSpec) -> float:
    """The share of the blocks that run forward a second time."""
    options, layers = spec.options, spec.model.num_layers
    every = options.checkpointing_every if options.gradient_checkpointing else 0
    return checkpointed_blocks(layers, every) / layers


def step_flops(spec: RunSpec) -> float:
    """Floating-point operations of one optimizer step on one GPU, recompute included."""
    options, model = spec.options, spec.model
    tokens = options.micro_batch * options.seq_len * options.grad_accum
    weights = active_params(model)
    passes = 2 + (2 if options.lora_rank else 4)
    blocks = weights - model.vocab_size * model.hidden_size
    again = _recomputed(spec)
    recompute = 2 * blocks * again
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * options.seq_len / 2
    attention_passes = 3 + again
    return tokens * (passes * weights + recompute + attention_passes * attention)


def _cuda_step(spec: RunSpec, sizes: Sizes) -> StepTime | None:
    gpu, options, model = spec.gpu, spec.options, spec.model
    peak = gpu.dense_flops_per_second.get(options.precision)
    bandwidth = gpu.memory_bandwidth_bytes_per_second
    if peak is None or bandwidth is None:
        return None
    bandwidth *= BANDWIDTH_EFFICIENCY
    micro_steps, layers, again = options.grad_accum, model.num_layers, _recomputed(spec)
    fused_loss = "fused_linear_cross_entropy" in sizes.liger
    logits = 0 if fused_loss else LOGIT_PASSES * model.vocab_size * sizes.tokens * micro_steps
    offloaded = options.offload_optimizer != "none"
    launch = LAUNCH_SECONDS * layers * micro_steps * (1 + 0.4 * again)
    quantized = quantized_weights(model) if options.quantization != "none" else 0
    expansions = (2 + again) * micro_steps
    return StepTime(
        arithmetic=step_flops(spec) / (peak * GEMM_EFFICIENCY)
        + quantized * expansions / DEQUANTIZED_PER_SECOND,
        memory=(_activation_traffic(spec, sizes) + logits) / bandwidth,
        optimizer=0.0 if offloaded else OPTIMIZER_BYTES * sizes.shard / bandwidth,
        communication=_communication(spec, sizes),
        offload=_offload(spec, sizes),
        launch=launch * (ADAPTER_LAUNCH if options.lora_rank else 1.0),
        host_floor=STAGE3_HOST_SECONDS * layers * micro_steps if sizes.stage == 3 else 0.0,
    )


def _activation_traffic(spec: RunSpec, sizes: Sizes) -> float:
    """Bytes that activations move through device memory in one step."""
    options, model = spec.options, spec.model
    passes = ACTIVATION_PASSES + _recomputed(spec)
    square = 0
    if plain_attention(spec):
        square = model.num_heads * sizes.seq_len * eager_square(model, sizes.dtype_bytes)
    saved = block_bytes(spec, sizes).saved - square
    per_token = passes * saved + SQUARE_PASSES * square
    return per_token * model.num_layers * sizes.tokens * options.grad_accum


def _communication(spec: RunSpec, sizes: Sizes) -> float:
    """Seconds on the links between GPUs: a ring moves (N-1)/N of the bytes in each of its passes."""
    ranks = sizes.ranks
    if ranks == 1:
        return 0.0
    rate = (spec.gpu.nvlink_bytes_per_second or spec.gpu.pcie_bytes_per_second or 16e9) * LINK_EFFICIENCY
    share = (ranks - 1) / ranks
    gradients = 2 * share * sizes.trainable * sizes.dtype_bytes
    weights = share * sizes.trainable * sizes.dtype_bytes
    if sizes.stage == 3:
        everything = (sizes.trainable + sizes.frozen) * sizes.dtype_bytes
        weights = 2 * share * everything * spec.options.grad_accum
        gradients = share * sizes.trainable * sizes.dtype_bytes * spec.options.grad_accum
    return (gradients + weights) / rate


def _offload(spec: RunSpec, sizes: Sizes) -> float:
    """Seconds of moving states over PCIe and of the optimizer on the host."""
    options, width = spec.options, sizes.dtype_bytes
    pcie = (spec.gpu.pcie_bytes_per_second or 16e9) * LINK_EFFICIENCY
    seconds = 0.0
    if options.offload_optimizer != "none":
        gpus = options.gpus
        seconds += 2 * width * sizes.shard / pcie
        seconds += 28 * sizes.shard * gpus / CPU_ADAM_BYTES_PER_SECOND
    if options.offload_optimizer == "nvme":
        seconds += 24 * sizes.shard / 5e9
    if options.offload_param != "none":
        passes = 2 + _recomputed(spec)
        seconds += passes * width * (sizes.shard + sizes.frozen // sizes.ranks) * options.grad_accum / pcie
    return seconds


def step_time(spec: RunSpec, sizes: Sizes | None = None) -> StepTime | None:
    """The itemised prediction; None where the hardware's figures are not known or on the CPU kind."""
    if spec.on_cpu:
        return None
    return _cuda_step(spec, sizes_of(spec) if sizes is None else sizes)


def predict_step_seconds(spec: RunSpec, sizes: Sizes | None = None) -> float | None:
    """Seconds of one optimizer step of the whole job, or None where they cannot be told.

    `sizes` saves taking the spec's counts again where the caller has them.
    """
    parts = step_time(spec, sizes)
    return None if parts is None else parts.total


def model_flops_per_step(spec: RunSpec) -> float:
    """FLOPs of the model itself over the whole job: what MFU counts, without recompute."""
    options = spec.options
    weights = param_count(spec.model) if spec.model.moe is None else active_params(spec.model)
    attention = 4 * spec.model.num_layers * spec.model.num_heads * spec.model.head_dim * options.seq_len / 2
    passes = 2 + (2 if options.lora_rank else 4)
    return spec.tokens_per_step * (passes * weights + 3 * attention)
