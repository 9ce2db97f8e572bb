"""Combinations of keys, each valid alone, that DeepSpeed refuses or that cannot mean what they say."""

from __future__ import annotations

from typing import Any

from llmtop.trainer.dsimport.problem import Findings

_DTYPE_FAMILY = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}


def refuse_conflicts(config: dict[str, Any], stage: int | None, findings: Findings) -> None:
    """Check a configuration that passed `check.check`. `stage` is None while it is open."""
    _precision(config, stage, findings)
    _zero(config, stage, findings)
    _reduction(config, stage, findings)
    _low_precision_masters(config, stage, findings)
    _data_types(config, stage, findings)


def section(config: dict[str, Any], *path: str) -> dict[str, Any]:
    """A block of a configuration; empty where it is absent or null."""
    for name in path:
        inner = config.get(name)
        if not isinstance(inner, dict):
            return {}
        config = inner
    return config


def enabled(config: dict[str, Any], block: str) -> bool:
    return section(config, block).get("enabled") is True


def _precision(config: dict[str, Any], stage: int | None, findings: Findings) -> None:
    if enabled(config, "fp16") and enabled(config, "bf16"):
        findings.refuse(
            "fp16.enabled",
            "is on together with bf16.enabled, and DeepSpeed trains in one of them",
            "turn one off; bf16 needs no loss scaling where the GPU has it (Ampere and newer)",
        )
    fp16 = section(config, "fp16")
    if enabled(config, "fp16") and fp16.get("loss_scale", 0) == 0:
        for key in ("loss_scale_window", "min_loss_scale"):
            if fp16.get(key, 1) <= 0:
                findings.refuse(
                    f"fp16.{key}", "must be above 0 while the loss scale is dynamic", "give 1 or more"
                )
    autocast = section(config, "torch_autocast")
    bare = [name for name in autocast.get("lower_precision_safe_modules", ()) if "." not in name]
    if autocast.get("enabled") is True and bare:
        findings.refuse(
            "torch_autocast.lower_precision_safe_modules",
            f"names {bare[0]}, and DeepSpeed imports each by its full name",
            'write it with its package, as "torch.nn.Linear"',
        )
    if autocast.get("enabled") is True and section(config, "zero_optimization").get("zero_quantized_weights"):
        findings.refuse(
            "torch_autocast.enabled",
            "cannot be on together with zero_quantized_weights",
            "turn one of the two off",
        )


def _zero(config: dict[str, Any], stage: int | None, findings: Findings) -> None:
    zero = section(config, "zero_optimization")
    optimizer = section(zero, "offload_optimizer")
    if stage is not None and stage != 3 and optimizer.get("ratio", 1.0) < 1.0:
        findings.refuse(
            "zero_optimization.offload_optimizer.ratio",
            f"below 1 needs stage 3, and this is stage {stage}",
            "set ratio to 1, or use stage 3",
        )
    if zero.get("legacy_stage1"):
        findings.refuse("zero_optimization.legacy_stage1", "no longer exists", "delete it")
    if stage == 3 and zero.get("elastic_checkpoint"):
        findings.refuse(
            "zero_optimization.elastic_checkpoint",
            "is not supported at stage 3: saving a checkpoint fails",
            "delete it; universal checkpoints change the number of GPUs",
        )
    if zero.get("compute_grad_norm") is False:
        _without_norm(config, stage, optimizer, findings)
    for block in ("offload_optimizer", "offload_param"):
        offload = section(zero, block)
        if stage == 3 and offload.get("device") == "nvme" and not offload.get("nvme_path"):
            findings.refuse(
                f"zero_optimization.{block}.nvme_path",
                "is missing, and the device is nvme",
                "give the folder on the NVMe drive",
            )


def _without_norm(
    config: dict[str, Any], stage: int | None, optimizer: dict[str, Any], findings: Findings
) -> None:
    reasons = []
    if stage is not None and stage not in (1, 2):
        reasons.append(f"stage 1 or 2 (this is stage {stage})")
    if config.get("gradient_clipping", 1.0) > 0:
        reasons.append("gradient_clipping 0 (it is 1 unless the file says otherwise)")
    if optimizer.get("device", "none") != "none":
        reasons.append("no offload of the optimizer")
    if section(config, "zero_optimization", "zenflow"):
        reasons.append("no zenflow")
    if reasons:
        findings.refuse(
            "zero_optimization.compute_grad_norm",
            f"false needs {' and '.join(reasons)}",
            "delete it, or mend what it needs",
        )


def _reduction(config: dict[str, Any], stage: int | None, findings: Findings) -> None:
    if config.get("gradient_allreduce_op") == "sum":
        if stage == 3:
            findings.refuse("gradient_allreduce_op", '"sum" does not work at stage 3', 'use "mean"')
        if section(config, "zero_optimization", "zenflow"):
            findings.refuse("gradient_allreduce_op", '"sum" does not work with zenflow', 'use "mean"')
        if section(config, "compile").get("deepcompile"):
            findings.refuse("gradient_allreduce_op", '"sum" does not work with deepcompile', 'use "mean"')
    scatters = stage in (2, 3) and section(config, "zero_optimization").get("reduce_scatter", True)
    if scatters and config.get("gradient_predivide_factor", 1.0) != 1.0:
        findings.refuse(
            "gradient_predivide_factor",
            f"other than 1 does not work at stage {stage} with reduce_scatter",
            "set it to 1, or reduce_scatter to false",
        )
    if scatters and config.get("prescale_gradients"):
        findings.refuse(
            "prescale_gradients",
            f"does not work at stage {stage} with reduce_scatter",
            "set it to false, or reduce_scatter to false",
        )


def _low_precision_masters(config: dict[str, Any], stage: int | None, findings: Findings) -> None:
    bf16, zero = section(config, "bf16"), section(config, "zero_optimization")
    offloaded = section(zero, "offload_optimizer").get("device", "none") != "none"
    masters, states = bf16.get("bf16_master_weights_and_grads"), bf16.get("bf16_optimizer_states")
    if stage == 0 and (masters or states):
        findings.refuse("bf16.bf16_master_weights_and_grads", "needs ZeRO stage 1, 2 or 3", "choose a stage")
    if states and not masters:
        findings.refuse(
            "bf16.bf16_optimizer_states",
            "needs bf16_master_weights_and_grads",
            "turn bf16_master_weights_and_grads on as well",
        )
    if masters and not states and not offloaded:
        findings.refuse(
            "bf16.bf16_master_weights_and_grads",
            "without bf16_optimizer_states works only with the optimizer offloaded to the CPU",
            "turn bf16_optimizer_states on, or offload the optimizer",
        )
    if section(config, "fp16").get("fp16_master_weights_and_grads"):
        if stage == 0:
            findings.refuse(
                "fp16.fp16_master_weights_and_grads", "needs ZeRO stage 1, 2 or 3", "choose a stage"
            )
        elif not offloaded:
            findings.refuse(
                "fp16.fp16_master_weights_and_grads",
                "works only with the optimizer offloaded to the CPU",
                "offload the optimizer, or turn it off",
            )


def _data_types(config: dict[str, Any], stage: int | None, findings: Findings) -> None:
    types = section(config, "data_types")
    model = "fp16" if enabled(config, "fp16") else "bf16" if enabled(config, "bf16") else None
    # A file may leave its precision open; one that says no to both trains in fp32.
    if all(section(config, block).get("enabled") is False for block in ("fp16", "bf16")):
        model = "fp32"
    param = types.get("param_dtype")
    if model and param is not None and _DTYPE_FAMILY.get(str(param)) != model:
        findings.refuse(
            "data_types.param_dtype",
            f"is {param}, and the run trains in {model}",
            "delete it, or turn on the precision that it names",
        )
    accumulation = _DTYPE_FAMILY.get(str(types.get("grad_accum_dtype")))
    if stage == 0 and model and accumulation and accumulation != model:
        findings.refuse(
            "data_types.grad_accum_dtype",
            f"other than {model} needs ZeRO stage 1, 2 or 3",
            "delete it, or choose a stage",
        )
    elif stage == 0 and not model and accumulation:
        findings.warn(
            "data_types.grad_accum_dtype",
            f"works without ZeRO only where the run trains in {accumulation} too",
            f"delete it, or give --precision {accumulation}",
        )
