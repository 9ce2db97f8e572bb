"""Which of its machine's ranks a rank is."""

from __future__ import annotations

from llmtop.presets.spec import RunSpec


def local_index(spec: RunSpec, here: range, rank: int) -> int | None:
    """Of `rank` among all of its machine: also the place of its device among those that are used.

    `here` are the ranks that are looked at. Where nodes have not as many GPUs nobody knows it of a single
    one, which may have been opened by itself: None.
    """
    if not spec.has_uneven_nodes:
        return rank % spec.options.gpus
    return rank - here.start if len(here) > 1 or rank == 0 else None
