"""LoRA targets: the names are those of the real modules, and what the model lacks is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from llmtop.presets.errors import UsageError
from llmtop.presets.hf.config import read_shape
from llmtop.presets.resolve import Layer, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.memory.lora import MODULE_NAMES, _paths, linear, module_name
from llmtop.profiler.memory.predict import predict, predict_with_suggestions
from llmtop.profiler.memory.result import Prediction
from tests.h200 import MACHINE


def spec(**values: Any) -> RunSpec:
    layer = Layer(ValueSource.COMMAND_LINE, "test", {"lora_rank": 8, "model": "llama-3.2-1b"} | values)
    return resolve([layer], name="test", machine=MACHINE)


def prediction(**values: Any) -> Prediction:
    return predict(spec(**values))


def real_names(family: str, **keys: Any) -> tuple[Any, set[str]]:
    """A configuration of the family and the whole names of its linear modules, without the head's."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    config = transformers.CONFIG_MAPPING[family](**keys)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    return config, {
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    }


@pytest.mark.parametrize("family", ["llama", *MODULE_NAMES])
def test_matrices_are_called_as_in_the_models_code(family: str) -> None:
    config, names = real_names(family)
    real = {name.rpartition(".")[2] for name in names}
    shape = read_shape(config.to_dict(), family, family)
    assert {module_name(shape, group) for group in linear(shape)} == real


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "qwen2_moe", "deepseek_v3", *MODULE_NAMES])
def test_whole_names_are_those_of_the_models_code(family: str) -> None:
    config, names = real_names(family)
    routers = {name for name in names if name.endswith(("shared_expert_gate", "router"))}
    assert set(_paths(read_shape(config.to_dict(), family, family))) == names - routers


def test_a_whole_name_chooses_one_matrix() -> None:
    two = "model.layers.0.self_attn.q_proj,model.layers.15.self_attn.q_proj"
    one_layer = (2048 + 2048) * 8
    assert prediction(lora_targets=two).trainable_params == 2 * one_layer
    everywhere = ",".join(f"model.layers.{layer}.self_attn.q_proj" for layer in range(16))
    assert prediction(lora_targets=everywhere).moments == prediction(lora_targets="q_proj").moments
    both = prediction(lora_targets=f"{two},q_proj")
    assert both.trainable_params == 16 * one_layer
    told = "adapters sit in some layers only"
    assert any(line.startswith(told) for line in prediction(lora_targets=two).assumptions)
    assert not any(line.startswith(told) for line in both.assumptions)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora_targets": "nosuch"}, ("'nosuch'", "q_proj", "all-linear")),
        ({"lora_targets": "q_proj,k_prj"}, ("'k_prj'", "did you mean 'k_proj'")),
        ({"lora_targets": "atention"}, ("did you mean 'attention'",)),
        ({"lora_targets": ","}, ("no such matrix", "down_proj")),
        ({"lora_targets": "q_proj", "model": "gpt2"}, ("'q_proj'", "c_attn")),
        (
            {"lora_targets": "model.layers.16.self_attn.q_proj"},
            ("no matrix 'model.layers.16", "did you mean"),
        ),
        ({"lora_targets": "model.layers.0.mlp.q_proj"}, ("no matrix 'model.layers.0.mlp.q_proj'", "did you")),
        ({"lora_targets": "mlp", "model": "mixtral-8x7b"}, ("no such matrix", "o_proj")),
    ],
)
def test_what_the_model_lacks_is_refused(values: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as told:
        prediction(**values)
    for word in words:
        assert word in str(told.value)


def test_targets_are_not_looked_at_without_lora() -> None:
    run = spec(model="llama-3.1-70b", lora_rank=0, lora_targets="nosuch")
    assert all("lora_rank" not in one.change for one in predict_with_suggestions(run).suggestions)


@pytest.mark.parametrize("model", ["gpt2", "pythia-1b", "llama-3.2-1b"])
def test_all_names_together_are_all_linear(model: str) -> None:
    names = {"gpt2": "c_attn,c_proj,c_fc", "pythia-1b": "query_key_value,dense,dense_h_to_4h,dense_4h_to_h"}
    every = names.get(model, "q_proj,k_proj, v_proj,o_proj,gate_proj,up_proj,down_proj")
    assert prediction(model=model, lora_targets=every) == prediction(model=model)
