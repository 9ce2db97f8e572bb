"""Combinations of Liger's kernels and of checkpointing that cannot work."""

from __future__ import annotations

from llmtop.presets.liger import (
    ALL,
    LIGER,
    SILU,
    family_kernels,
    kernels_on,
    missing_kernels,
    parse_kernels,
    why_missing,
)
from llmtop.presets.rule import Rule
from llmtop.presets.spec import RunSpec

_LOSSES = {"cross_entropy", "fused_linear_cross_entropy"}
GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh")
"""What the families of `geglu` call the one activation that Liger's kernel computes."""


def _unfit_glu(spec: RunSpec) -> bool:
    """Whether Liger's MLP would be another one than the model's: other activation, or no biases."""
    family = LIGER.get(spec.model.family)
    if family is None or "glu" not in kernels_on(spec):
        return False
    known = SILU if family.glu_keyword == "swiglu" else GELU
    return spec.model.activation not in known or spec.model.mlp_bias


def _without_glu(spec: RunSpec) -> str:
    on = kernels_on(spec)
    return ",".join(kernel for kernel in LIGER[spec.model.family].kernels if kernel in on - {"glu"})


def _liger(spec: RunSpec) -> bool:
    return spec.options.liger and spec.model.family in LIGER


KERNEL_CHOICE_RULES: tuple[Rule, ...] = (
    Rule(
        name="liger_kernels without liger",
        refuses=lambda spec: not spec.options.liger and spec.options.liger_kernels != ALL,
        what="liger_kernels = {o.liger_kernels} without liger",
        why="the kernels are Liger's, and Liger is off",
        fix="--liger, or --liger-kernels all",
        source="the options of this program",
    ),
    Rule(
        name="kernel that the family does not have",
        refuses=lambda spec: _liger(spec) and bool(missing_kernels(spec)),
        what="liger_kernels = {o.liger_kernels} with a {model.family} model: no {missing}",
        why="{reason}",
        fix="--liger-kernels all, or some of {known}",
        source="liger-kernel 0.8.5 transformers/monkey_patch.py, with transformers 5.24",
        words=lambda spec: {
            "missing": ", ".join(missing_kernels(spec)),
            "reason": why_missing(spec),
            "known": family_kernels(spec),
        },
    ),
    Rule(
        name="two cross-entropies",
        refuses=lambda spec: _liger(spec) and set(parse_kernels(spec.options.liger_kernels) or ()) >= _LOSSES,
        what="liger_kernels = {o.liger_kernels}",
        why="cross_entropy and fused_linear_cross_entropy each replace the loss, and Liger takes one of them",
        fix="--liger-kernels with only one; fused_linear_cross_entropy makes no logits",
        source="liger-kernel 0.8.5 transformers/monkey_patch.py: an assertion in each apply function",
    ),
    Rule(
        name="liger's MLP is another one",
        refuses=_unfit_glu,
        what="liger kernel glu with {model.name}: activation {model.activation}{biases}",
        why="Liger's MLP computes {known}, and has no biases",
        fix="--liger-kernels {without}",
        source="liger-kernel 0.8.5 transformers/swiglu.py and geglu.py",
        words=lambda spec: {
            "biases": ", with biases" if spec.model.mlp_bias else "",
            "known": "SiLU" if LIGER[spec.model.family].glu_keyword == "swiglu" else "GELU by tanh",
            "without": _without_glu(spec),
        },
    ),
    Rule(
        name="checkpointing_every without checkpointing",
        refuses=lambda spec: spec.options.checkpointing_every > 1 and not spec.options.gradient_checkpointing,
        what="checkpointing_every = {o.checkpointing_every} without gradient_checkpointing",
        why="it says which layers are recomputed, and none is",
        fix="--gradient-checkpointing, or --checkpointing-every 1",
        source="the options of this program",
    ),
    Rule(
        name="checkpointing_every beyond the layers",
        refuses=lambda spec: (
            spec.options.gradient_checkpointing and spec.options.checkpointing_every > spec.model.num_layers
        ),
        what="checkpointing_every = {o.checkpointing_every} with {model.name} of {model.num_layers} layers",
        why="only the first layer would be recomputed, as with any number of {model.num_layers} or more",
        fix="--checkpointing-every {model.num_layers} or fewer, or --no-gradient-checkpointing",
        source="transformers 5.24 modeling_utils.py:_set_gradient_checkpointing",
    ),
)
