"""What Liger's table says of the families, against Liger itself, and which kernels are found in a model."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from llmtop.presets.liger import KERNELS, LIGER, apply_arguments
from llmtop.profiler.probes.inmodules import liger_kernels_in
from llmtop.trainer.worker.kernels import apply_liger

HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None


@pytest.mark.skipif(not HAS_LIGER, reason="liger-kernel is not installed")
@pytest.mark.parametrize("family", LIGER)
def test_the_table_is_what_the_installed_liger_takes(family: str) -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    parameters = inspect.signature(patches.MODEL_TYPE_TO_APPLY_LIGER_FN[family]).parameters
    known = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name != "model" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    row = LIGER[family]
    taken = [*row.kernels, *row.without_effect]
    assert {row.keyword(kernel) for kernel in taken} == set(known)
    on = {row.keyword(kernel) for kernel in row.default}
    useless = {row.keyword(kernel) for kernel in row.without_effect}
    assert on == {name for name, default in known.items() if default} - useless


@pytest.mark.parametrize(
    "family", [name for name, row in LIGER.items() if "cross_entropy" in row.without_effect]
)
def test_the_loss_that_liger_would_replace_is_not_in_the_code_of_transformers(family: str) -> None:
    folder = family.removesuffix("_text")
    found = importlib.util.find_spec(f"transformers.models.{folder}.modeling_{folder}")
    assert found is not None and found.origin is not None
    assert "CrossEntropyLoss" not in Path(found.origin).read_text()


def test_each_row_names_known_kernels_once() -> None:
    for row in LIGER.values():
        taken = [*row.kernels, *row.without_effect]
        assert len(set(taken)) == len(taken) and set(taken) <= set(KERNELS)
        assert set(row.off_by_default) <= set(KERNELS)
        assert not {"cross_entropy", "fused_linear_cross_entropy"} <= set(row.default)


@pytest.mark.parametrize(
    ("family", "chosen", "given"),
    [
        ("llama", "all", {}),
        (
            "llama",
            "rms_norm,glu",
            {
                "rms_norm": True,
                "rope": False,
                "swiglu": True,
                "cross_entropy": False,
                "fused_linear_cross_entropy": False,
            },
        ),
        (
            "gemma2",
            "glu,cross_entropy",
            {
                "rms_norm": False,
                "rope": False,
                "geglu": True,
                "cross_entropy": True,
                "fused_linear_cross_entropy": False,
            },
        ),
        (
            "nemotron",
            "relu_squared",
            {"relu_squared": True, "cross_entropy": False, "fused_linear_cross_entropy": False},
        ),
    ],
)
def test_the_apply_function_gets_each_switch(
    family: str, chosen: str, given: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, bool]] = []
    patches: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {family: lambda **keywords: seen.append(keywords)}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, patches.__name__, patches)
    apply_liger(family, chosen, torch.device("cuda"))
    assert seen == [given] == [apply_arguments(family, chosen)]


def of_liger(name: str, base: type = torch.nn.Module, module: str = "rms_norm") -> type:
    return type(name, (base,), {"__module__": f"liger_kernel.transformers.{module}"})


def forward_of_liger(qualified_name: str, module: str) -> Any:
    def forward(self: torch.nn.Module) -> None:
        """Never called."""

    forward.__qualname__, forward.__name__ = qualified_name, qualified_name.rpartition(".")[2]
    forward.__module__ = f"liger_kernel.transformers.{module}"
    return forward


class Plain(torch.nn.Module):
    """A block of a model whose code is this module."""


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("LigerRMSNormForOlmo2", "rms_norm"),
        ("LigerLayerNorm", "layer_norm"),
        ("LigerPhi3SwiGLUMLP", "glu"),
        ("LigerQwen3MoeSwiGLUMLP", "glu"),
        ("LigerGEGLUMLP", "glu"),
        ("LigerExperts", "glu"),
        ("LigerBlockSparseTop2MLP", "glu"),
        ("LigerReLUSquared", "relu_squared"),
        ("LigerSomethingNew", "LigerSomethingNew"),
    ],
)
def test_a_class_of_liger_is_found_by_its_word(name: str, word: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), of_liger(name)())
    assert liger_kernels_in(model) == (word,)


def test_a_class_inside_a_function_of_liger_is_known_by_its_base() -> None:
    inner = of_liger("Exaone4Norm", base=of_liger("LigerRMSNorm"))
    assert liger_kernels_in(torch.nn.Sequential(inner())) == ("rms_norm",)


@pytest.mark.parametrize(
    ("qualified_name", "module", "word"),
    [
        ("lce_forward", "model.llama", "fused_linear_cross_entropy"),
        ("causal_forward", "model.gemma3", "fused_linear_cross_entropy"),
        ("LigerRMSNorm.forward", "rms_norm", "rms_norm"),
        ("LigerSwiGLUMLP.forward", "swiglu", "glu"),
        ("novel_forward", "model.new", "novel_forward"),
    ],
)
def test_a_replaced_forward_is_found_by_its_word(qualified_name: str, module: str, word: str) -> None:
    model = Plain()
    vars(model)["forward"] = forward_of_liger(qualified_name, module).__get__(model)
    assert liger_kernels_in(model) == (word,)


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "apply_rotary_emb"])
def test_replaced_functions_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = forward_of_liger("liger_rotary_pos_emb_gpt_oss", "rope")
    monkeypatch.setattr(sys.modules[__name__], name, rotary, raising=False)
    assert liger_kernels_in(Plain()) == ("rope",)
    loss = forward_of_liger("liger_cross_entropy", "functional")
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", loss)
    assert liger_kernels_in(Plain()) == ("rope", "cross_entropy")


def test_the_fused_loss_leaves_the_other_one_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", forward_of_liger("liger_cross_entropy", "functional")
    )
    model = Plain()
    vars(model)["forward"] = forward_of_liger("lce_forward", "model.llama").__get__(model)
    assert liger_kernels_in(model) == ("fused_linear_cross_entropy",)


def test_without_liger_there_is_none() -> None:
    assert liger_kernels_in(torch.nn.Linear(2, 2)) == ()
