"""Makes the DeepSpeed configuration of a run: generated from the options, raw keys merged in last."""

from __future__ import annotations

import copy
from typing import Any

from llmtop.presets.errors import UsageError, written
from llmtop.presets.rules_deepspeed import OWNED
from llmtop.presets.spec import RunOptions, RunSpec
from llmtop.trainer.dsimport.check import check
from llmtop.trainer.dsimport.conflicts import refuse_conflicts
from llmtop.trainer.dsimport.legacy import rename_old_keys, spell_out_zero
from llmtop.trainer.dsimport.problem import Findings

_NEVER = 1_000_000_000
"""Steps between DeepSpeed's own progress lines; the events carry what they would say."""
_DEEPSPEED_OPTIMIZERS = ("adamw", "adamw_torch")
"""Built by DeepSpeed from the configuration; the others the worker builds and hands over."""


def deepspeed_config(spec: RunSpec) -> dict[str, Any]:
    """The exact dictionary for `deepspeed.initialize`. Raises UsageError for raw keys that cannot work."""
    return _merged(_generated(spec), _checked_raw(spec))


def _generated(spec: RunSpec) -> dict[str, Any]:
    options = spec.options
    config: dict[str, Any] = {
        "train_batch_size": spec.global_batch,
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.grad_accum,
        "zero_optimization": _zero_block(spec),
        "bf16": {"enabled": options.precision == "bf16"},
        "fp16": {"enabled": options.precision == "fp16"},
        # DeepSpeed clips at 1.0 where nothing is said, which older releases did not.
        "gradient_clipping": options.max_grad_norm,
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
        # On by default, and waits for the device in every micro-step.
        "timers": {"throughput": {"enabled": False}},
    }
    if options.optimizer in _DEEPSPEED_OPTIMIZERS:
        config["optimizer"] = _optimizer_block(spec)
    else:
        config["zero_allow_untested_optimizer"] = True
    if "nvme" in (options.offload_optimizer, options.offload_param):
        config["aio"] = {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    return config


def _zero_block(spec: RunSpec) -> dict[str, Any]:
    options = spec.options
    block: dict[str, Any] = {"stage": options.zero}
    for name, device in (
        ("offload_optimizer", options.offload_optimizer),
        ("offload_param", options.offload_param),
    ):
        if device == "none":
            continue
        # Page-locked memory serves transfers to a GPU; without one it only costs.
        block[name] = {"device": device, "pin_memory": not spec.on_cpu}
        if device == "nvme":
            block[name]["nvme_path"] = _nvme_path(options, name)
    return block


def nvme_folders(config: dict[str, Any]) -> list[str]:
    """Each folder that the ranks will swap to: raw keys can give optimizer and parameters each one."""
    zero = config.get("zero_optimization") or {}
    blocks = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    return list(dict.fromkeys(block["nvme_path"] for block in blocks if block.get("device") == "nvme"))


def _nvme_path(options: RunOptions, name: str) -> str:
    raw, _ = _lookup(options.deepspeed, f"zero_optimization.{name}.nvme_path")
    path = options.nvme_path or raw
    if not path:
        raise UsageError(
            f"{name} = nvme needs a folder",
            why="nvme_path is not given",
            fix="give --nvme-path DIR on an NVMe drive",
        )
    return str(path)


def _optimizer_block(spec: RunSpec) -> dict[str, Any]:
    options = spec.options
    params: dict[str, Any] = {
        "lr": options.learning_rate,
        "betas": [options.adam_beta1, options.adam_beta2],
        "eps": options.adam_epsilon,
        "weight_decay": options.weight_decay,
    }
    # On the CPU kind DeepSpeed's own AdamW would be compiled for minutes first, and gains nothing.
    if options.optimizer == "adamw_torch" or spec.on_cpu:
        params["torch_adam"] = True
    return {"type": "AdamW", "params": params}


def _checked_raw(spec: RunSpec) -> dict[str, Any]:
    """The raw keys, validated, in DeepSpeed's types and usual spelling, with "auto" filled."""
    findings = Findings()
    given = spell_out_zero(copy.deepcopy(spec.options.deepspeed), findings)
    checked = check(given, findings, refuse_unread=True)
    raw = rename_old_keys(checked.config, findings)
    _fill_autos(raw, checked.autos, spec)
    _refuse_foreign_optimizer(raw)
    _refuse_contradictions(raw, spec)
    refuse_conflicts(_merged(_generated(spec), raw), spec.options.zero, findings)
    for problem in findings.problems:
        if problem.fatal:
            raise UsageError(f"deepspeed.{problem.key}: {problem.what}", fix=problem.fix)
    return raw


def _fill_autos(raw: dict[str, Any], autos: tuple[str, ...], spec: RunSpec) -> None:
    """Fill what transformers fills from the model; any other "auto" means the option or the default."""
    hidden = spec.model.hidden_size
    sizes = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    params, _ = _lookup(raw, "optimizer.params")
    if isinstance(params, dict):
        # Of no table, since each optimizer takes others.
        raw["optimizer"]["params"] = {key: value for key, value in params.items() if value != "auto"}
    for path in autos:
        block, _, key = path.rpartition(".")
        if block == "zero_optimization" and key in sizes:
            raw.setdefault(block, {})[key] = sizes[key]


def _refuse_contradictions(raw: dict[str, Any], spec: RunSpec) -> None:
    for owned in OWNED:
        given, present = _lookup(raw, owned.path)
        wanted = owned.value(spec)
        if present and given != wanted:
            raise UsageError(
                f"deepspeed.{owned.path} = {written(given)} contradicts {owned.option} ({written(wanted)})",
                why="the prediction and the training loop follow the option",
                fix=f"set {owned.to_set} and leave deepspeed.{owned.path} out",
            )


def _refuse_foreign_optimizer(raw: dict[str, Any]) -> None:
    kind, present = _lookup(raw, "optimizer.type")
    if present and str(kind).lower() not in ("adam", "adamw"):
        raise UsageError(
            f"deepspeed.optimizer.type = {written(kind)} is not an optimizer of llmtop",
            why="memory and learning rate follow the optimizer option, which is a kind of AdamW",
            fix="leave deepspeed.optimizer.type out and set --optimizer",
        )


def _lookup(config: Any, path: str) -> tuple[Any, bool]:
    """The value at a dotted path, and whether there is one."""
    for name in path.split("."):
        if not isinstance(config, dict) or name not in config:
            return None, False
        config = config[name]
    return config, True


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, block by block. A null block leaves the generated one alone."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            result[key] = _merged(below, value)
        elif not (isinstance(below, dict) and value is None):
            result[key] = value
    return result
