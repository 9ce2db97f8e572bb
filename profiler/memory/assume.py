"""Everything that a prediction takes for granted, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmtop.presets.no_effect import idle_keys
from llmtop.presets.rules_deepspeed import raw
from llmtop.presets.spec import DTYPE_SPELLINGS, RunSpec
from llmtop.presets.truth import is_true
from llmtop.profiler.cost.links import BITS, node_bytes_per_second
from llmtop.profiler.memory.flatlimit import is_too_long
from llmtop.profiler.memory.lora import in_some_layers
from llmtop.profiler.memory.sizes import Sizes
from llmtop.profiler.units import counted

UNCOMPARED_FAMILIES = frozenset({"gpt_neo", "llama4_text"})
"""Families whose formulas have not been compared with what torch keeps of the real modelling code."""

_FLAGS = (
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "bfloat16.bf16_master_weights_and_grads",
    "bfloat16.bf16_optimizer_states",
    "torch_autocast.enabled",
    "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
)
"""Raw DeepSpeed keys that change memory when they are true."""
_OTHERS = (
    "data_types.grad_accum_dtype",
    "zero_optimization.offload_optimizer.ratio",
)
"""The same for keys whose value says it in another way than by true."""


def uncounted_keys(spec: RunSpec) -> tuple[str, ...]:
    """Raw DeepSpeed keys of the run that change its memory and that no formula knows."""
    idle = {key.path for key in idle_keys(spec.options.deepspeed, nodes=spec.options.nodes)}
    flags = (path for path in _FLAGS if is_true(raw(spec, path)))
    others = (path for path in _OTHERS if _changes(path, raw(spec, path), spec.options.precision))
    # Its buffers are the GPU's where parameters come from NVMe, and there are none elsewhere.
    has_direct = spec.options.offload_param == "nvme" and is_true(raw(spec, "aio.use_gds"))
    direct = ("aio.use_gds",) if has_direct else ()
    return tuple(path for path in (*flags, *others, *direct) if path not in idle)


def _changes(path: str, value: Any, precision: str) -> bool:
    if path.endswith("grad_accum_dtype"):
        return value not in (None, "auto", *DTYPE_SPELLINGS[precision])
    # Every rank's state is what is counted: 1.
    return value is not None and value != "auto" and str(value) not in ("1", "1.0")


def assumptions(spec: RunSpec, sizes: Sizes, bucket: int) -> tuple[str, ...]:
    """One sentence each, the most consequential first."""
    options, model = spec.options, spec.model
    found = [
        *_of_family(spec),
        f"every micro-batch is full: {options.micro_batch} x {options.seq_len:,} tokens",
        "DeepSpeed 0.19.8, transformers 5.x and torch's default caching allocator",
    ]
    found += _of_time(spec)
    uncounted = uncounted_keys(spec)
    if uncounted:
        found.insert(0, f"not counted, though it changes memory: deepspeed.{', deepspeed.'.join(uncounted)}")
    if model.max_positions is not None and options.seq_len > model.max_positions:
        found.insert(
            0, f"the model was made for {model.max_positions:,} positions, fewer than {options.seq_len:,}"
        )
    if "cpu" in (options.offload_optimizer, options.offload_param) and not spec.on_cpu:
        found.append("each node has the host memory that offload needs")
    if bucket:
        found.append(
            f"DeepSpeed's reduce bucket of {sizes.zero.reduce_bucket_size:,} elements is allocated whole"
        )
    if options.lora_rank and in_some_layers(model, options.lora_targets):
        found.append("adapters sit in some layers only; activations are counted as if they sat in all")
    if options.qat != "none":
        found.append(
            "fake quantization keeps two copies of each matrix from forward to backward; its bytes follow"
            " torchao 0.18's code and have not been compared with runs on a GPU"
        )
    if model.moe is not None:
        found.append("tokens are spread evenly over the experts")
    if spec.options.nodes > 1:
        found += _of_nodes(spec)
    if options.zero == 3 and sizes.ranks > 1:
        found.append(f"ZeRO-3 keeps up to {sizes.zero.max_live_parameters:,} weights gathered from step 2 on")
    if spec.gpu.memory_bytes is None:
        found.append("the memory of this GPU is not known, so there is no verdict")
    found += _of_optimizer(spec)
    return tuple(found)


def why_untimed(spec: RunSpec) -> str:
    """Why a step's time is not predicted, where it could be of another run or with more known; else empty."""
    ranks = spec.world_size
    if not spec.on_cpu:
        unknown = spec.options.nodes > 1 and node_bytes_per_second(spec) is None
        return (
            "a step's time over nodes is not predicted: what is between them is not known;"
            " --inter-node-gbps says it"
            if unknown
            else ""
        )
    if ranks > 1:
        return (
            f"a step's time is not predicted for {ranks} processes on a CPU: llmtop calibrate measures"
            " one alone, and not what they take from each other; --gpus 1 has a time then"
        )
    if spec.options.quantization != "none":
        return "a step's time is not predicted for packed weights on a CPU"
    if spec.gpu.measured is None:
        return "a step's time on this CPU is not predicted before llmtop calibrate"
    return ""


def _of_time(spec: RunSpec) -> Iterator[str]:
    """Where a step's time is from; on the CPU kind also why there is none."""
    figures = spec.gpu.measured
    why = why_untimed(spec) if spec.on_cpu else ""
    if why:
        yield why
    elif figures is not None:
        untried = "" if spec.on_cpu else "; such figures have not been compared with runs on a GPU yet"
        threads = (
            f" with {counted(figures.threads, 'thread')}, for which they hold" if figures.threads else ""
        )
        yield f"step time by figures of this machine, calibrated on {figures.date}{threads}{untried}"


def _of_nodes(spec: RunSpec) -> Iterator[str]:
    """What is between nodes, and how well it is known."""
    yield (
        f"each node is taken for the one with most GPUs, {spec.options.gpus}; nobody else uses the network"
        if spec.has_uneven_nodes
        else "all nodes are alike, and nobody else uses their network"
    )
    if spec.on_cpu:
        return
    rate = node_bytes_per_second(spec)
    if rate is None:
        yield why_untimed(spec)
        return
    whence = "as given" if spec.options.inter_node_gbps is not None else f"as {spec.gpu.name}s are sold"
    yield (
        f"{rate * BITS / 1e9:,.0f} Gb/s from each node to others, {whence}, and rings as NCCL counts them;"
        " times over nodes have not been compared with runs yet"
    )


def _of_family(spec: RunSpec) -> Iterator[str]:
    """How well the architecture is known."""
    model = spec.model
    if model.traced is not None:
        code = f"its own code was followed ({model.traced.versions})"
        yield f"traced: '{model.family}' has no formulas here; {code}, and the upper bound is wider"
        if spec.options.lora_rank and spec.options.lora_targets != "all-linear":
            yield "activations are counted as if every matrix of the traced model had its adapter"
    elif model.family in UNCOMPARED_FAMILIES:
        yield f"activations of family '{model.family}' follow formulas not yet compared with its code"


def _of_optimizer(spec: RunSpec) -> Iterator[str]:
    options = spec.options
    if options.optimizer.startswith("paged"):
        yield "paged optimizer state counts as resident on the device"
    if is_too_long(spec):
        yield f"cannot run so: ZeRO-{options.zero} hands {options.optimizer} more than 2^31 elements at once"
