"""The simulated allocator takes from the driver what torch's took on an H200."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from benchmarks.alloctrace import replay

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results" / "alloctraces"
_ROWS = map(json.loads, (FOLDER / "cells.jsonl").read_text().splitlines())
CELLS = {row["file"]: row["cell"] for row in _ROWS}
TWO_STREAMS = "7ff21a15ef84.npz"
"""ZeRO-1 on two GPUs: the order of events on several streams is not that of the allocator's own."""


@pytest.mark.parametrize("name", sorted(CELLS), ids=lambda name: json.dumps(CELLS[name]))
def test_the_pool_holds_what_torch_held(name: str) -> None:
    with numpy.load(FOLDER / name) as columns:
        found = replay(columns)
    assert found["peak_held_bytes"] > found["peak_allocated_bytes"] > 2**32
    if name == TWO_STREAMS:
        assert found["pool_peak_held_bytes"] == pytest.approx(found["peak_held_bytes"], rel=0.05)
    else:
        assert found["pool_peak_held_bytes"] == found["peak_held_bytes"]
        assert found["pool_held_bytes"] == found["held_bytes"]
