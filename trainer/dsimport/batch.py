"""The batch triple: train_batch_size = micro batch x accumulation steps x data-parallel GPUs."""

from __future__ import annotations

from typing import Any

from llmtop.trainer.dsimport.problem import Findings

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
KEYS = (TRAIN, MICRO, STEPS)


def batch_options(
    config: dict[str, Any], autos: list[str], world_size: int | None, findings: Findings
) -> dict[str, Any]:
    """`micro_batch` and `grad_accum` as far as the file and the number of GPUs settle them."""
    train, micro, steps = (config.get(key) for key in KEYS)
    if train is None and micro is None:
        if not any(key in autos for key in KEYS):
            findings.warn(
                TRAIN,
                "is not given, nor the micro batch; DeepSpeed alone refuses such a file",
                "llmtop takes its own micro_batch and grad_accum",
            )
        return {"grad_accum": steps} if steps else {}
    open_keys = [key for key in KEYS if key in autos]
    if train is not None:
        if world_size is None:
            return _without_world(train, micro, steps, open_keys, findings)
        return _with_world(train, micro, steps, open_keys, world_size, findings)
    options = {"micro_batch": micro}
    if steps is not None:
        options["grad_accum"] = steps
    elif STEPS not in autos:
        options["grad_accum"] = 1
    return options


def _with_world(
    train: int, micro: int | None, steps: int | None, open_keys: list[str], world: int, findings: Findings
) -> dict[str, Any]:
    if micro is None and steps is None:
        steps = None if STEPS in open_keys else 1
    if micro is None and steps is None:
        return {}
    if micro is None and steps is not None:
        micro = train // world // steps
    elif steps is None and micro is not None:
        steps = train // micro // world
    assert micro is not None and steps is not None
    if micro < 1 or steps < 1 or micro * steps * world != train:
        findings.refuse(
            TRAIN,
            f"{train} is not micro batch x accumulation steps x GPUs ="
            f" {max(micro, 1)} x {max(steps, 1)} x {world} = {max(micro, 1) * max(steps, 1) * world}",
            f"delete {TRAIN}, or make it a product of the three",
        )
        return {}
    return {"micro_batch": micro, "grad_accum": steps}


def _without_world(
    train: int, micro: int | None, steps: int | None, open_keys: list[str], findings: Findings
) -> dict[str, Any]:
    if micro is None and steps is None and STEPS not in open_keys:
        steps = 1
    options = {}
    if micro is not None:
        options["micro_batch"] = micro
    if steps is not None:
        options["grad_accum"] = steps
    given = (micro or 1) * (steps or 1)
    if train % given:
        findings.refuse(
            TRAIN,
            f"{train} is no multiple of {given}, micro batch x accumulation steps: no number of GPUs fits",
            f"delete {TRAIN}, or make it micro batch x accumulation steps x GPUs",
        )
    elif micro is not None and steps is not None:
        gpus = train // given
        findings.warn(
            TRAIN,
            f"{train} = {micro} x {steps} x {gpus}: the three agree on {gpus} GPU{'s' * (gpus != 1)} only,"
            " and DeepSpeed refuses every other number",
            f"run on {gpus} (--gpus {gpus}), or delete {TRAIN}",
        )
    else:
        missing, option = (MICRO, "--micro-batch") if micro is None else (STEPS, "--grad-accum")
        findings.warn(
            TRAIN,
            f"leaves {missing} to the number of GPUs: {train} / ({given} x GPUs)",
            f"give {option} for your number of GPUs",
        )
    return options
