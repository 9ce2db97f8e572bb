"""The optimizer and scheduler blocks as options of llmtop."""

from __future__ import annotations

from typing import Any

from llmtop.presets.errors import nearest, written
from llmtop.presets.rules_optimizer import CPU_PARAMS, FUSED_PARAMS, TORCH_PARAMS
from llmtop.trainer.dsimport.check import AUTO
from llmtop.trainer.dsimport.conflicts import section
from llmtop.trainer.dsimport.keys import (
    OPTIMIZER_NAMES,
    REMOVED_OPTIMIZERS,
    SCHEDULERS,
    TORCH_SCHEDULERS,
    Key,
)
from llmtop.trainer.dsimport.problem import Findings
from llmtop.trainer.dsimport.value import BadValue, read_value

_OWN_COMMAND = "train with AdamW, or train with a program of your own"

_PARAMS: dict[str, tuple[str, Key]] = {
    "lr": ("learning_rate", Key(kind="number", above=0)),
    "eps": ("adam_epsilon", Key(kind="number", above=0)),
    "weight_decay": ("weight_decay", Key(kind="number", low=0)),
}
"""Parameters of Adam that are options of llmtop."""
_BETA = Key(kind="number", low=0, below=1)

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_RATE = Key(kind="number", above=0)
_COUNT = Key(kind="whole", low=1)


def optimizer_options(
    config: dict[str, Any], autos: list[str], findings: Findings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that the optimizer block means, and what of the block has to stay raw."""
    block = config.get("optimizer")
    kind = section(config, "optimizer").get("type")
    if not isinstance(block, dict) or kind is None or kind == AUTO:
        return {}, {}
    if kind.lower() not in ("adam", "adamw"):
        _refuse_optimizer(kind, findings)
        return {}, {}
    params = dict(section(config, "optimizer", "params"))
    options: dict[str, Any] = {}
    raw: dict[str, Any] = {}
    torch_adam = params.pop("torch_adam", False)
    if torch_adam:
        options["optimizer"] = "adamw_torch"
    if not params.pop("adam_w_mode", True) and kind.lower() == "adam":
        findings.warn("optimizer.params.adam_w_mode", "false is Adam with L2 decay; it is kept as a raw key")
        raw = {"type": "Adam", "params": {"adam_w_mode": False}}
    _read_params(params, options, autos, findings)
    offloaded = section(config, "zero_optimization", "offload_optimizer").get("device", "none") != "none"
    known = TORCH_PARAMS if torch_adam else CPU_PARAMS if offloaded else FUSED_PARAMS
    for key, value in params.items():
        if value == AUTO:
            autos.append(f"optimizer.params.{key}")
        elif key in known:
            raw.setdefault("params", {})[key] = value
        else:
            _refuse_param(key, known, findings)
    return options, raw


def _read_params(
    params: dict[str, Any], options: dict[str, Any], autos: list[str], findings: Findings
) -> None:
    """Move what is an option of llmtop from the parameters to the options."""
    for key, (option, form) in _PARAMS.items():
        if key in params:
            value = _read(f"optimizer.params.{key}", form, params.pop(key), autos, findings)
            if value is not None:
                options[option] = float(value)
    if "betas" not in params:
        return
    betas = params.pop("betas")
    if betas == AUTO:
        autos.append("optimizer.params.betas")
    elif isinstance(betas, list) and len(betas) == 2:
        for option, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            value = _read("optimizer.params.betas", _BETA, beta, autos, findings)
            if value is not None:
                options[option] = float(value)
    else:
        what = f"is {written(betas)}, not two numbers"
        findings.refuse("optimizer.params.betas", what, "write [0.9, 0.95]")


def _refuse_optimizer(kind: str, findings: Findings) -> None:
    if kind.lower() in {name.lower() for name in REMOVED_OPTIMIZERS}:
        why = "was removed from DeepSpeed"
        fix = 'use "AdamW"'
    elif kind.lower() in {name.lower() for name in OPTIMIZER_NAMES}:
        why, fix = "is an optimizer of DeepSpeed that llmtop neither predicts nor trains with", _OWN_COMMAND
    elif "8bit" in kind.lower() or "paged" in kind.lower():
        why = "is an optimizer of bitsandbytes, which DeepSpeed cannot build by name"
        fix = "delete the block and use the option --optimizer adamw_8bit (or paged_adamw_8bit)"
    else:
        guess = nearest(kind, OPTIMIZER_NAMES)
        why = "is none of the optimizers that DeepSpeed builds by name"
        fix = f'did you mean "{guess}"?' if guess else 'use "AdamW"'
    findings.refuse("optimizer.type", f'"{kind}" {why}', fix)


def _refuse_param(key: str, known: frozenset[str], findings: Findings) -> None:
    full = f"optimizer.params.{key}"
    if key == "max_grad_norm":
        findings.refuse(full, "is refused by DeepSpeed", "write gradient_clipping at top level")
        return
    guess = nearest(key, [*known, *_PARAMS, "betas", "torch_adam", "adam_w_mode"])
    findings.refuse(
        full,
        "is no parameter of the AdamW that runs here, and building it fails",
        f"did you mean '{guess}'?" if guess else "delete it",
    )


def schedule_options(config: dict[str, Any], autos: list[str], findings: Findings) -> dict[str, Any]:
    """The options that the scheduler block means; llmtop runs the schedule itself."""
    kind = section(config, "scheduler").get("type")
    if kind is None or kind == AUTO:
        return {}
    if kind not in _SCHEDULES:
        _report_schedule(kind, findings)
        return {}
    params = section(config, "scheduler").get("params")
    if not isinstance(params, dict):
        findings.refuse(
            "scheduler.params", "is missing, and DeepSpeed cannot build a schedule without", "write {}"
        )
        return {}
    options: dict[str, Any] = {"lr_schedule": _SCHEDULES[kind]}
    for key, value in params.items():
        full = f"scheduler.params.{key}"
        if key not in SCHEDULERS[kind]:
            guess = nearest(key, SCHEDULERS[kind])
            findings.refuse(
                full,
                f"is no parameter of {kind}, and building it fails",
                f"did you mean '{guess}'?" if guess else "delete it",
            )
        elif key == "warmup_max_lr":
            _warmup_peak(config, value, options, autos, findings)
        elif key in ("warmup_num_steps", "total_num_steps"):
            count = _read(full, _COUNT, value, autos, findings)
            if count is not None:
                options["warmup_steps" if key == "warmup_num_steps" else "steps"] = count
        elif value == AUTO:
            autos.append(full)
        else:
            _report_fixed(full, key, value, findings)
    return options


def _warmup_peak(
    config: dict[str, Any], value: Any, options: dict[str, Any], autos: list[str], findings: Findings
) -> None:
    """The schedule's own peak is what trains: DeepSpeed's schedules overwrite the optimizer's rate."""
    peak = _read("scheduler.params.warmup_max_lr", _RATE, value, autos, findings)
    if peak is None:
        return
    options["learning_rate"] = float(peak)
    rate = section(config, "optimizer", "params").get("lr")
    if isinstance(rate, (int, float)) and rate != peak:
        findings.warn(
            "optimizer.params.lr",
            f"{rate:g} is never used: the schedule sets the rate and rises to {peak:g}",
            "make it equal to scheduler.params.warmup_max_lr",
        )


def _report_fixed(full: str, key: str, value: Any, findings: Findings) -> None:
    """Parameters of a schedule for which llmtop has one fixed value."""
    fixed = {"warmup_min_lr": 0, "warmup_min_ratio": 0, "last_batch_iteration": -1, "warmup_type": "linear"}
    if key in fixed and value != fixed[key]:
        own = "llmtop warms up in a straight line from 0 and starts at step 1"
        findings.warn(full, f"is {written(value)}; {own}")


def _report_schedule(kind: str, findings: Findings) -> None:
    if kind in SCHEDULERS or kind in TORCH_SCHEDULERS:
        findings.warn(
            "scheduler.type",
            f'"{kind}" is a schedule that llmtop does not have; it uses its own lr_schedule',
            "choose --set lr_schedule=constant, linear or cosine",
        )
        return
    guess = nearest(kind, [*SCHEDULERS, *TORCH_SCHEDULERS])
    findings.refuse(
        "scheduler.type",
        f'"{kind}" is no schedule of DeepSpeed or torch',
        f'did you mean "{guess}"?' if guess else 'use "WarmupDecayLR"',
    )


def _read(full: str, form: Key, value: Any, autos: list[str], findings: Findings) -> Any:
    """A parameter's value; None, and said why, when it is open or wrong."""
    if value == AUTO:
        autos.append(full)
        return None
    try:
        read = read_value(form, value)
    except BadValue as error:
        findings.refuse(full, f"{written(value)} {error.why}", error.fix or f"give {form.expected}")
        return None
    if read.note:
        findings.warn(full, f"{written(value)} {read.note}", f"write {written(read.value)}")
    return read.value
