"""The key tables against the installed DeepSpeed."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.rules_optimizer import CPU_PARAMS, FUSED_PARAMS, TORCH_PARAMS
from llmtop.trainer.dsimport import keys
from tests.trainer.real_deepspeed import deepspeed_config_class, refusal_of

MODELS: dict[str, tuple[str, str]] = {
    "zero_optimization": ("runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": (
        "runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "zero_optimization.zenflow": ("runtime.zenflow.zenflow_config", "ZenFlowConfig"),
    "zero_optimization.leaf_module": ("runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
    "fp16": ("runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "compile": ("compile.config", "CompileConfig"),
    "comms_logger": ("comm.config", "CommsLoggerConfig"),
    "tensorboard": ("monitor.config", "TensorBoardConfig"),
    "csv_monitor": ("monitor.config", "CSVConfig"),
    "wandb": ("monitor.config", "WandbConfig"),
    "comet": ("monitor.config", "CometConfig"),
    "timers.throughput": ("utils.config", "DeepSpeedThroughputTimerConfig"),
    "hybrid_engine": ("runtime.config", "HybridEngineConfig"),
    "tensor_parallel": ("runtime.tensor_parallel.config", "TPTrainingConfig"),
    "weight_quantization": ("inference.config", "WeightQuantConfig"),
}
KINDS = {bool: "flag", int: "whole", float: "number", str: "text", list: "texts", Path: "path"}


def model(path: str) -> Any:
    deepspeed_config_class()
    module, name = MODELS[path]
    return getattr(__import__(f"deepspeed.{module}", fromlist=[name]), name)


def test_every_strict_block_is_compared() -> None:
    assert {path for path, block in keys.BLOCKS.items() if block.strict} == set(MODELS)


@pytest.mark.parametrize("path", sorted(MODELS))
def test_strict_blocks_have_deepspeeds_keys(path: str) -> None:
    block, fields = keys.BLOCKS[path], model(path).model_fields
    aliases = {field.alias for field in fields.values() if field.alias}
    spelled = set(block.keys) | {f"stage3_{name}" for name in block.prefixed}
    assert spelled == set(fields) | aliases
    for name, key in block.keys.items():
        if key.kind != "anything":
            compare_key(f"{path}.{name}", key, fields[name])


def compare_key(where: str, key: keys.Key, field: Any) -> None:
    """Kind, whether null is taken, deprecation and bounds."""
    arms = typing.get_args(field.annotation) if is_union(field.annotation) else (field.annotation,)
    kinds = [
        arm for arm in arms if arm is not type(None) and not (where.endswith("_interval") and arm is str)
    ]
    # A validator of its own turns a null leaf_module into an empty one.
    assert (type(None) in arms or where.endswith(".leaf_module")) == key.nullable, where
    plain = typing.get_origin(kinds[0]) or kinds[0]
    if key.kind in KINDS.values() and where != "zero_optimization.stage":
        assert KINDS[plain] == key.kind, where
    extra = field.json_schema_extra or {}
    assert bool(key.replaced_by) == (bool(extra.get("deprecated")) and extra.get("set_new_param", True)), (
        where
    )
    bounds = {
        name: getattr(rule, name)
        for rule in field.metadata
        for name in ("gt", "ge", "lt", "le")
        if hasattr(rule, name)
    }
    if bounds:
        assert bounds == {
            name: value
            for name, value in (("gt", key.above), ("ge", key.low), ("lt", key.below), ("le", key.high))
            if value is not None
        }, where


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


class Recorder(dict[str, Any]):
    """A configuration that notes which keys are asked for."""

    asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def test_top_level_keys_are_those_that_deepspeed_asks_for() -> None:
    Recorder.asked = set()
    refusal = refusal_of(Recorder(train_micro_batch_size_per_gpu=1, zero_optimization=True))
    assert refusal is None
    known = set(keys.BLOCKS[""].keys)
    removed = {key for key in keys.REMOVED if "." not in key}
    assert Recorder.asked - known - removed == {"data_sampling", "data_routing"} & Recorder.asked
    # keys() is asked for the rest: optimizer, scheduler and the blocks with `in param_dict.keys()`.
    assert len(known - Recorder.asked) < 25


def test_removed_keys_are_those_that_deepspeed_refuses() -> None:
    deepspeed_config_class()
    from deepspeed.runtime import config

    top = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    inner = {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    assert set(keys.REMOVED) == top | inner


def test_names_of_optimizers_and_schedules() -> None:
    deepspeed_config_class()
    import inspect

    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from torch.optim import lr_scheduler

    assert {name.lower() for name in keys.OPTIMIZER_NAMES} == set(DEEPSPEED_OPTIMIZERS)
    assert set(keys.SCHEDULERS) == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, params in keys.SCHEDULERS.items():
        signature = list(inspect.signature(getattr(lr_schedules, name).__init__).parameters)
        assert list(params) == signature[2:], name
    assert set(keys.TORCH_SCHEDULERS) == set(lr_scheduler.__all__)


def test_loose_blocks_hold_deepspeeds_keys() -> None:
    deepspeed_config_class()
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    assert set(keys.BLOCKS["activation_checkpointing"].keys) == set(ACT_CHKPT_DEFAULT)
    assert set(keys.BLOCKS["aio"].keys) == set(AIO_DEFAULT_DICT)
    assert set(keys.BLOCKS["flops_profiler"].keys) == set(vars(DeepSpeedFlopsProfilerConfig({})))


def test_switches_of_the_optimizer_are_those_that_some_adam_takes() -> None:
    taken = TORCH_PARAMS | CPU_PARAMS | FUSED_PARAMS
    assert set(keys.BLOCKS["optimizer.params"].keys) == taken | {"torch_adam", "adam_w_mode"}
