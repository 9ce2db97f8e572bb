"""ZeRO++'s second shards (hpZ): each group of ranks, those of a node as a rule, holds all weights once more.

deepspeed 0.19.8 `runtime/zero/partition_parameters.py:_partition_param_sec` makes a share of every weight in
its own precision, where the first shard lies; `stage3.py:invalidate_secondary_tensor` drops those of trained
weights at the end of a step.
"""

from __future__ import annotations

from llmtop.presets.spec import RunSpec
from llmtop.presets.zero import zero_settings
from llmtop.profiler.memory.sizes import Sizes


def group_ranks(sizes: Sizes) -> int:
    """Ranks that share the second shards; 1 where there are none."""
    return min(sizes.zero.hpz_partition_size, sizes.ranks) if sizes.stage == 3 else 1


def second_ranks(spec: RunSpec) -> int:
    """The same from the options alone."""
    options = spec.options
    if options.zero != 3 or not options.deepspeed:
        return 1
    given = zero_settings(options.zero, options.deepspeed, spec.model.hidden_size).hpz_partition_size
    return min(given, spec.world_size)


def trained_bytes(sizes: Sizes) -> int:
    """Of one rank, but between the end of a step and the next forward."""
    ranks = group_ranks(sizes)
    return -(-sizes.trainable // ranks) * sizes.dtype_bytes if ranks > 1 else 0


def frozen_bytes(sizes: Sizes) -> int:
    """Of one rank, always: nothing drops those of frozen weights."""
    ranks = group_ranks(sizes)
    return -(-(sizes.frozen_bytes - sizes.scale_bytes) // ranks) if ranks > 1 and sizes.frozen else 0
