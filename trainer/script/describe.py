"""From what was seen inside a script to the spec that prediction and every view read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.presets.resolve import Layer, Machine, assemble
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.record.scriptevents import BatchSeen, FoundModel, RankAttached
from llmtop.trainer.dsimport.problem import Findings
from llmtop.trainer.dsimport.read import translate

CONFIG = "config.json"


def described(
    spec: RunSpec, attached: RankAttached, batch: BatchSeen, machine: Machine, folder: Path
) -> RunSpec:
    """The run as it was seen; its model's configuration is kept under `folder`.

    Raises UsageError where it cannot be predicted: a model without a configuration, an architecture that is
    not known, weights that are not held as any option of llmtop holds them.
    """
    require_known_shape(attached)
    assert attached.hf_config is not None
    folder.mkdir(mode=0o700, exist_ok=True)
    config = folder / CONFIG
    config.write_text(json.dumps(attached.hf_config), encoding="utf-8")
    values: dict[str, Any] = {
        **_of_engine(attached),
        **_of_modules(attached),
        "model": str(config),
        "gpu": spec.gpu.name,
        **_machines(spec, attached),
        "micro_batch": batch.micro_batch,
        "seq_len": batch.seq_len,
        "grad_accum": batch.grad_accum,
    }
    layers = [Layer(ValueSource.MACHINE, "seen in the script's processes", values)]
    # As assembled: a combination that llmtop's own trainer refuses is running before our eyes.
    seen = assemble(layers, name=spec.name, machine=machine)
    assert spec.script is not None
    named = str(attached.hf_config.get("_name_or_path") or attached.hf_config.get("name_or_path") or "")
    shape = replace(seen.model, name=Path(named).name or seen.model.family)
    return replace(seen, model=shape, gpu=spec.gpu, script=replace(spec.script, described=True))


def require_known_shape(attached: RankAttached) -> None:
    """Raise UsageError where model or optimizer are none that llmtop predicts, whatever the batches are."""
    if attached.hf_config is None:
        raise UsageError(
            "its model is not predicted",
            why="it has no Hugging Face configuration, so its shape is not known",
            fix="memory and time are measured all the same",
        )
    _refuse_unlike(attached, attached.found or FoundModel())


def require_tokens(attached: RankAttached) -> None:
    """Raise UsageError for a script that makes steps of batches that nobody could count."""
    require_known_shape(attached)
    raise UsageError(
        "its memory is not predicted",
        why="its batches are no tables of tokens, so their size is not known",
        fix="memory and time are measured all the same",
    )


def _machines(spec: RunSpec, attached: RankAttached) -> dict[str, Any]:
    """Over hosts, as it was launched; on one machine, as many as there are."""
    options = spec.options
    if options.nodes == 1:
        return {"gpus": attached.world_size}
    uneven = {} if options.total_gpus is None else {"total_gpus": options.total_gpus}
    return {"gpus": options.gpus, "nodes": options.nodes, **uneven}


def _of_engine(attached: RankAttached) -> dict[str, Any]:
    """The options that a DeepSpeed configuration means, its batch aside: that was seen."""
    if attached.deepspeed is None:
        return {"zero": 0}
    # What is wrong with the file is not ours to refuse: the engine has taken it.
    return translate(attached.deepspeed, Findings(), world_size=attached.world_size)


def _of_modules(attached: RankAttached) -> dict[str, Any]:
    """What was seen of model and optimizer, which wins over what a configuration says."""
    found = attached.found or FoundModel()
    values: dict[str, Any] = {
        "gradient_checkpointing": found.gradient_checkpointing,
        "checkpointing_reentrant": found.checkpointing_reentrant,
        "liger": bool(found.liger_kernels),
        "lora_rank": found.lora_rank,
    }
    if found.liger_kernels:
        values["liger_kernels"] = ",".join(found.liger_kernels)
    if found.lora_rank:
        values["lora_targets"] = found.lora_targets
    for key in ("precision", "attention", "optimizer", "quantization"):
        value = getattr(found, key)
        if value is not None:
            values[key] = value
    return values


def _refuse_unlike(attached: RankAttached, found: FoundModel) -> None:
    """Plain torch keeps weights in ways that no ZeRO stage does."""
    if attached.framework == "torch" and found.precision not in (None, "fp32"):
        raise UsageError(
            "its memory is not predicted",
            why=f"plain torch trains it in {found.precision} without DeepSpeed's fp32 copies of the weights",
            fix="memory and time are measured all the same",
        )
    if found.optimizer is None:
        raise UsageError(
            "its memory is not predicted",
            why="its optimizer is none that llmtop knows",
            fix="memory and time are measured all the same",
        )
