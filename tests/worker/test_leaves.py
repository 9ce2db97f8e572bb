"""Leaf modules of ZeRO-3 that DeepSpeed cannot serve are told by name, instead of as an error of autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_module

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.trainer.worker.build import build_model
from llmtop.trainer.worker.leaves import check_leaves, has_leaves
from tests.worker.launching import tiny_spec


def model(hf_config: dict[str, Any] | None = None) -> Any:
    return build_model(tiny_spec(hf_config), {}, torch.device("cpu"))


def ids() -> torch.Tensor:
    return torch.zeros((1, 4), dtype=torch.int64)


@pytest.mark.parametrize("whole", ["", "model"])
def test_a_whole_model_is_no_leaf(whole: str) -> None:
    built = model()
    set_z3_leaf_module(built.get_submodule(whole), True)
    with pytest.raises(UsageError, match="the whole Llama"):
        check_leaves(built)


def test_a_leaf_that_is_called_by_keyword_is_told_as_it_is_called() -> None:
    built = model()
    set_z3_leaf_module(built.model.layers[1].self_attn, True)
    check_leaves(built)
    with pytest.raises(UsageError, match=r"model\.layers\.1\.self_attn, a LlamaAttention"):
        built(input_ids=ids())


def test_blocks_can_be_leaves() -> None:
    built = model()
    set_z3_leaf_module(built.model.layers[0], True)
    check_leaves(built)
    for _ in range(2):
        built(input_ids=ids(), labels=ids()).loss.backward()


@pytest.mark.parametrize(
    ("block", "has"),
    [
        ({"stage": 3, "leaf_module": {"classes": ["A"]}}, True),
        ({"stage": 3, "stage3_module_granularity_threshold": 1}, True),
        ({"stage": 2, "leaf_module": {"classes": ["A"]}}, False),
        ({"stage": 3, "leaf_module": {"classes": []}, "stage3_module_granularity_threshold": 0}, False),
        ({"stage": 3, "leaf_module": None}, False),
    ],
)
def test_leaves_are_of_stage_3(block: dict[str, Any], has: bool) -> None:
    assert has_leaves({"zero_optimization": block}) == has


@pytest.mark.parametrize("keys", [{"hidden_act": "odd"}, {"rope_parameters": {"rope_type": "odd"}}])
def test_a_word_of_a_configuration_that_is_unknown_is_told(keys: dict[str, Any]) -> None:
    with pytest.raises(LlmtopError, match="names 'odd'"):
        model(keys)


def test_a_key_that_no_configuration_names_is_a_mistake_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("inner")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", broken)
    with pytest.raises(KeyError, match="inner"):
        model()


def test_the_precision_is_the_runs() -> None:
    assert model({"dtype": "float7", "torch_dtype": "float7"}).dtype == torch.float32
