"""Turns other dialects and older spellings into DeepSpeed's own: flat keys, booleans, old names."""

from __future__ import annotations

from typing import Any

from llmtop.trainer.dsimport.check import AUTO
from llmtop.trainer.dsimport.problem import Findings

_ACCELERATE_STAGE = 2
"""The stage that accelerate takes when its configuration names none."""

_FLAT_PLACES: dict[str, tuple[str, ...]] = {
    "zero_stage": ("stage",),
    "offload_optimizer_device": ("offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("offload_optimizer", "nvme_path"),
    "offload_param_device": ("offload_param", "device"),
    "offload_param_nvme_path": ("offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("stage3_gather_16bit_weights_on_model_save",),
}
"""Accelerate's flat keys and their places inside zero_optimization."""

_FLAT_OTHERS = frozenset(
    {
        *("zero3_init_flag", "deepspeed_multinode_launcher", "deepspeed_hostfile", "is_train_batch_min"),
        *("deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "transformer_moe_cls_names"),
        *("deepspeed_moe_layer_cls_names", "enable_msamp", "msamp_opt_level"),
    }
)
_MIXED_PRECISION = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}


def unwrap_accelerate(config: dict[str, Any], findings: Findings) -> tuple[dict[str, Any], dict[str, Any]]:
    """The DeepSpeed part of a whole accelerate configuration, and the options that its other keys mean."""
    inner = config.get("deepspeed_config")
    for holder, where in ((config, ""), (inner, "deepspeed_config.")):
        if isinstance(holder, dict) and isinstance(named := holder.get("deepspeed_config_file"), str):
            findings.refuse(
                f"{where}deepspeed_config_file",
                "names another file, which holds the settings",
                f"give that file: {named}",
            )
    if not isinstance(inner, dict) or "zero_optimization" in config:
        return config, {}
    options: dict[str, Any] = {}
    precision = config.get("mixed_precision")
    if isinstance(precision, str) and precision in _MIXED_PRECISION:
        options["precision"] = _MIXED_PRECISION[precision]
    processes, machines = config.get("num_processes"), config.get("num_machines", 1)
    if _is_count(processes) and _is_count(machines) and processes % machines == 0:
        options |= {"gpus": processes // machines, "nodes": machines}
    findings.warn(
        "deepspeed_config",
        "is part of a configuration of accelerate; DeepSpeed itself reads none of it",
        "accelerate launch reads it as it is; a DeepSpeed file has zero_optimization and other blocks",
    )
    return inner, options


def unflatten(config: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """Accelerate's flat dialect as blocks. A file that has zero_optimization is not in that dialect."""
    flat = [key for key in config if key in _FLAT_PLACES]
    if not flat or "zero_optimization" in config:
        return config
    rest = {k: v for k, v in config.items() if k not in _FLAT_PLACES and k not in _FLAT_OTHERS}
    zero: dict[str, Any] = {}
    for key in flat:
        place = _FLAT_PLACES[key]
        target = "zero_optimization." + ".".join(place)
        findings.warn(
            key,
            f"is accelerate's word for {target}; DeepSpeed itself never reads it",
            f"in a DeepSpeed file write {target}",
        )
        if not (place[-1] == "nvme_path" and config[key] in (None, "none")):
            _put(zero, place, config[key])
    if "zero_stage" not in config:
        findings.warn(
            "zero_stage", f"is missing; accelerate then takes stage {_ACCELERATE_STAGE}", "name the stage"
        )
    zero.setdefault("stage", _ACCELERATE_STAGE)
    _explain_init_flag(config, zero["stage"], findings)
    # Accelerate fills the batch sizes from the script.
    rest.setdefault("train_micro_batch_size_per_gpu", AUTO)
    rest.setdefault("gradient_accumulation_steps", AUTO)
    return {**rest, "zero_optimization": zero}


def _explain_init_flag(config: dict[str, Any], stage: Any, findings: Findings) -> None:
    flag = config.get("zero3_init_flag")
    if flag is None:
        return
    on = str(flag).lower() == "true"
    if on and stage != 3:
        findings.warn(
            "zero3_init_flag",
            f"has no effect at stage {stage}: the whole model is loaded on every GPU",
            "use zero_stage 3 to have it built in shards",
        )
    elif not on and stage == 3:
        findings.warn(
            "zero3_init_flag",
            "is off: every rank builds the whole model before it is sharded",
            "turn it on for a model that does not fit one GPU; llmtop always builds in shards at stage 3",
        )


def spell_out_zero(config: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """`zero_optimization: true`, still in DeepSpeed's own tutorial, as the block that it stands for."""
    switch = config.get("zero_optimization")
    if not isinstance(switch, bool):
        return config
    stage = 1 if switch else 0
    findings.warn(
        "zero_optimization",
        f"is {str(switch).lower()}, an old form that DeepSpeed takes for stage {stage}",
        f'write "zero_optimization": {{"stage": {stage}}}',
    )
    zero: dict[str, Any] = {"stage": stage}
    if switch and "allgather_size" in config:
        zero["allgather_bucket_size"] = config["allgather_size"]
    return {**{k: v for k, v in config.items() if k != "allgather_size"}, "zero_optimization": zero}


def rename_old_keys(config: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """Deprecated keys of a checked configuration as their successors."""
    config = dict(config)
    if "bfloat16" in config:
        old = config.pop("bfloat16")
        if config.get("bf16") is not None:
            findings.warn("bfloat16", "is not read, because bf16 is there too", "delete it")
        else:
            findings.warn("bfloat16", "is the old name of bf16", "write bf16")
            config["bf16"] = old
    if isinstance(zero := config.get("zero_optimization"), dict):
        config["zero_optimization"] = _rename_in_zero(dict(zero), findings)
    return config


def _rename_in_zero(zero: dict[str, Any], findings: Findings) -> dict[str, Any]:
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old not in zero:
            continue
        on = zero.pop(old)
        if new in zero:
            _refuse_both(old, new, findings)
        else:
            findings.warn(
                f"zero_optimization.{old}",
                f"is deprecated; DeepSpeed still takes it for {new}",
                f'write "{new}": {{"device": "{"cpu" if on else "none"}"}}',
            )
            zero[new] = {"device": "cpu" if on else "none"}
    if "cpu_offload_use_pin_memory" in zero:
        del zero["cpu_offload_use_pin_memory"]
        findings.warn(
            "zero_optimization.cpu_offload_use_pin_memory",
            "is no longer read",
            "write pin_memory inside offload_optimizer or offload_param",
        )
    old, new = "stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"
    if old in zero:
        value = zero.pop(old)
        if new in zero:
            _refuse_both(old, new, findings)
        else:
            findings.warn(f"zero_optimization.{old}", "is deprecated", f"write {new}")
            zero[new] = value
    return zero


def _refuse_both(old: str, new: str, findings: Findings) -> None:
    findings.refuse(
        f"zero_optimization.{old}",
        f"is the old name of {new}, and DeepSpeed refuses the two together",
        f"delete {old}",
    )


def _put(target: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    *blocks, key = place
    for block in blocks:
        target = target.setdefault(block, {})
    target[key] = value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
