"""Of how many steps the means of phases are."""

from __future__ import annotations

from llmtop.profiler.fold.rankstate import WARMUP_STEPS, RankState


def told_steps_words(rank: RankState | None) -> str:
    """As `means of 4 of 21 steps after the first 2`; empty where all steps tell their phases, or none."""
    return "" if rank is None else told_words(rank.told_steps, rank.untold_steps)


def told_words(told: int, untold: int) -> str:
    if not told or not untold:
        return ""
    return f"means of {told:,} of {told + untold:,} steps after the first {WARMUP_STEPS}"
