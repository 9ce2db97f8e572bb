"""What ZeRO-3's bucket holds when it is copied together."""

from __future__ import annotations

import pytest

from llmtop.profiler.memory.flatcopy import fills
from llmtop.profiler.memory.sizes import sizes_of
from tests.profiler.test_memory import make


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3"])
def test_the_experts_of_one_block_fill_the_bucket(model: str) -> None:
    """Its 500 million elements, in the last block of all, whether first blocks are dense or none is."""
    found = fills(sizes_of(make(model, zero=3, gpus=8)))
    assert found[0].blocks_done == 0
    assert max(fill.elements for fill in found) > 400_000_000
