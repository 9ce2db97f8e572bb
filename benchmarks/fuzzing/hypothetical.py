"""The same targets with Hypothesis at the dice, which tries what is small or odd first."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.fuzzing.making import Maker
from benchmarks.fuzzing.running import Tally
from benchmarks.fuzzing.target import Target, prepared


def run_part(
    target: Target, first: int, count: int, place: Path, note: Callable[[int], None]
) -> dict[str, Any]:
    prepared(target, place)
    tally = Tally()
    number = [first - 1]

    @seed(first)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def each(draw: random.Random) -> None:
        number[0] += 1
        note(number[0])
        tally.count(target, Maker(draw), place, number[0])

    each()
    return tally.told()
