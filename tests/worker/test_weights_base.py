"""The base under adapters is known again by samples of it, packed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from llmtop.presets.errors import LlmtopError
from llmtop.presets.spec import RunSpec
from llmtop.trainer.statefile import Source, StateIndex, StoredParameter
from llmtop.trainer.worker.build import build_model
from llmtop.trainer.worker.state.names import frozen_check, named_parameters
from llmtop.trainer.worker.weightsout.base import FoundBase, folder_base
from llmtop.trainer.worker.weightsout.model import make_skeleton
from tests.worker.launching import tiny_spec

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""PEFT asks for it."""
WIDE = {"intermediate_size": 512}
"""So that packed weights are large enough for a sample of them to be kept."""
KINDS = ("none", "nf4", "int8")
CHANGED = "model.layers.1.mlp.up_proj.weight"


def spec_of(kind: str, folder: Path) -> RunSpec:
    return tiny_spec(WIDE, quantization=kind, precision="bf16", lora_rank=4, weights_dir=str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    made = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(LlamaConfig(**tiny_spec(WIDE).hf_config)).save_pretrained(made)
    return made


def index_of(model: Any) -> StateIndex:
    """What a checkpoint of a run on this model would tell of it."""
    named = named_parameters(model)
    return StateIndex(
        step=1,
        source=Source(zero=2, world_size=1, engine_optimizer="", optimizer="AdamW"),
        parameters=tuple(
            StoredParameter(
                name=one.name,
                shape=one.shape,
                dtype="BF16",
                trainable=one.parameter.requires_grad,
                saved=one.parameter.requires_grad,
            )
            for one in named
        ),
        left_out="the base",
        frozen_check=frozen_check(named),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_known_again_and_another_is_not(kind: str, folder: Path, tmp_path: Path) -> None:
    spec = spec_of(kind, folder)
    index = index_of(build_model(spec, {}, torch.device("cpu")))
    assert found(spec, index).doubt == ""
    tensors = load_file(folder / "model.safetensors")
    tensors[CHANGED] = tensors[CHANGED].flip(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    other = replace(spec, weights_dir=str(tmp_path))
    with pytest.raises(LlmtopError, match="is not the one that the adapters were trained on"):
        found(other, index)
    # A GPU's kernels may round a number on the border of two codes the other way.
    elsewhere = replace(other, gpu=replace(spec.gpu, kind="cuda"))
    if kind != "none":
        assert "could not be told" in found(elsewhere, index).doubt
    assert "could not be told" in found(other, replace(index, frozen_check="float32:00000000")).doubt


def found(spec: RunSpec, index: StateIndex) -> FoundBase:
    return folder_base(spec, make_skeleton(spec), index, "trained")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_packed_weights_are_read_with_the_values_that_they_stand_for(kind: str, folder: Path) -> None:
    spec = spec_of(kind, folder)
    model: Any = build_model(spec, {}, torch.device("cpu"))
    layer = model.base_model.model.model.layers[1].mlp.up_proj.base_layer
    stands_for = layer(torch.eye(64, dtype=torch.bfloat16)).T.float()
    base = found(spec, index_of(model))
    read = base.tensors[CHANGED].read(torch.float32)
    plain = load_file(folder / "model.safetensors")[CHANGED].float()
    assert float((read - stands_for).abs().max()) < 0.02 * float(plain.abs().max())
    assert float((read - plain).abs().mean()) > 10 * float((read - stands_for).abs().mean())
