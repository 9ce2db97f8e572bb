"""LoRA targets: the names are those of the real modules, and what the model lacks is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from llmtop.presets.errors import UsageError
from llmtop.presets.hf.config import read_shape
from llmtop.presets.resolve import Layer, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.memory.lora import MODULE_NAMES, linear, module_name
from llmtop.profiler.memory.predict import predict, predict_with_suggestions
from llmtop.profiler.memory.result import Prediction
from tests.h200 import MACHINE


def spec(**values: Any) -> RunSpec:
    layer = Layer(ValueSource.COMMAND_LINE, "test", {"lora_rank": 8, "model": "llama-3.2-1b"} | values)
    return resolve([layer], name="test", machine=MACHINE)


def prediction(**values: Any) -> Prediction:
    return predict(spec(**values))


@pytest.mark.parametrize("family", ["llama", *MODULE_NAMES])
def test_matrices_are_called_as_in_the_models_code(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    config = transformers.CONFIG_MAPPING[family]()
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    real = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    }
    shape = read_shape(config.to_dict(), family, family)
    assert {module_name(shape, group) for group in linear(shape)} == real


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora_targets": "nosuch"}, ("'nosuch'", "q_proj", "all-linear")),
        ({"lora_targets": "q_proj,k_prj"}, ("'k_prj'", "did you mean 'k_proj'")),
        ({"lora_targets": "atention"}, ("did you mean 'attention'",)),
        ({"lora_targets": ","}, ("no such matrix", "down_proj")),
        ({"lora_targets": "q_proj", "model": "gpt2"}, ("'q_proj'", "c_attn")),
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
