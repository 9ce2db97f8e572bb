"""What a kernel is, by its name: the one table of patterns, each with where the names come from.

On a GPU the names are those of device kernels as Kineto demangles them; on the CPU those of torch's
operators. A kernel that no row knows stays unnamed, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, NamedTuple

from llmtop.profiler.record.events import KernelsSeen, KernelTime

_NOT_FORWARD = re.compile(r"[Bb]wd|[Bb]ackward|bprop|cutlassB_|combine")
_FUSED_LOSS = "liger_fused_linear_cross_entropy"
TOP_KERNELS = 20
NAME_LENGTH = 200
"""Characters of a kernel's name that are kept: template arguments run to thousands."""

Kind = Literal["attention", "liger", "optimizer", "loss", "quantization", "communication"]


class AttentionKernel(StrEnum):
    """What computed attention."""

    FLASH_2 = "flash_attention_2"
    FLASH_3 = "flash_attention_3"
    FLASH_4 = "flash_attention_4"
    SDPA_FLASH = "sdpa_flash"
    SDPA_CUDNN = "sdpa_cudnn"
    SDPA_EFFICIENT = "sdpa_efficient"
    SDPA_CPU = "sdpa_flash_cpu"
    SDPA_MATH = "sdpa_math"
    UNFUSED = "unfused"
    """A softmax between two matrix products: eager, or on a GPU also SDPA's math, whose kernels are these."""


ATTENTION_WORDS: dict[str, str] = {
    AttentionKernel.FLASH_2: "FlashAttention-2",
    AttentionKernel.FLASH_3: "FlashAttention-3",
    AttentionKernel.FLASH_4: "FlashAttention-4",
    AttentionKernel.SDPA_FLASH: "torch's FlashAttention-2 (SDPA)",
    AttentionKernel.SDPA_CUDNN: "cuDNN's attention (SDPA)",
    AttentionKernel.SDPA_EFFICIENT: "memory-efficient attention (SDPA)",
    AttentionKernel.SDPA_CPU: "torch's flash attention for the CPU (SDPA)",
    AttentionKernel.SDPA_MATH: "SDPA's math, with the whole score matrix",
    AttentionKernel.UNFUSED: "softmax between matrix products, with the whole score matrix",
}

FUSED_ATTENTION: frozenset[str] = frozenset(
    kernel for kernel in AttentionKernel if kernel not in (AttentionKernel.SDPA_MATH, AttentionKernel.UNFUSED)
)


class KernelPattern(NamedTuple):
    """One row of the table."""

    kind: Kind
    name: str
    """What such a kernel is."""
    pattern: str
    """Compiled when a kernel is looked at: most views name none."""
    source: str
    """Where kernels of this name are written."""


def _row(kind: Kind, name: str, pattern: str, source: str) -> KernelPattern:
    return KernelPattern(kind, name, pattern, source)


_FA = "flash-attn"
_ATEN = "torch 2.13, aten/src/ATen/native"
_LIGER = "liger-kernel 0.8.5, liger_kernel/ops"
_BNB = "bitsandbytes 0.50.2, csrc/kernels.cu"
_BNB_OPS = "bitsandbytes 0.50.2, _ops.py"

PATTERNS: tuple[KernelPattern, ...] = (
    _row(
        "attention",
        AttentionKernel.FLASH_4,
        r"FlashAttention(Forward|Backward\w*?)Sm\d+|flash_attn_?cute_?flash_(fwd|bwd)",
        f"{_FA} 4, flash_attn/cute (CuTe DSL writes module and class into the name)",
    ),
    _row(
        "attention",
        AttentionKernel.FLASH_3,
        r"\bflash::FlashAttn(Fwd|Bwd)\w*Sm\d+",
        f"{_FA} 3, hopper/flash_fwd_kernel_sm90.h and flash_bwd_kernel_sm90.h",
    ),
    _row(
        "attention",
        AttentionKernel.SDPA_FLASH,
        r"\bpytorch_flash::flash_(fwd|bwd)_",
        f"{_ATEN}/transformers/cuda/flash_attn (FLASH_NAMESPACE is pytorch_flash)",
    ),
    _row(
        "attention",
        AttentionKernel.FLASH_2,
        r"(?<!\w)flash::flash_(fwd|bwd)_",
        f"{_FA} 2.8.3, csrc/flash_attn/src (namespace flash)",
    ),
    _row(
        "attention",
        AttentionKernel.SDPA_EFFICIENT,
        r"\bfmha_cutlass[FB]_|PyTorchMemEffAttention::",
        f"{_ATEN}/transformers/cuda/mem_eff_attention/kernels",
    ),
    _row(
        "attention",
        AttentionKernel.SDPA_CUDNN,
        r"cudnn_generated\w*_sdpa_",
        f"{_ATEN}/cudnn/MHA.cpp; cuDNN 9 writes the names",
    ),
    _row(
        "attention",
        AttentionKernel.SDPA_CPU,
        r"^aten::_scaled_dot_product_flash_attention_for_cpu",
        f"{_ATEN}/native_functions.yaml",
    ),
    _row(
        "attention",
        AttentionKernel.SDPA_MATH,
        r"^aten::_scaled_dot_product_attention_math",
        f"{_ATEN}/transformers/attention.cpp",
    ),
    _row(
        "attention",
        AttentionKernel.UNFUSED,
        # The loss has a softmax too, of logarithms: LogSoftMax, or true as the sixth template argument.
        r"^aten::_softmax$|(?<!Log)SoftMax(Forward|Backward)Epilogue"
        r"|softmax_warp_(forward|backward)<[^<>]*?\d+, false",
        f"{_ATEN}/cuda/SoftMax.cu and PersistentSoftmax.cuh",
    ),
    _row(
        "liger",
        "rms_norm",
        r"^_(block_|fused_add_)?rms_norm_(forward|backward|fwd|bwd)",
        f"{_LIGER}/rms_norm.py",
    ),
    _row("liger", "layer_norm", r"^_layer_norm_(forward|backward|fwd|bwd)", f"{_LIGER}/layer_norm.py"),
    _row(
        "liger",
        "rope",
        r"^_(triton_rope|triton_qwen2vl_mrope|llama4_rope_kernel|rope_4d_kernel|rope_general_kernel|qwen2vl_mrope)",
        f"{_LIGER}/rope.py, qwen2vl_mrope.py and llama4_rope.py",
    ),
    _row(
        "liger",
        "glu",
        r"^_(swiglu_(forward|backward|fwd|bwd|fused|kernel)|fused_up_proj_swiglu)",
        f"{_LIGER}/swiglu.py, mlp.py and fused_moe_kernels.py",
    ),
    _row("liger", "glu", r"^_geglu_(tanh_)?(forward|backward|fwd|bwd)", f"{_LIGER}/geglu.py"),
    _row("liger", "relu_squared", r"^_relu_squared_(forward|backward)", f"{_LIGER}/relu_squared.py"),
    _row(
        "liger",
        "cross_entropy",
        r"^(liger_cross_entropy_kernel|_fused_cross_entropy_dz_kernel)",
        f"{_LIGER}/cross_entropy.py; the fused linear one starts it too, once for each chunk of tokens",
    ),
    _row(
        "loss",
        "liger_cross_entropy",
        r"^(liger_cross_entropy_kernel|_fused_cross_entropy_dz_kernel)",
        f"{_LIGER}/cross_entropy.py",
    ),
    _row(
        "loss",
        "torch_cross_entropy",
        r"nll_loss_forward_(reduce|no_reduce)|^aten::nll_loss(2d)?_forward|\bLogSoftMaxForwardEpilogue",
        f"{_ATEN}/cuda/Loss.cu and SoftMax.cu",
    ),
    _row(
        "optimizer",
        "deepspeed_fused_adam",
        r"^(void )?multi_tensor_apply_kernel<.*\bAdamFunctor<",
        "deepspeed 0.19.8, ops/csrc/adam/multi_tensor_adam.cu (no namespace)",
    ),
    _row(
        "optimizer",
        "torch_fused_adam",
        r"FusedAdamMathFunctor|^aten::_fused_adamw?_$",
        f"{_ATEN}/cuda/fused_adam_utils.cuh",
    ),
    _row(
        "optimizer",
        "torch_foreach_adam",
        r"multi_tensor_apply_kernel<.*\bPointwiseOpScalar(List|Tensor)?Functor<|^aten::_foreach_addcdiv_$",
        f"{_ATEN}/cuda/ForeachPointwiseOp.cu, as torch/optim/adam.py calls it",
    ),
    _row("optimizer", "torch_single_tensor_adam", r"^aten::addcdiv_$|\baddcdiv_cuda_", "torch/optim/adam.py"),
    _row("optimizer", "bitsandbytes_8bit", r"kOptimizerStatic8bit\dState(Blockwise)?", _BNB),
    _row(
        "optimizer",
        "bitsandbytes_8bit",
        r"^bitsandbytes::optimizer_update_8bit",
        _BNB_OPS,
    ),
    _row("optimizer", "bitsandbytes_32bit", r"kOptimizer32bit\dState", _BNB),
    _row(
        "optimizer",
        "bitsandbytes_32bit",
        r"^bitsandbytes::optimizer_update_32bit",
        _BNB_OPS,
    ),
    _row("optimizer", "deepspeed_cpu_adam", r"^Optimizer\.step#DeepSpeedCPUAdam", "torch/optim/optimizer.py"),
    _row(
        "quantization",
        "4bit_dequantize",
        # The last template argument is the data type: 1 is FP4, 2 is NF4.
        r"kDequantizeBlockwise<.*, (\(DataType_t\))?[12]>|^bitsandbytes::dequantize_4bit",
        _BNB,
    ),
    _row("quantization", "4bit_gemv", r"kgemm_4bit_inference|^bitsandbytes::gemv_4bit", _BNB),
    _row(
        "quantization",
        "int8_matmul",
        r"kInt8VectorQuant|kdequant_mm_int32|^bitsandbytes::int8_(linear_matmul|vectorwise_quant|mixed_scaled_mm)",
        _BNB,
    ),
    *(
        _row(
            "communication",
            word,
            rf"^nccl(Sym\w*?|Dev)?(Dev)?Kernel_{nccl}(_|\(|$)|^c10d::_?{gloo}_?(coalesced_|tensor_coalesced_)?$",
            "NCCL 2.2x, src/device/generate.py; torch/csrc/distributed/c10d/Ops.cpp",
        )
        for word, nccl, gloo in (
            ("all_gather", "AllGather", "(allgather|allgather_base|allgather_into)"),
            ("all_reduce", "AllReduce", "allreduce"),
            ("reduce_scatter", "ReduceScatter", "(reduce_scatter|reduce_scatter_base)"),
            ("broadcast", "Broadcast", "broadcast"),
            ("reduce", "Reduce", "reduce"),
            ("send_recv", "SendRecv", "(send|recv)"),
            ("all_to_all", "AllToAll", "(alltoall|alltoall_base)"),
        )
    ),
)


def kinds_of(name: str) -> tuple[tuple[Kind, str], ...]:
    """Everything that the table says of one kernel's name: the first row of each kind that knows it."""
    found: dict[Kind, str] = {}
    for row in PATTERNS:
        if row.kind not in found and re.search(row.pattern, name):
            found[row.kind] = row.name
    return tuple(found.items())


def recognise(step: int, kernels: Sequence[KernelTime]) -> KernelsSeen:
    """What ran, from the kernels of one micro-batch."""
    found: dict[Kind, dict[str, KernelTime]] = {}
    for kernel in kernels:
        for kind, name in kinds_of(kernel.name):
            of_kind = found.setdefault(kind, {})
            so_far = of_kind.get(name, KernelTime(name=name, seconds=0.0, calls=0))
            of_kind[name] = KernelTime(
                name=name, seconds=so_far.seconds + kernel.seconds, calls=so_far.calls + kernel.calls
            )
    attention = _attention(found.get("attention", {}))
    loss = _loss(found.get("loss", {}))
    liger = set(found.get("liger", {}))
    if loss == _FUSED_LOSS:
        liger = liger - {"cross_entropy"} | {"fused_linear_cross_entropy"}
    longest = sorted(kernels, key=lambda kernel: -kernel.seconds)[:TOP_KERNELS]
    return KernelsSeen(
        step=step,
        attention=attention,
        attention_calls=_forward_calls(attention, kernels),
        liger=tuple(sorted(liger)),
        optimizer=_longest(found.get("optimizer", {})),
        loss=loss,
        quantization=tuple(sorted(found.get("quantization", {}))),
        communication=tuple(sorted(found.get("communication", {}))),
        top=tuple(
            KernelTime(name=kernel.name[:NAME_LENGTH], seconds=kernel.seconds, calls=kernel.calls)
            for kernel in longest
        ),
        total_seconds=sum(kernel.seconds for kernel in kernels),
        names=len(kernels),
    )


def _longest(found: dict[str, KernelTime]) -> str | None:
    return max(found, key=lambda name: found[name].seconds, default=None)


def _attention(found: dict[str, KernelTime]) -> str | None:
    """A softmax alone may be a router's: it says something only where no fused kernel ran."""
    fused = {name: kernel for name, kernel in found.items() if name in FUSED_ATTENTION}
    if not fused and AttentionKernel.SDPA_MATH in found:
        return AttentionKernel.SDPA_MATH
    return _longest(fused or found)


def _forward_calls(attention: str | None, kernels: Sequence[KernelTime]) -> int:
    return sum(
        kernel.calls
        for kernel in kernels
        if attention is not None
        and not _NOT_FORWARD.search(kernel.name)
        and dict(kinds_of(kernel.name)).get("attention") == attention
    )


def _loss(found: dict[str, KernelTime]) -> str | None:
    """A micro-batch has one loss, so Liger's kernel more than once is the fused one, chunk by chunk."""
    name = _longest(found)
    if name == "liger_cross_entropy" and found[name].calls > 1:
        return _FUSED_LOSS
    return name
