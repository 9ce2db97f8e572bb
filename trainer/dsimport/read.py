"""Reads a DeepSpeed configuration file and says which run options it means, naming every problem."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from msgspec import Struct

from llmtop.trainer.dsimport.advice import advise, report_blanks, report_idle
from llmtop.trainer.dsimport.batch import KEYS as BATCH_KEYS
from llmtop.trainer.dsimport.batch import batch_options
from llmtop.trainer.dsimport.check import check
from llmtop.trainer.dsimport.conflicts import enabled, refuse_conflicts, section
from llmtop.trainer.dsimport.file import read_config
from llmtop.trainer.dsimport.legacy import rename_old_keys, spell_out_zero, unflatten, unwrap_accelerate
from llmtop.trainer.dsimport.optimizer import optimizer_options, schedule_options
from llmtop.trainer.dsimport.problem import Findings, Problem

SIZED_BY_HIDDEN = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)
"""Keys whose "auto" stays in the raw keys: llmtop fills it from the model, as transformers does."""

_LEFT_OUT: dict[str, str] = {
    "wall_clock_breakdown": "waits for the GPU in every micro-step; llmtop times the phases without",
    "memory_breakdown": "resets the peak that llmtop reads",
    "comms_logger": "waits for the GPU after every collective, even where its enabled is false",
    "flops_profiler": "forces wall_clock_breakdown, which waits for the GPU in every micro-step",
    "autotuning": "starts DeepSpeed's own search in place of a run",
    "dump_state": "prints DeepSpeed's whole state",
    "hybrid_engine": "switches between training and generation, which llmtop does not do",
    "data_efficiency": "samples data of its own, which llmtop does not do",
    "weight_quantization": "is for inference",
}
"""Blocks and switches that llmtop does not pass on, and why."""
_QUIETLY_LEFT_OUT = frozenset({"steps_per_print", "timers", "vocabulary_size", "dataloader_drop_last"})
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
_PARALLEL: dict[str, tuple[str, ...]] = {
    "sequence_parallel_size": (),
    "tensor_parallel": ("autotp_size",),
    "expert_parallel": ("autoep_size",),
}
"""Ways of splitting a model that llmtop does not have, with the key inside that turns each on."""


class Imported(Struct, frozen=True, kw_only=True):
    values: dict[str, Any]
    """Run options by name; `deepspeed` holds what no option stands for."""
    raw: dict[str, Any]
    """The object as the file has it."""
    problems: tuple[Problem, ...]

    @property
    def fatal(self) -> bool:
        return any(problem.fatal for problem in self.problems)


def import_config(path: Path | str, *, world_size: int | None = None) -> Imported:
    """Read a DeepSpeed configuration. Raises UsageError when the file holds no JSON object at all.

    `world_size`, where it is known, settles a batch triple that names only the global batch.
    """
    findings = Findings()
    config = read_config(Path(path), findings)
    values = translate(config, findings, world_size=world_size)
    return Imported(values=values, raw=config, problems=tuple(findings.problems))


def translate(given: dict[str, Any], findings: Findings, *, world_size: int | None = None) -> dict[str, Any]:
    """The options that a configuration means."""
    config, options = unwrap_accelerate(given, findings)
    config = unflatten(config, findings)
    foreign = config is not given
    config = spell_out_zero(config, findings)
    checked = check(config, findings)
    autos = list(checked.autos)
    config = rename_old_keys(checked.config, findings)
    stage = _stage(config, autos, findings)
    refuse_conflicts(config, stage, findings)
    advise(config, stage, autos, findings)
    if stage is not None:
        options["zero"] = stage
    options |= _offload_options(config, stage, autos, findings)
    options |= batch_options(config, autos, world_size, findings)
    if "precision" not in options:
        options |= _precision_options(config, autos, foreign, findings)
    optimizer, raw_optimizer = optimizer_options(config, autos, findings)
    options |= optimizer | schedule_options(config, autos, findings)
    options |= _clipping_options(config, findings)
    raw = _remainder(config, autos, findings)
    if raw_optimizer:
        raw["optimizer"] = raw_optimizer
    report_idle(raw, findings)
    report_blanks(given, findings)
    _report_autos(autos, findings)
    return options | ({"deepspeed": raw} if raw else {})


def _stage(config: dict[str, Any], autos: list[str], findings: Findings) -> int | None:
    """The ZeRO stage; None where the file leaves it open or got it wrong."""
    block = config.get("zero_optimization")
    if block is None:
        if findings.refused("zero_optimization"):
            return None
        findings.warn(
            "zero_optimization",
            "is missing: DeepSpeed then shards nothing (stage 0)",
            'write "zero_optimization": {"stage": 2}',
        )
        return 0
    if "stage" in block:
        return int(block["stage"])
    path = "zero_optimization.stage"
    if path in autos or findings.refused(path):
        return None
    findings.warn(path, "is missing, and DeepSpeed's default is 0: nothing is sharded", "name the stage")
    return 0


def _offload_options(
    config: dict[str, Any], stage: int | None, autos: list[str], findings: Findings
) -> dict[str, Any]:
    """`offload_optimizer`, `offload_param` and `nvme_path` as DeepSpeed carries them out at this stage."""
    options: dict[str, Any] = {}
    for block in ("offload_optimizer", "offload_param"):
        offload = section(config, "zero_optimization", block)
        if "device" not in offload:
            path = f"zero_optimization.{block}.device"
            if offload and path not in autos and not findings.refused(path):
                findings.warn(
                    f"zero_optimization.{block}.device",
                    "is missing: nothing is offloaded",
                    'write "device": "cpu"',
                )
            continue
        device = _effective_device(block, offload["device"], stage, findings)
        options[block] = device
        if device == "nvme" and offload.get("nvme_path"):
            options.setdefault("nvme_path", offload["nvme_path"])
    return options


def _effective_device(block: str, device: str, stage: int | None, findings: Findings) -> str:
    key = f"zero_optimization.{block}"
    if device == "none" or stage is None or stage == 3:
        return device
    if block == "offload_param":
        findings.warn(
            key,
            f"has no effect at stage {stage}: all weights stay whole on every GPU",
            "use stage 3, or delete it",
        )
        return "none"
    if stage == 0:
        findings.warn(
            key, "cannot work at stage 0, which shards nothing", "use stage 1, 2 or 3, or delete it"
        )
        return "none"
    if device == "nvme":
        findings.warn(
            f"{key}.device",
            f'"nvme" is silently taken for "cpu" at stage {stage}: the state fills host memory',
            'use stage 3, or write "cpu"',
        )
        return "cpu"
    return device


def _precision_options(
    config: dict[str, Any], autos: list[str], foreign: bool, findings: Findings
) -> dict[str, Any]:
    if enabled(config, "bf16") or enabled(config, "fp16"):
        return {"precision": "bf16" if enabled(config, "bf16") else "fp16"}
    open_blocks = [
        b for b in ("bf16", "fp16") if f"{b}.enabled" in autos or "bfloat16.enabled" in autos and b == "bf16"
    ]
    if open_blocks == ["fp16"] and "bf16" not in config:
        findings.warn(
            "fp16.enabled",
            'is "auto" and there is no bf16 block: a script run with --bf16 fills in false, and DeepSpeed'
            " trains in fp32",
            'add "bf16": {"enabled": "auto"}',
        )
    if open_blocks or foreign:
        return {}
    whole = any(key in config for key in BATCH_KEYS[:2])
    findings.warn(
        "bf16",
        "and fp16 are both off or missing: DeepSpeed alone trains in fp32, at 16 bytes a parameter"
        + ("" if whole else "; the file is only a part, so llmtop's precision option decides"),
        'write "bf16": {"enabled": true}',
    )
    return {"precision": "fp32"} if whole else {}


def _clipping_options(config: dict[str, Any], findings: Findings) -> dict[str, Any]:
    clipping = config.get("gradient_clipping")
    if clipping is None:
        return {}
    if clipping < 0:
        findings.warn("gradient_clipping", f"of {clipping:g} turns clipping off", "write 0")
    return {"max_grad_norm": float(max(clipping, 0.0))}


def _remainder(config: dict[str, Any], autos: list[str], findings: Findings) -> dict[str, Any]:
    """What no option stands for, to be merged into the generated configuration."""
    raw = copy.deepcopy(config)
    _refuse_parallelism(raw, findings)
    for key, why in _LEFT_OUT.items():
        if _says_something(key, raw.pop(key, None)):
            findings.warn(key, f"is left out: it {why}", "delete it")
    for key in (*BATCH_KEYS, "gradient_clipping", "optimizer", "scheduler", *_QUIETLY_LEFT_OUT):
        raw.pop(key, None)
    for key in _MONITORS:
        if not enabled(raw, key):
            raw.pop(key, None)
    for precision in ("fp16", "bf16"):
        section(raw, precision).pop("enabled", None)
    zero = section(raw, "zero_optimization")
    zero.pop("stage", None)
    _keep_offload_details(zero)
    for path in SIZED_BY_HIDDEN:
        if path in autos:
            raw.setdefault("zero_optimization", {})[path.rpartition(".")[2]] = "auto"
    return {key: value for key, value in raw.items() if value not in ({}, None)}


def _keep_offload_details(zero: dict[str, Any]) -> None:
    """Leave in the offload blocks only what the options do not say, and only where something is offloaded."""
    paths = []
    for block in ("offload_optimizer", "offload_param"):
        offload = zero.get(block)
        if offload is None:
            zero.pop(block, None)
            continue
        device, path = offload.pop("device", "none"), offload.pop("nvme_path", None)
        if device == "nvme" and path:
            paths.append(path)
            if path != paths[0]:
                offload["nvme_path"] = path
        if device == "none" or not offload:
            del zero[block]


def _says_something(key: str, value: Any) -> bool:
    """Whether leaving the key out changes anything; the mere presence of comms_logger does."""
    if isinstance(value, dict):
        return key == "comms_logger" or value.get("enabled") is True
    return value is True


def _refuse_parallelism(raw: dict[str, Any], findings: Findings) -> None:
    for key, inner in _PARALLEL.items():
        value = raw.pop(key, None)
        ranks = section({key: value}, key).get(inner[0]) if inner else value
        full = ".".join((key, *inner))
        if isinstance(ranks, int) and ranks > 1:
            findings.refuse(
                full,
                f"of {ranks} splits the model in a way that llmtop does not run: it shards by ZeRO only",
                "delete it, or train with a program of your own",
            )


def _report_autos(autos: list[str], findings: Findings) -> None:
    if autos:
        be, it = ("is", "it") if len(autos) == 1 else ("are", "them")
        findings.warn(
            ", ".join(dict.fromkeys(autos)),
            f'{be} "auto", a word of transformers: llmtop fills {it} in, deepspeed.initialize() alone'
            " does not and fails or takes its default",
        )
