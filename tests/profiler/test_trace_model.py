"""The tracer against the formulas of families that have them, and against what torch really keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from llmtop.presets.hf.canonical import canonical
from llmtop.presets.hf.config import read_shape
from llmtop.presets.spec import GpuSpec, ModelShape, RunOptions, RunSpec
from llmtop.profiler.cost.flops import model_flops
from llmtop.profiler.cost.shape import Role, param_count, tensors
from llmtop.profiler.memory.backward import pass_bytes
from llmtop.profiler.memory.blocks import block_bytes
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.memory.result import Component
from llmtop.profiler.memory.sizes import sizes_of
from llmtop.profiler.memory.states import state_bytes
from llmtop.profiler.probes.trace_model import answer, trace
from tests.profiler.test_activations_real import BATCH, LENGTH, kept_bytes

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
KNOWN: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_head": 8,
        "n_layer": 3,
        "n_positions": 1024,
        "vocab_size": 999,
    },
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 48, "tie_word_embeddings": True},
    "experts of two kinds of block": {
        "model_type": "qwen3_moe",
        **SIZES,
        **EXPERTS,
        "head_dim": 32,
        "mlp_only_layers": [0],
    },
    "a window in some blocks": {
        "model_type": "gemma3_text",
        **SIZES,
        "num_hidden_layers": 6,
        "head_dim": 32,
        "sliding_window": 700,
    },
    "latent attention": {
        "model_type": "deepseek_v3",
        **SIZES,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def spec_of(model: ModelShape, config: dict[str, Any], **options: Any) -> RunSpec:
    chosen = {"precision": "bf16", "seq_len": 256, "micro_batch": 2, **options}
    return RunSpec(
        name="test",
        model=model,
        # Not Hopper's: which kernel a device takes, and how that lays its output out, no trace shows.
        gpu=GpuSpec(name="a100-80gb", compute_capability="8.0"),
        model_source="",
        hf_config=config,
        options=RunOptions(model="x", gpu="a100-80gb", **chosen),
    )


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_family_is_traced_as_its_formulas_say(name: str) -> None:
    config = canonical(KNOWN[name], name)
    counted, traced = read_shape(config, name, name), trace(config)
    assert traced.traced is not None
    assert param_count(traced) == param_count(counted)
    assert traced.tied_embeddings == counted.tied_embeddings
    assert _by_role(traced) == _by_role(counted)
    for attention in {"eager", "sdpa"} & set(traced.traced.attentions):
        for precision in ("bf16", "fp32"):
            for length, rank in ((256, 0), (1000, 0), (256, 8)):
                options = {
                    "attention": attention,
                    "precision": precision,
                    "seq_len": length,
                    "lora_rank": rank,
                }
                by_formula, by_trace = spec_of(counted, config, **options), spec_of(traced, config, **options)
                block, seen = _block(by_formula), _block(by_trace)
                assert seen.saved == pytest.approx(block.saved, rel=0.01), options
                assert seen.input_saved == block.input_saved
                assert _kept(by_trace) == pytest.approx(_kept(by_formula), rel=0.01), options
    flops, expected = model_flops(by_trace), model_flops(by_formula)
    assert flops.weights == pytest.approx(expected.weights, rel=0.001)
    assert flops.attention == pytest.approx(expected.attention, rel=0.001)


def _by_role(model: ModelShape) -> dict[Role, int]:
    """Weights of the matrices; biases and norms lie with whatever the code names them after."""
    found: dict[Role, int] = {}
    for group in tensors(model):
        if len(group.shape) > 1 and group.role is not Role.NORM:
            found[group.role] = found.get(group.role, 0) + group.total
    return found


def _block(spec: RunSpec) -> Any:
    return block_bytes(spec, sizes_of(spec))


def _kept(spec: RunSpec) -> int:
    """All activations at the end of forward."""
    sizes = sizes_of(spec)
    return pass_bytes(spec, sizes, state_bytes(spec, sizes)).forward_end[Component.ACTIVATIONS]


UNKNOWN: dict[str, dict[str, Any]] = {
    "persimmon": {**SIZES, "num_key_value_heads": 8, "hidden_act": "relu2"},
    "helium": {**SIZES, "head_dim": 32},
    "apertus": SIZES,
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_an_unknown_family_keeps_what_was_traced(family: str) -> None:
    keys = {**UNKNOWN[family], "vocab_size": 300}
    traced = trace({"model_type": family, **keys})
    built = []
    for layers in (2, 3):
        config = AutoConfig.for_model(family, use_cache=False, **{**keys, "num_hidden_layers": layers})
        built.append(
            AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        )
    two, three = (kept_bytes(model.train()) for model in built)
    spec = spec_of(traced, keys, attention="eager", precision="fp32", seq_len=LENGTH, micro_batch=BATCH)
    assert _block(spec).saved == pytest.approx((three - two) / (BATCH * LENGTH), rel=0.012)


def test_a_traced_model_is_predicted_and_says_so() -> None:
    config = {"model_type": "persimmon", **UNKNOWN["persimmon"]}
    traced = trace(config)
    prediction = predict(spec_of(traced, config, attention="sdpa"))
    assert prediction.params == param_count(traced) > 0
    assert prediction.assumptions[0].startswith("traced: 'persimmon'")
    counted = predict(spec_of(replace(traced, traced=None), config, attention="sdpa"))
    wide, narrow = (p.peak_allocated_upper_bytes - p.peak_allocated_bytes for p in (prediction, counted))
    assert wide > narrow, "the bound is wider where formulas were not made for the family"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "no-such-model"}, "does not know it either"),
        ({"model_type": "no-such-model", "auto_map": {"AutoModel": "x.Y"}}, "such code is not run"),
        ({"model_type": "bert"}, "no causal language model"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "mamba"}, "keeps a state"),
        ({"model_type": "zamba2"}, "keeps a state"),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "conv"),
        ({"model_type": "dbrx", "attn_config": 3}, "does not run"),
    ],
)
def test_what_a_trace_cannot_stand_for_is_refused(config: dict[str, Any], why: str) -> None:
    found = answer(config)
    assert found.shape is None
    assert why in found.refused
