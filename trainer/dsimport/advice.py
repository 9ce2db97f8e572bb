"""What is legal in a DeepSpeed configuration and still surprises people: keys without effect, costs,"
" risks."""

from __future__ import annotations

import math
from typing import Any

from llmtop.presets.no_effect import idle_keys
from llmtop.trainer.dsimport.conflicts import enabled, section
from llmtop.trainer.dsimport.keys import BLOCKS
from llmtop.trainer.dsimport.problem import Findings

_LARGE_POOL_BYTES = 4e9
_ONE_GROUP = 1e11
"""A sub-group of this many elements holds any model's whole shard."""
_SLOW_SCALE_POWER = 24
_ZERO = "zero_optimization"
_STAGE_3_ONLY: frozenset[str] = frozenset(
    {
        *BLOCKS["zero_optimization"].prefixed,
        "sub_group_size",
        "offload_param",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "memory_efficient_linear",
        "override_module_apply",
        "pipeline_loading_checkpoint",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
        "leaf_module",
    }
)
"""Keys of zero_optimization that only the stage 3 engine is given."""

_STAGE_1_2_ONLY: frozenset[str] = frozenset(
    {
        "allgather_bucket_size",
        "use_multi_rank_bucket_allreduce",
        "round_robin_gradients",
        "parameter_alignment",
        "ignore_unused_parameters",
    }
)
"""Keys of zero_optimization that only the engine of stages 1 and 2 is given."""


def advise(config: dict[str, Any], stage: int | None, autos: list[str], findings: Findings) -> None:
    """Add warnings about a configuration that is otherwise accepted. `stage` is None while it is open."""
    zero = section(config, _ZERO)
    if stage is not None:
        _without_effect(zero, stage, findings)
    if stage == 3:
        _stage_3_costs(zero, findings)
        _nvme_pools(zero, findings)
        _zero_plus_plus(config, zero, autos, findings)
    elif stage in (1, 2) and section(zero, "offload_optimizer").get("device", "none") != "none":
        findings.warn(
            f"{_ZERO}.offload_optimizer",
            f"at stage {stage} moves the optimizer only: all weights stay on every GPU, 2 bytes a parameter",
            "use stage 3 for a model whose weights alone fill the GPU",
        )
    _frozen_autos(zero, findings)
    _offload_variants(zero, findings)
    _precision(config, stage, autos, findings)


def _without_effect(zero: dict[str, Any], stage: int, findings: Findings) -> None:
    for key in zero:
        name = key.removeprefix("stage3_")
        if key in ("offload_param", "offload_optimizer"):
            continue  # told where the options are read, which knows the device
        if stage == 0:
            if key != "stage":
                findings.warn(f"{_ZERO}.{key}", "has no effect at stage 0", "delete it, or choose a stage")
        elif stage != 3 and name in _STAGE_3_ONLY:
            findings.warn(
                f"{_ZERO}.{key}",
                f"has no effect at stage {stage}: only stage 3 reads it",
                "delete it, or use stage 3",
            )
        elif stage == 3 and name in _STAGE_1_2_ONLY:
            findings.warn(
                f"{_ZERO}.{key}", "has no effect at stage 3: only stages 1 and 2 read it", "delete it"
            )
        elif key == "allgather_bucket_size":
            findings.warn(
                f"{_ZERO}.{key}",
                "has no effect over NCCL, which gathers each parameter group at once",
                "delete it; reduce_bucket_size is the buffer that costs memory",
            )


def _stage_3_costs(zero: dict[str, Any], findings: Findings) -> None:
    if zero.get("sub_group_size", 0) >= _ONE_GROUP:
        findings.warn(
            f"{_ZERO}.sub_group_size",
            f"of {zero['sub_group_size']:g} puts a rank's whole shard in one group: the step then holds"
            " its fp32 gradients and copies all at once",
            "use 1e9, the default, or less",
        )
    if zero.get("stage3_max_live_parameters") == 0 and zero.get("stage3_max_reuse_distance") == 0:
        findings.warn(
            f"{_ZERO}.stage3_max_live_parameters",
            "of 0, with a reuse distance of 0, frees each layer right after its use: least memory,"
            " most traffic",
            "raise both where there is memory to spare",
        )
    if zero.get("stage3_gather_16bit_weights_on_model_save") is False:
        findings.warn(
            f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
            "is off: save_pretrained and save_16bit_model then write no usable weights (checkpoints"
            " are whole)",
            "turn it on, or convert a checkpoint with zero_to_fp32.py",
        )


def _nvme_pools(zero: dict[str, Any], findings: Findings) -> None:
    """NVMe offload keeps its buffers in pinned host memory, on every rank."""
    param, optimizer = section(zero, "offload_param"), section(zero, "offload_optimizer")
    count, size = param.get("buffer_count", 5), param.get("buffer_size", 100_000_000)
    pool_bytes = 2 * count * size
    if param.get("device") == "nvme" and pool_bytes > _LARGE_POOL_BYTES:
        findings.warn(
            f"{_ZERO}.offload_param.buffer_size",
            f"pins {pool_bytes / 1e9:.3g} GB of host memory on every rank, however small the model:"
            f" {count} buffers of {size:g} elements of 2 bytes",
            "lower it to a little more than the largest tensor of the model",
        )
    count, size = optimizer.get("buffer_count", 4), zero.get("sub_group_size", 1_000_000_000)
    pool_bytes = 4 * count * size
    if optimizer.get("device") == "nvme" and pool_bytes > _LARGE_POOL_BYTES:
        findings.warn(
            f"{_ZERO}.offload_optimizer.buffer_count",
            f"pins up to {pool_bytes / 1e9:.3g} GB of host memory on every rank: {count} buffers as"
            f" large as a sub-group ({size:g} elements, or the rank's shard if that is smaller) of 4"
            " bytes each",
            "lower sub_group_size",
        )


def _zero_plus_plus(
    config: dict[str, Any], zero: dict[str, Any], autos: list[str], findings: Findings
) -> None:
    ranks = zero.get("zero_hpz_partition_size", 1)
    if ranks > 1:
        findings.warn(
            f"{_ZERO}.zero_hpz_partition_size",
            f"keeps a second 16-bit copy of the weights on every {ranks} GPUs, 2/{ranks} bytes a"
            " parameter more on each, even with offload_param",
            "set it to 1 where memory is short",
        )
    if zero.get("zero_quantized_weights") and not enabled(config, "fp16"):
        findings.warn(
            f"{_ZERO}.zero_quantized_weights",
            "has failed with bf16 (a gather of tensors of two types)"
            + ("; the precision is open here" if "bf16.enabled" in autos else ""),
            "use fp16, or turn it off",
        )


def _frozen_autos(zero: dict[str, Any], findings: Findings) -> None:
    """Sizes that transformers fills for one hidden size, left in a file that is used for other models."""
    bucket, threshold = zero.get("reduce_bucket_size"), zero.get("stage3_param_persistence_threshold")
    prefetch = zero.get("stage3_prefetch_bucket_size")
    if not isinstance(bucket, int) or not isinstance(prefetch, int):
        return
    hidden = math.isqrt(bucket)
    if hidden * hidden == bucket and prefetch == int(0.9 * bucket) and threshold in (None, 10 * hidden):
        findings.warn(
            f"{_ZERO}.reduce_bucket_size",
            f"and the sizes next to it were made for a model of hidden size {hidden} ({hidden}^2 and"
            " 0.9 of it), and fit no other",
            'write "auto" in their place',
        )


def _offload_variants(zero: dict[str, Any], findings: Findings) -> None:
    optimizer = section(zero, "offload_optimizer")
    if optimizer.get("ratio", 1.0) < 1.0:
        findings.warn(
            f"{_ZERO}.offload_optimizer.ratio",
            "below 1 trains the part on the GPU at the first learning rate for ever: schedules do not"
            " reach it",
            "set it to 1, or keep the learning rate constant",
        )
    if optimizer.get("super_offload"):
        findings.warn(
            f"{_ZERO}.offload_optimizer.super_offload",
            "is kept as a raw key; llmtop's prediction does not know it",
            "trust the measured figures",
        )
    if zero.get("zenflow") is not None:
        findings.refuse(
            f"{_ZERO}.zenflow",
            "says itself which micro-batches end in a step, and llmtop's training loop says that",
            "delete it; offload_optimizer works without",
        )


def _precision(config: dict[str, Any], stage: int | None, autos: list[str], findings: Findings) -> None:
    bf16, fp16 = section(config, "bf16"), section(config, "fp16")
    if bf16.get("bf16_master_weights_and_grads"):
        per_param = "8 bytes a parameter in place of 16" if bf16.get("bf16_optimizer_states") else "less"
        findings.warn(
            "bf16.bf16_master_weights_and_grads",
            f"keeps master weights and gradients in bf16: {per_param}, which llmtop's prediction does"
            " not count",
            "expect less than predicted, and watch the loss: small updates are rounded away",
        )
    if section(config, "torch_autocast").get("enabled") is True:
        sixteen = enabled(config, "bf16") or enabled(config, "fp16")
        findings.warn(
            "torch_autocast.enabled",
            "adds casts to a model whose weights are in 16 bit already"
            if sixteen
            else "keeps the weights in fp32 and casts as it goes: 16 bytes a parameter, buckets in fp32",
            "leave it out" if sixteen else "use bf16 or fp16 to halve the weights",
        )
    if fp16.get("initial_scale_power", 16) > _SLOW_SCALE_POWER and fp16.get("enabled") is not False:
        findings.warn(
            "fp16.initial_scale_power",
            f"of {fp16['initial_scale_power']} makes the first steps overflow under fp16: each skipped"
            " step halves the scale",
            "use 16, the default",
        )
    accumulation = str(section(config, "data_types").get("grad_accum_dtype"))
    if (
        stage == 1
        and enabled(config, "bf16")
        and accumulation in ("fp32", "float32", "float", "torch.float32")
    ):
        findings.warn(
            "data_types.grad_accum_dtype",
            "fp32 at stage 1 costs 4 more bytes a parameter on every GPU, not sharded",
            "use stage 2, where the same key costs 4 bytes divided by the number of GPUs",
        )


def report_idle(raw: dict[str, Any], findings: Findings) -> None:
    """Raw keys that are kept and change nothing; of some it is told already with their stage."""
    for idle in idle_keys(raw):
        if not any(problem.key == idle.path for problem in findings.problems):
            findings.warn(idle.path, f"has no effect here: {idle.why}", idle.instead)


def report_blanks(given: Any, findings: Findings, path: str = "") -> None:
    """Keys that begin or end in a blank are other keys, which nothing reads; the eye does not see it."""
    if isinstance(given, list):
        for inner in given:
            report_blanks(inner, findings, path)
    if not isinstance(given, dict):
        return
    for key, inner in given.items():
        full = f"{path}.{key}" if path else key
        if key != key.strip() and not any(problem.key == full for problem in findings.problems):
            findings.warn(
                full, f"'{key}' has a blank at its end: it is another key", f"write '{key.strip()}'"
            )
        report_blanks(inner, findings, full)
