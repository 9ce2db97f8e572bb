"""Combinations that cannot work, as tables: refused before anything is launched, with what does work."""

from __future__ import annotations

from llmtop.presets.liger import LIGER
from llmtop.presets.rule import Refusal, Rule
from llmtop.presets.rules_deepspeed import DEEPSPEED_RULES, contradictions
from llmtop.presets.rules_engine import ENGINE_RULES
from llmtop.presets.rules_host import HOST_RULES
from llmtop.presets.rules_kernels import KERNEL_CHOICE_RULES
from llmtop.presets.rules_optimizer import OPTIMIZER_RULES
from llmtop.presets.rules_qat import QAT_RULES
from llmtop.presets.spec import DTYPE_BYTES, Attention, GpuSpec, ModelShape, RunSpec

BITSANDBYTES_OPTIMIZERS = frozenset({"adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"})
NO_SDPA = frozenset({"gemma2", "gpt_oss", "bloom", "mpt", "gpt_neo"})
"""Families whose class says `_supports_sdpa = False`, or does not say it, in transformers 5.24."""
NO_FLASH_ATTENTION = frozenset({"bloom", "mpt", "llama4_text"})
"""The same for `_supports_flash_attn`."""
NOT_PACKED = frozenset({"falcon"})
"""Families whose matrices are of a class derived from `Linear`, which loading in 4 or 8 bits passes over."""
ONLY_FLASH: dict[str, tuple[str, ...]] = {"gpt_oss": ("flash_attention_4",)}
"""Families that name the kinds that they work with (`_compatible_flash_implementations`): those of them that
are an option here."""
NOT_GROUPED = frozenset({"llama4_text"})
"""Families whose experts are not multiplied by torch's `grouped_mm`."""
_GROUPED_BYTES = 16
"""The rows that it takes begin at multiples of this."""
MAX_TOKENS_PER_MICRO_BATCH = 100_000_000
FLASH_HEAD_DIM = 256


def refusals(spec: RunSpec) -> tuple[Refusal, ...]:
    """Everything about the run that cannot work; empty when it can be tried."""
    found = [rule.refusal(spec) for rule in RULES if rule.refuses(spec)]
    if spec.options.deepspeed:
        raw_rules = (*DEEPSPEED_RULES, *OPTIMIZER_RULES, *ENGINE_RULES)
        found += [rule.refusal(spec) for rule in raw_rules if rule.refuses(spec)]
        found += contradictions(spec)
    return tuple(found)


def has_bf16(gpu: GpuSpec) -> bool:
    """Whether the hardware computes bf16; a device that does not say is taken at the user's word."""
    return gpu.kind == "cpu" or _capability(gpu) >= (8, 0)


def default_attention(model: ModelShape) -> Attention:
    """The attention to use where nobody chose: SDPA wherever transformers has it for the family."""
    return "sdpa" if _has(model, "sdpa") else "eager"


def _has(model: ModelShape, attention: str) -> bool:
    """Whether the family's class works with `sdpa` or `flash`."""
    if model.traced is not None:
        return attention in model.traced.attentions
    return model.family not in (NO_SDPA if attention == "sdpa" else NO_FLASH_ATTENTION)


def _capability(gpu: GpuSpec) -> tuple[int, int]:
    """Compute capability as numbers; beyond every bound when it is not known."""
    major, _, minor = (gpu.compute_capability or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (999, 0)


def _flash(spec: RunSpec) -> bool:
    return spec.options.attention.startswith("flash_attention")


def _ragged_experts(spec: RunSpec, precision: str) -> bool:
    """Whether rows of the experts' matrices begin where `grouped_mm` takes none; older GPUs do without it."""
    moe = spec.model.moe
    if moe is None or moe.first_dense_layers >= spec.model.num_layers:
        return False
    if spec.model.family in NOT_GROUPED or not has_bf16(spec.gpu):
        return False
    together = _GROUPED_BYTES // DTYPE_BYTES[precision]
    return any(width % together != 0 for width in (spec.model.hidden_size, moe.expert_intermediate_size))


def _expert_words(spec: RunSpec) -> dict[str, str | float]:
    whole = _GROUPED_BYTES // DTYPE_BYTES[spec.options.precision]
    mends = not _ragged_experts(spec, "fp32")
    return {
        "whole": whole,
        "mend": ("--precision fp32, or " if mends else "") + f"a config.json with multiples of {whole}",
    }


_OFFLOAD_RULES = (
    Rule(
        name="as many GPUs as the nodes have",
        refuses=lambda spec: (
            spec.options.total_gpus is not None
            and not (
                spec.options.gpus + spec.options.nodes - 1
                <= spec.options.total_gpus
                <= spec.options.gpus * spec.options.nodes
            )
        ),
        what="total_gpus = {o.total_gpus} with gpus = {o.gpus} on {o.nodes} node(s)",
        why="gpus is the most that a node has, and every node has one at least",
        fix="--total-gpus {most}, or as many as the nodes have together",
        words=lambda spec: {"most": str(spec.options.gpus * spec.options.nodes)},
        source="the ranks of a host follow each other",
    ),
    Rule(
        name="offload_param needs stage 3",
        refuses=lambda spec: spec.options.offload_param != "none" and spec.options.zero != 3,
        what="offload_param = {o.offload_param} with zero = {o.zero}",
        why="only stage 3 shards the weights; below it each GPU keeps them all and DeepSpeed ignores the key",
        fix="--zero 3, or --offload-param none",
        source="deepspeed 0.19.8 runtime/zero/config.py; accelerate#2079",
    ),
    Rule(
        name="offload_optimizer needs sharding",
        refuses=lambda spec: spec.options.offload_optimizer != "none" and spec.options.zero == 0,
        what="offload_optimizer = {o.offload_optimizer} with zero = 0",
        why="without ZeRO there is no DeepSpeed optimizer to offload, and the key is ignored",
        fix="--zero 1 or above, or --offload-optimizer none",
        source="deepspeed 0.19.8 runtime/engine.py:_configure_optimizer",
    ),
    Rule(
        name="nvme needs stage 3",
        refuses=lambda spec: spec.options.offload_optimizer == "nvme" and spec.options.zero in (1, 2),
        what="offload_optimizer = nvme with zero = {o.zero}",
        why="at stages 1 and 2 DeepSpeed takes nvme for cpu without a word, and the state fills host memory",
        fix="--zero 3, or --offload-optimizer cpu",
        source="measured with deepspeed 0.19.8",
    ),
    Rule(
        name="nvme needs a path",
        refuses=lambda spec: (
            "nvme" in (spec.options.offload_optimizer, spec.options.offload_param)
            and not spec.options.nvme_path
        ),
        what="offload to nvme without nvme_path",
        why="DeepSpeed has no default folder to swap to",
        fix="--nvme-path DIR, a folder on a local NVMe drive",
        source="deepspeed 0.19.8 runtime/zero/offload_config.py",
    ),
    Rule(
        name="bitsandbytes optimizers cannot be offloaded",
        refuses=lambda spec: (
            spec.options.offload_optimizer != "none" and spec.options.optimizer in BITSANDBYTES_OPTIMIZERS
        ),
        what="optimizer = {o.optimizer} with offload_optimizer = {o.offload_optimizer}",
        why="DeepSpeed's offload steps with its own CPU Adam and refuses another optimizer",
        fix="--optimizer adamw, or --offload-optimizer none",
        source="deepspeed 0.19.8 runtime/engine.py:_configure_optimizer (zero_force_ds_cpu_optimizer)",
    ),
)

_ADAPTER_RULES = (
    Rule(
        name="quantized weights need LoRA",
        refuses=lambda spec: spec.options.quantization != "none" and spec.options.lora_rank == 0,
        what="quantization = {o.quantization} with lora_rank = 0",
        why="quantized weights take no gradient; only adapters beside them can be trained",
        fix="--lora-rank 16, or --quantization none",
        source="transformers 5.x trainer.py:validate_quantization_for_training",
    ),
    Rule(
        name="family that is not packed",
        refuses=lambda spec: spec.options.quantization != "none" and spec.model.family in NOT_PACKED,
        what="quantization = {o.quantization} with a {model.family} model",
        why="its matrices are of a class of their own, which transformers leaves in full precision",
        fix="--quantization none",
        source="transformers 5.24 integrations/bitsandbytes.py:replace_with_bnb_linear",
    ),
    Rule(
        name="int8 is wrong at stage 3",
        refuses=lambda spec: spec.options.quantization == "int8" and spec.options.zero == 3,
        what="quantization = int8 with zero = 3",
        why="sharding splits the row scales of 8-bit weights from their rows: the losses come out wrong",
        fix="--zero 2, or --quantization nf4",
        source="bitsandbytes#1451",
    ),
)

_PRECISION_RULES = (
    Rule(
        name="fp16 on a CPU",
        refuses=lambda spec: spec.options.precision == "fp16" and spec.on_cpu,
        what="precision = fp16 on the CPU",
        why="DeepSpeed's CPU backend refuses it: type fp16 is not supported on your device",
        fix="--precision fp32",
        source="seen with deepspeed 0.19.8, runtime/engine.py:_do_sanity_check",
    ),
    Rule(
        name="bf16 needs compute capability 8.0",
        refuses=lambda spec: spec.options.precision == "bf16" and not has_bf16(spec.gpu),
        what="precision = bf16 on {gpu.name}",
        why="its compute capability is {gpu.compute_capability}, and bf16 arithmetic came with 8.0",
        fix="--precision fp16",
        source="NVIDIA CUDA C++ Programming Guide, arithmetic throughput by compute capability",
    ),
)

_KERNEL_RULES = (
    Rule(
        name="flash attention on a CPU",
        refuses=lambda spec: _flash(spec) and spec.on_cpu,
        what="attention = {o.attention} on the CPU",
        why="FlashAttention has kernels for GPUs only",
        fix="--attention sdpa, or --gpu NAME to plan for a GPU",
        source="seen with transformers 5.24: ImportError at model construction",
    ),
    Rule(
        name="flash attention in fp32",
        refuses=lambda spec: _flash(spec) and spec.options.precision == "fp32",
        what="attention = {o.attention} with precision = fp32",
        why="FlashAttention computes in fp16 and bf16 only",
        fix="--attention sdpa, or --precision bf16",
        source="Dao-AILab/flash-attention README; transformers 5.x modeling_flash_attention_utils.py",
    ),
    Rule(
        name="flash attention 2 needs compute capability 8.0",
        refuses=lambda spec: spec.options.attention == "flash_attention_2" and _capability(spec.gpu) < (8, 0),
        what="attention = flash_attention_2 on {gpu.name}",
        why="its compute capability is {gpu.compute_capability}; FlashAttention-2 starts with Ampere, 8.0",
        fix="--attention sdpa",
        source="Dao-AILab/flash-attention README, CUDA requirements",
    ),
    Rule(
        name="flash attention 3 needs Hopper",
        refuses=lambda spec: (
            spec.options.attention == "flash_attention_3"
            and not (9, 0) <= _capability(spec.gpu) < (10, 0)
            and spec.gpu.compute_capability is not None
        ),
        what="attention = flash_attention_3 on {gpu.name}",
        why="its compute capability is {gpu.compute_capability}; FlashAttention-3 is written for Hopper, 9.0",
        fix="--attention flash_attention_2 (from 8.0), or --attention sdpa",
        source="Dao-AILab/flash-attention README, FlashAttention-3 requirements",
    ),
    Rule(
        name="flash attention 4 needs Hopper or Blackwell",
        refuses=lambda spec: spec.options.attention == "flash_attention_4" and _capability(spec.gpu) < (9, 0),
        what="attention = flash_attention_4 on {gpu.name}",
        why="its compute capability is {gpu.compute_capability}; FlashAttention-4 starts with Hopper, 9.0",
        fix="--attention flash_attention_2 (from 8.0), or --attention sdpa",
        source="Dao-AILab/flash-attention README, FlashAttention-4",
    ),
    Rule(
        name="flash attention and wide heads",
        refuses=lambda spec: _flash(spec) and spec.model.head_dim > FLASH_HEAD_DIM,
        what="attention = {o.attention} with heads of {model.head_dim}",
        why="FlashAttention has kernels for heads of at most 256",
        fix="--attention sdpa",
        source="Dao-AILab/flash-attention README",
    ),
    Rule(
        name="family without flash attention",
        refuses=lambda spec: _flash(spec) and not _has(spec.model, "flash"),
        what="attention = {o.attention} with a {model.family} model",
        why="transformers has no FlashAttention for this family",
        fix="--attention eager, or --attention sdpa where the family has it",
        source="transformers 5.24: _supports_flash_attn of the family's class",
    ),
    Rule(
        name="family with another flash attention",
        refuses=lambda spec: (
            _flash(spec)
            and spec.options.attention not in ONLY_FLASH.get(spec.model.family, (spec.options.attention,))
        ),
        what="attention = {o.attention} with a {model.family} model",
        why="it needs attention sinks, which this kernel lacks: transformers would fetch another one",
        fix="--attention eager, or flash_attention_4",
        source="transformers 5.24: _compatible_flash_implementations of the family's class",
    ),
    Rule(
        name="family without SDPA",
        refuses=lambda spec: spec.options.attention == "sdpa" and not _has(spec.model, "sdpa"),
        what="attention = sdpa with a {model.family} model",
        why="transformers refuses SDPA for this family: it cannot express its attention",
        fix="--attention eager, or --attention flash_attention_2 where the family has it",
        source="transformers 5.24: _supports_sdpa of the family's class",
    ),
    Rule(
        name="liger on a CPU",
        refuses=lambda spec: spec.options.liger and spec.on_cpu,
        what="liger on the CPU",
        why="its kernels are Triton programs, and Triton finds no driver without a GPU",
        fix="--no-liger, or --gpu NAME to plan for a GPU",
        source="seen with liger-kernel 0.8.5: 0 active drivers",
    ),
    Rule(
        name="family without liger",
        refuses=lambda spec: spec.options.liger and spec.model.family not in LIGER,
        what="liger with a {model.family} model",
        why="Liger has no kernels for this family and would change nothing",
        fix="--no-liger",
        source="liger-kernel 0.8.5: MODEL_TYPE_TO_APPLY_LIGER_FN",
    ),
)

_SHAPE_RULES = (
    Rule(
        name="longer than the position table",
        refuses=lambda spec: (
            spec.model.learned_positions > 0
            and spec.model.max_positions is not None
            and spec.options.seq_len > spec.model.max_positions
        ),
        what="seq_len = {o.seq_len} with {model.name}",
        why="it learned {model.max_positions} positions and has no others",
        fix="--seq-len {model.max_positions}",
        source="transformers 5.x: the family's table of learned positions",
    ),
    Rule(
        name="experts of ragged rows",
        refuses=lambda spec: _ragged_experts(spec, spec.options.precision),
        what="experts of {model.moe.expert_intermediate_size} by {model.hidden_size} in {o.precision}",
        why="torch multiplies all experts at once where rows are of whole 16 bytes, {whole} numbers, only",
        fix="{mend}",
        source="torch 2.13 nn.functional.grouped_mm: strides should be multiple of 16 bytes;"
        " transformers 5.24 integrations/moe.py:_can_use_grouped_mm",
        words=_expert_words,
    ),
    Rule(
        name="more tokens than there can be",
        refuses=lambda spec: spec.options.micro_batch * spec.options.seq_len > MAX_TOKENS_PER_MICRO_BATCH,
        what="micro_batch = {o.micro_batch} sequences of {o.seq_len} tokens",
        why="more than a hundred million tokens at once is beyond any GPU",
        fix="a smaller --micro-batch; --grad-accum makes the global batch as large as you like",
        source="a bound, so that byte counts stay within 64 bits",
    ),
)

RULES: tuple[Rule, ...] = (
    *_OFFLOAD_RULES,
    *_ADAPTER_RULES,
    *_PRECISION_RULES,
    *_KERNEL_RULES,
    *KERNEL_CHOICE_RULES,
    *_SHAPE_RULES,
    *QAT_RULES,
    *HOST_RULES,
)
