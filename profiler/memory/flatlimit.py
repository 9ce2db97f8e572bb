"""How many elements a bitsandbytes optimizer can step at once, against what ZeRO-1 and -2 flatten for it."""

from __future__ import annotations

from llmtop.presets.errors import UsageError
from llmtop.presets.rules import BITSANDBYTES_OPTIMIZERS
from llmtop.presets.spec import RunSpec
from llmtop.profiler.memory.sizes import sizes_of

MOST_ELEMENTS = 2**31 - 1
"""bitsandbytes 0.50 `csrc/ops.cu` counts a tensor's elements in 32 bits: on an H200 the first step of 3.1,
4.0 and 7.6 billion in one flat tensor ends with "invalid argument", that of 1.7 billion does not."""


def flat_elements(spec: RunSpec) -> int | None:
    """Elements of the flat tensor that the optimizer is given; None where it gets smaller ones.

    ZeRO-1 and -2 flatten all of a rank's share (deepspeed 0.19.8 `zero/stage_1_and_2.py`); stage 3 steps by
    sub-groups, and without ZeRO each weight is a tensor of its own.
    """
    options = spec.options
    if spec.on_cpu or options.zero not in (1, 2) or options.optimizer not in BITSANDBYTES_OPTIMIZERS:
        return None
    return sizes_of(spec).shard


def is_too_long(spec: RunSpec) -> bool:
    elements = flat_elements(spec)
    return elements is not None and elements > MOST_ELEMENTS


def check(spec: RunSpec) -> None:
    """Raise UsageError for a run whose first optimizer step is known to fail."""
    if not is_too_long(spec):
        return
    options, elements = spec.options, flat_elements(spec)
    raise UsageError(
        f"optimizer = {options.optimizer} at ZeRO-{options.zero}: {elements:,} elements in one flat tensor",
        why=f"bitsandbytes counts a tensor's elements in 32 bits, so it can step {MOST_ELEMENTS:,} at most",
        fix="--zero 3 or --zero 0, more GPUs, or --optimizer adamw",
    )
