"""Every family row against the real modelling code, built on the meta device."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from family_cases import CASES

from llmtop.presets import hf_canonical, hf_config
from llmtop.profiler import shape as arithmetic

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Some configurations warn about token ids of the published tokenizers."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def real_shapes(config: dict[str, Any]) -> Counter[tuple[int, ...]]:
    """How many trainable tensors of each shape the real model has, dimensions in ascending order.

    Ascending, because GPT-2's Conv1D and some experts store the same matrix transposed.
    """
    plain = dict(config)
    built = transformers.AutoConfig.for_model(plain.pop("model_type"), **plain)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    return Counter(tuple(sorted(parameter.shape)) for parameter in model.parameters())


def counted_shapes(config: dict[str, Any], name: str) -> Counter[tuple[int, ...]]:
    counted: Counter[tuple[int, ...]] = Counter()
    for group in arithmetic.tensors(hf_config.read_shape(config, name, name)):
        counted[tuple(sorted(group.shape))] += group.count
    return counted


def elements(shapes: Counter[tuple[int, ...]]) -> int:
    total = 0
    for shape, count in shapes.items():
        numel = count
        for dimension in shape:
            numel *= dimension
        total += numel
    return total


@pytest.mark.parametrize("name", CASES)
def test_tensors_match_the_real_modules(name: str) -> None:
    config = CASES[name]
    real = real_shapes(hf_canonical.canonical(config, name))
    counted = counted_shapes(config, name)
    assert elements(counted) == elements(real)
    if name != "stablelm parallel, head norms":  # kept as one small norm per head there, one table here
        assert counted == real


def test_every_family_has_a_case() -> None:
    assert {config["model_type"] for config in CASES.values()} == set(hf_canonical.FAMILIES)
