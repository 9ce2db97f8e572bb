"""Random weights in 4 and 8 bits: which matrices are packed, and in which type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtop.presets.hf.config import read_shape
from llmtop.presets.spec import Quantization
from llmtop.profiler.memory.result import Component
from llmtop.profiler.memory.sizes import scale_bytes
from llmtop.profiler.probes.classify import classify
from llmtop.trainer.worker.quantize import quantization_config, random_quantized
from tests.worker.launching import tiny_spec

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 96, "n_positions": 32},
}


def build(family: str, kind: Quantization, dtype: torch.dtype) -> Any:
    config = AutoConfig.for_model(family, **CONFIGS[family])
    return random_quantized(
        lambda: AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype),
        kind,
        dtype,
        CPU,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_matrix_of_a_block_is_packed_in_the_models_own_type(family: str, dtype: torch.dtype) -> None:
    """DeepSpeed's flat buffers hold one type: at stage 3 a packed weight of another would break them."""
    import bitsandbytes as bnb

    model = build(family, "nf4", dtype)
    packed = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(packed) == 2 * (4 if family == "gpt2" else 7)
    assert {module.weight.dtype for module in packed} == {dtype}
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    # Packed, the bits of a weight are no number: nothing may have drawn them anew.
    down = packed[-1]
    whole = bnb.functional.dequantize_4bit(down.weight.data, down.weight.quant_state).float()
    assert whole.std() == pytest.approx(model.config.initializer_range, rel=0.05)
    logits = model(input_ids=torch.arange(8).view(1, 8)).logits
    assert logits.dtype == dtype and torch.isfinite(logits).all()
    loaded = quantization_config(tiny_spec(quantization="nf4", lora_rank=2), dtype)
    assert loaded.bnb_4bit_quant_storage == dtype


def test_8_bit_weights_of_gpt2_are_bytes() -> None:
    model = build("gpt2", "int8", torch.bfloat16)
    assert model.transformer.h[0].attn.c_attn.weight.dtype == torch.int8
    assert model.transformer.h[0].attn.c_attn.weight.shape == (192, 64)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", CONFIGS)
def test_scales_are_counted_to_the_byte(family: str, kind: Quantization) -> None:
    """By what bitsandbytes keeps beside the packed weights, before and after the first forward pass."""
    model = build(family, kind, torch.bfloat16)
    expected = scale_bytes(read_shape({"model_type": family, **CONFIGS[family]}, family, "this test"), kind)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    whole += sum(buffer.nbytes for buffer in model.buffers())
    engine = SimpleNamespace(module=model, optimizer=None)
    for _ in range(2):
        found = classify(engine, on_cpu=True).device[Component.PARAMETERS]
        assert found - whole == expected
        model(input_ids=torch.arange(8).view(1, 8))


def test_a_router_that_is_more_than_a_matrix_stays_as_it_is() -> None:
    keys = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    config = AutoConfig.for_model("llama4_text", pad_token_id=0, intermediate_size_mlp=128, **keys)
    model = random_quantized(
        lambda: AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16),
        "nf4",
        torch.bfloat16,
        CPU,
    )
    routers = [module for name, module in model.named_modules() if name.endswith("router")]
    assert routers and all(type(router).__name__ == "Llama4Router" for router in routers)
