"""Every family row against the real modelling code, built on the meta device."""

from __future__ import annotations

import pytest

from llmtop.presets.hf import canonical as hf_canonical
from tests.presets.family_cases import CASES
from tests.presets.real_models import counted_shapes, elements, real_shapes

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("name", CASES)
def test_tensors_match_the_real_modules(name: str) -> None:
    config = CASES[name]
    real = real_shapes(hf_canonical.canonical(config, name))
    counted = counted_shapes(config, name)
    assert elements(counted) == elements(real)
    if name != "stablelm parallel, head norms":  # one small norm for each head there, one table here
        assert counted == real


def test_every_family_has_a_case() -> None:
    assert {config["model_type"] for config in CASES.values()} == set(hf_canonical.FAMILIES)
