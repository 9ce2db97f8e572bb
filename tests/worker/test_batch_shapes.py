"""The shape of what a forward pass is given, from one pass to the next."""

from __future__ import annotations

import torch

from llmtop.profiler.probes.script.shapes import BatchShape, BatchShapes


def ids(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64)


def test_passes_of_one_shape_have_the_very_same_answer() -> None:
    shapes = BatchShapes()
    first = shapes.of((), {"input_ids": ids(2, 8)})
    assert first == BatchShape(sequences=2, length=8)
    assert shapes.of((), {"input_ids": ids(2, 8)}) is first
    assert shapes.of((), {"input_ids": ids(2, 9)}) == BatchShape(sequences=2, length=9)
    assert shapes.of((), {"input_ids": ids(2, 8)}) == first


def test_what_is_not_named_as_tokens_is_looked_at_each_time() -> None:
    shapes = BatchShapes()
    assert shapes.of((), {"input_ids": ids(16), "labels": ids(2, 8)}) == BatchShape(sequences=2, length=8)
    assert shapes.of((), {"input_ids": ids(16), "labels": ids(4, 4)}) == BatchShape(sequences=4, length=4)
    assert shapes.of((ids(3, 5),), {}) == BatchShape(sequences=3, length=5)
    assert shapes.of(({"input_ids": ids(1, 7)},), {}) == BatchShape(sequences=1, length=7)
    assert shapes.of((), {}) is None
