"""Combinations with quantization-aware training that cannot work, or in which it would teach nothing."""

from __future__ import annotations

from llmtop.presets.rule import Rule
from llmtop.presets.spec import RunSpec

CONV1D_FAMILIES = frozenset({"gpt2", "gpt_bigcode"})
"""Families with some or all matrices in a class of their own (transformers `pytorch_utils.py:Conv1D`)."""
OWN_LINEAR_FAMILIES = frozenset({"falcon"})
"""Families whose matrices are of a class derived from `Linear` that does more than multiply."""


def _qat(spec: RunSpec) -> bool:
    return spec.options.qat != "none"


def _widths(spec: RunSpec) -> dict[str, int]:
    """Inputs of the matrices of a block, by what they are inputs of."""
    model = spec.model
    widths = {"hidden_size": model.hidden_size, "the attention's heads": model.num_heads * model.head_dim}
    if model.intermediate_size:
        widths["intermediate_size"] = model.intermediate_size
    return widths


def _uneven(spec: RunSpec) -> list[str]:
    group = spec.options.qat_group
    return [f"{name} = {width}" for name, width in _widths(spec).items() if width % group]


def _even_group(spec: RunSpec) -> int:
    """The largest power of two up to the group that was asked for, and from 8 on, that divides all."""
    sizes = (1 << power for power in range(3, 13))
    fitting = [
        size
        for size in sizes
        if size <= max(8, spec.options.qat_group)
        and all(width % size == 0 for width in _widths(spec).values())
    ]
    return max(fitting, default=0)


def _group_fix(spec: RunSpec) -> str:
    group = _even_group(spec)
    return f"--qat-group {group}" if group else "--qat none: no group of 8 or more divides all of them"


QAT_RULES: tuple[Rule, ...] = (
    Rule(
        name="QAT at stage 3",
        refuses=lambda spec: _qat(spec) and spec.options.zero == 3,
        what="qat = {o.qat} with zero = 3",
        why="each rank keeps two whole copies of every matrix for the backward pass: sharding saves nothing",
        fix="--zero 2",
        source="torchao 0.18 quant_primitives.py:_fake_quantize_affine, seen under saved-tensor hooks",
    ),
    Rule(
        name="QAT of frozen weights",
        refuses=lambda spec: _qat(spec) and spec.options.lora_rank > 0,
        what="qat = {o.qat} with lora_rank = {o.lora_rank}",
        why="it teaches weights to bear being rounded, and those under adapters are not trained; merged with"
        " their adapters they would be rounded anew",
        fix="--lora-rank 0 and --quantization none, or --qat none",
        source="torchao 0.18 quantization/qat: rounding passes its gradient to the weight itself",
    ),
    Rule(
        name="QAT and a mixture of experts",
        refuses=lambda spec: _qat(spec) and spec.model.moe is not None,
        what="qat = {o.qat} with {model.name}, a mixture of experts",
        why="its experts are one tensor, not the linear layers that torchao replaces: most weights would stay"
        " as they are",
        fix="--qat none, or a model without experts",
        source="torchao 0.18 qat/api.py:_qat_config_transform; transformers 5.24: experts as parameters",
    ),
    Rule(
        name="QAT and matrices of another class",
        refuses=lambda spec: _qat(spec) and spec.model.family in CONV1D_FAMILIES | OWN_LINEAR_FAMILIES,
        what="qat = {o.qat} with a {model.family} model",
        why="its matrices are of a class of their own, which torchao does not replace",
        fix="--qat none",
        source="torchao 0.18 qat/api.py:_qat_config_transform",
    ),
    Rule(
        name="QAT group that divides no row",
        refuses=lambda spec: _qat(spec) and bool(_uneven(spec)),
        what="qat_group = {o.qat_group} with {uneven}",
        why="each row of a matrix is cut into groups of equal size",
        fix="{fix}",
        source="torchao 0.18 qat/linear.py:FakeQuantizedLinear",
        words=lambda spec: {"uneven": " and ".join(_uneven(spec)), "fix": _group_fix(spec)},
    ),
    Rule(
        name="QAT group without QAT",
        refuses=lambda spec: not _qat(spec) and spec.options.qat_group != 32,
        what="qat_group = {o.qat_group} with qat = none",
        why="it says how weights are grouped, and none are rounded",
        fix="--qat int4-weight-only, or leave it out",
        source="the options of this program",
    ),
)
