"""Predicted against actual: columns stand apart, whatever is in them."""

from __future__ import annotations

import pytest

from llmtop.profiler.breakdown import Breakdown, BreakdownRow
from llmtop.profiler.memory.result import Component
from llmtop.tui.panels.components import component_row


@pytest.mark.parametrize("label_cells", [11, 20])
@pytest.mark.parametrize("below_bytes", [-3_565_158, -1023 * 2**20, -80 * 2**30])
def test_what_is_below_zero_stands_apart(label_cells: int, below_bytes: int) -> None:
    row = BreakdownRow(component=Component.UNEXPLAINED, predicted_bytes=None, actual_bytes=below_bytes)
    told = component_row(row, Breakdown(rows=(row,), predicted_peak_bytes=1), label_cells).plain.split()
    assert told[:3] == ["?", "unexplained", "n/a"] and told[3].startswith("-")
