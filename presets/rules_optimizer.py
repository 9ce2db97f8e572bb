"""Raw keys of the optimizer block that fail where DeepSpeed builds it, or that change which one it is."""

from __future__ import annotations

from typing import Any

from llmtop.presets.rule import Rule
from llmtop.presets.rules_deepspeed import raw
from llmtop.presets.spec import RunSpec
from llmtop.presets.truth import is_false, is_true, truth

TORCH_PARAMS = frozenset({"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"})
CPU_PARAMS = frozenset({"bias_correction", "amsgrad", "fp32_optimizer_states"})
FUSED_PARAMS = frozenset({"bias_correction", "set_grad_none"})
"""What torch's AdamW, DeepSpeed's CPU Adam and its fused Adam take, beyond what all of them do."""
_ALL_PARAMS = frozenset({"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode"})
_FROM_DEEPSPEED = ("adamw", "adamw_torch")
"""Optimizers that DeepSpeed builds from its configuration."""


def _params(spec: RunSpec) -> dict[str, Any]:
    given = raw(spec, "optimizer.params")
    return given if isinstance(given, dict) else {}


def _is_torch(spec: RunSpec) -> bool:
    given = truth(_params(spec).get("torch_adam"))
    return spec.options.optimizer == "adamw_torch" or spec.on_cpu if given is None else given


def _known(spec: RunSpec) -> frozenset[str]:
    if _is_torch(spec):
        return TORCH_PARAMS
    return FUSED_PARAMS if spec.options.offload_optimizer == "none" else CPU_PARAMS


def _unknown(spec: RunSpec) -> list[str]:
    if spec.options.optimizer not in _FROM_DEEPSPEED:
        return []
    known = _known(spec) | _ALL_PARAMS
    return sorted(key for key, value in _params(spec).items() if key not in known and value != "auto")


def _16_bit_masters(spec: RunSpec) -> bool:
    """Whether masters and gradients of 16 bits are asked for that live in host memory."""
    asked = any(is_true(raw(spec, f"{block}.{block}_master_weights_and_grads")) for block in ("fp16", "bf16"))
    return asked and spec.options.offload_optimizer != "none" and spec.options.zero > 0


OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        name="16-bit masters need DeepSpeed's Adam",
        refuses=lambda spec: (
            _16_bit_masters(spec) and spec.options.optimizer in _FROM_DEEPSPEED and _is_torch(spec)
        ),
        what="master_weights_and_grads of 16 bits with torch's AdamW",
        why="only DeepSpeed's CPU Adam steps them (on the CPU kind torch's is used)",
        fix="--optimizer adamw on a GPU, or leave the key out",
        source="deepspeed 0.19.8 runtime/base_optimizer.py:_configure_master_weights",
    ),
    Rule(
        name="optimizer that DeepSpeed has not tested",
        refuses=lambda spec: (
            spec.options.zero > 0
            and spec.options.optimizer not in _FROM_DEEPSPEED
            and is_false(raw(spec, "zero_allow_untested_optimizer"))
        ),
        what="deepspeed.zero_allow_untested_optimizer is false with optimizer = {o.optimizer}",
        why="DeepSpeed then takes its own and torch's Adam alone, and building the engine fails",
        fix="leave it out, or --optimizer adamw",
        source="deepspeed 0.19.8 runtime/engine.py:_do_optimizer_sanity_check",
    ),
    Rule(
        name="optimizer block beside another optimizer",
        refuses=lambda spec: bool(raw(spec, "optimizer")) and spec.options.optimizer not in _FROM_DEEPSPEED,
        what="deepspeed.optimizer with optimizer = {o.optimizer}",
        why="DeepSpeed would build the one that its own block names, and {o.optimizer} would not be used",
        fix="leave deepspeed.optimizer out, or --optimizer adamw",
        source="deepspeed 0.19.8 runtime/engine.py:_configure_optimizer",
    ),
    Rule(
        name="torch's AdamW by raw key",
        refuses=lambda spec: (
            not spec.on_cpu
            and spec.options.optimizer in _FROM_DEEPSPEED
            and _is_torch(spec) != (spec.options.optimizer == "adamw_torch")
        ),
        what="deepspeed.optimizer.params.torch_adam with optimizer = {o.optimizer}",
        why="it chooses between DeepSpeed's Adam and torch's, which is what the option does",
        fix="leave it out: --optimizer adamw is DeepSpeed's, --optimizer adamw_torch is torch's",
        source="deepspeed 0.19.8 runtime/engine.py:get_optimizer_configuration",
    ),
    Rule(
        name="parameter that the optimizer does not take",
        refuses=lambda spec: bool(_unknown(spec)),
        what="deepspeed.optimizer.params.{key} with optimizer = {o.optimizer}",
        why="building it fails: it takes {known}, and what the options say",
        fix="leave it out",
        source="deepspeed 0.19.8 runtime/engine.py:_configure_basic_optimizer; torch 2.13 optim/adamw.py",
        words=lambda spec: {"key": _unknown(spec)[0], "known": ", ".join(sorted(_known(spec)))},
    ),
)
