"""Which of its machine's ranks a rank is."""

from __future__ import annotations

from collections.abc import Iterable

from llmtop.presets.spec import RunSpec


def local_index(spec: RunSpec, ranks: Iterable[int], rank: int) -> int:
    """Of `rank` among `ranks`, those of its machine: also the place of its device among those that are used.

    Where nodes have not as many GPUs, that is known only of a machine whose first rank is among them.
    """
    return rank - min(ranks, default=rank) if spec.has_uneven_nodes else rank % spec.options.gpus
