"""Every model preset is buildable: the real class has the tensors that the preset is counted with."""

from __future__ import annotations

import pytest

from llmtop.presets import catalog, rules
from tests.presets.real_models import counted_shapes, elements, real_shapes
from tests.presets.test_catalog import MODELS

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_the_real_model_has_the_counted_tensors(name: str) -> None:
    config = catalog.load_model(name).hf_config
    real = real_shapes(config)
    assert elements(real) == MODELS[name]
    assert counted_shapes(config, name) == real


def test_attention_that_a_family_lacks_is_what_its_class_says() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from llmtop.presets.hf.canonical import FAMILIES

    no_sdpa, no_flash = set(), set()
    for family in FAMILIES:
        built = MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[family]]
        if not built._supports_sdpa:
            no_sdpa.add(family)
        if not built._supports_flash_attn:
            no_flash.add(family)
    assert no_sdpa == rules.NO_SDPA
    assert no_flash == rules.NO_FLASH_ATTENTION
