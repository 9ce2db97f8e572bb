"""The model of a run: Hugging Face's code for its family, from random weights or a folder of weights."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.spec import RunSpec
from llmtop.trainer.change.standby import touches_cuda
from llmtop.trainer.worker.adapters import add_lora
from llmtop.trainer.worker.exact import exact_arange
from llmtop.trainer.worker.kernels import apply_liger, enable_checkpointing
from llmtop.trainer.worker.leaves import has_leaves
from llmtop.trainer.worker.qat import prepare
from llmtop.trainer.worker.quantize import random_quantized
from llmtop.trainer.worker.weights import Report, model_from_stream, model_from_weights, plan_weights

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Keys that say where code or packed weights come from, and the precision; the run says that itself.
_NOT_FOR_BUILDING = (
    *("auto_map", "quantization_config", "_name_or_path", "transformers_version"),
    *("dtype", "torch_dtype"),
)

# What deepspeed.initialize imports inside its functions.
_IMPORTED_BY_ENGINE = ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep")


def model_config(spec: RunSpec) -> Any:
    """The Hugging Face configuration object."""
    from transformers import CONFIG_MAPPING

    keys = {key: value for key, value in spec.hf_config.items() if key not in _NOT_FOR_BUILDING}
    family = keys.get("model_type", spec.model.family)
    if family not in CONFIG_MAPPING:
        raise UsageError(
            f"the installed transformers has no model family '{family}'",
            why=f"the configuration in {spec.model_source} names it",
            fix="use a newer transformers, or a model of a family that it knows",
        )
    config = CONFIG_MAPPING[family].from_dict(keys)
    config.use_cache = False
    return config


def import_model_code(spec: RunSpec, *, off_device: bool = False) -> None:
    """Load the family's modelling code and what building and stepping import lazily.

    Done before the baseline is measured: these libraries are the runtime's memory, not the model's.
    `off_device` leaves out what would take device memory, but not the question whether it is installed.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = type(model_config(spec))
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"model family '{spec.model.family}' has no causal language model in the installed transformers"
        )
    _ = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    for name in _needed_packages(spec):
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise LlmtopError(
                f"this run needs the package '{name}', which is not installed",
                fix="install the extras `train` and `kernels` in the environment of the training",
            )
        if not (off_device and touches_cuda(name)):
            importlib.import_module(name)
    for name in _IMPORTED_BY_ENGINE:
        importlib.import_module(name)


def build_model(
    spec: RunSpec, deepspeed_config: dict[str, Any], device: torch.device, report: Report = lambda event: None
) -> torch.nn.Module:
    """The model with kernels, adapters and checkpointing as the options ask, ready for the engine.

    `report` hears how far the reading of weights is.
    """
    options = spec.options
    dtype = DTYPES[options.precision]
    torch.manual_seed(options.seed)
    if options.liger:
        apply_liger(spec.model.family, options.liger_kernels, device)
    config = model_config(spec)
    make = partial(_random, config, spec, dtype)
    # Before transformers knows of stage 3: what is wrong with the folder is told before anything is built.
    plan = plan_weights(spec, make, dtype) if spec.weights_dir else None
    # Packed weights cannot be made in shards: they are whole on every rank until the engine takes them.
    in_shards = options.zero == 3 and options.quantization == "none"
    stage3 = _zero3(deepspeed_config) if in_shards else None
    with exact_arange() if in_shards else nullcontext():
        if isinstance(plan, str):
            model = model_from_weights(spec, config, dtype, device, plan, report)
        elif plan is not None:
            model = model_from_stream(spec, plan, make, dtype, device, report)
        elif options.quantization != "none":
            model = random_quantized(make, options.quantization, dtype, device)
        else:
            # At stage 3 each layer goes to its shards as it is made; the full model never exists.
            with nullcontext() if in_shards else device:
                model = make()
    # Transformers only knows of stage 3 as long as this object lives.
    model.llmtop_zero3 = stage3
    if options.gradient_checkpointing:
        enable_checkpointing(
            model, reentrant=options.checkpointing_reentrant, every=options.checkpointing_every
        )
    if options.lora_rank > 0:
        if has_leaves(deepspeed_config):
            # A leaf whose input needs no gradient lets go of its weights before its adapters have theirs.
            model.enable_input_require_grads()
        model = add_lora(model, spec)
    if options.qat != "none":
        prepare(model, options.qat, options.qat_group)
    built: torch.nn.Module = model.train()
    return built


def _needed_packages(spec: RunSpec) -> list[str]:
    options = spec.options
    needed = []
    if options.liger:
        needed.append("liger_kernel.transformers")
    if options.lora_rank > 0:
        needed.append("peft")
    if options.quantization != "none" or options.optimizer.endswith(("8bit", "32bit")):
        needed.append("bitsandbytes")
    if options.zero == 3:
        needed.append("accelerate")
    if options.qat != "none":
        needed.append("torchao.quantization.qat")
    return needed


def _zero3(deepspeed_config: dict[str, Any]) -> Any:
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(deepspeed_config)


def _random(config: Any, spec: RunSpec, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=spec.options.attention, dtype=dtype, trust_remote_code=False
        )
    except KeyError as error:
        # Its tables of activations and of rotary positions. Any other key is a mistake of the code.
        if not _stands_in(error.args[0] if error.args else None, config.to_dict()):
            raise
        raise LlmtopError(
            f"the configuration in {spec.model_source} names {error}, which transformers does not have",
            why="the model's code looks it up as it is built",
            fix="use the values from the model's own config.json, or a newer transformers",
        ) from error


def _stands_in(word: object, values: Any) -> bool:
    """Whether a text is one of the values of a configuration, at any depth."""
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return isinstance(word, str) and word == values
    return any(_stands_in(word, value) for value in values)
