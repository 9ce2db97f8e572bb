"""Model FLOPs against numbers counted by hand from the published shapes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from transformers import AutoConfig

from llmtop.presets.spec import MlaShape, RunSpec
from llmtop.profiler.cost.flops import active_weights, model_flops, utilisation, windowed_layers
from llmtop.profiler.cost.shape import param_count
from llmtop.profiler.cost.steptime import NVME_BYTES_PER_SECOND, step_time
from tests.profiler.test_memory import make

LLAMA_8B = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128_256 * 4096
"""Matrices of the blocks and the head: 7,504,658,432 of 8,030,261,248 parameters."""


def test_llama_8b_by_both_counts() -> None:
    flops = model_flops(make(seq_len=4096))
    assert active_weights(make().model) == LLAMA_8B == 7_504_658_432
    assert flops.palm == 6 * LLAMA_8B + 12 * 32 * 32 * 128 * 4096 == 51_470_401_536
    assert flops.needed == 6 * LLAMA_8B + 6 * 32 * 32 * 128 * 4096 == 48_249_176_064


def test_utilisation_of_two_gpus() -> None:
    """15,900 tokens/s on 2 x 989.4e12; with the input embedding in N it would be 43.9 %."""
    spec = make(seq_len=4096, gpus=2)
    share = utilisation(spec, 15_900.0)
    assert share is not None
    assert share.mfu == pytest.approx(0.414, abs=5e-4)
    assert share.needed == pytest.approx(0.388, abs=5e-4)
    every = model_flops(spec).palm + 6 * 128_256 * 4096
    assert every * 15_900 / (2 * 989.4e12) == pytest.approx(0.439, abs=5e-4)


def test_recomputation_changes_nothing() -> None:
    assert model_flops(make(gradient_checkpointing=True)) == model_flops(make())


def test_a_tied_head_counts_and_positions_do_not() -> None:
    """GPT-2: 12 h^2 a block, and the shared matrix once."""
    assert active_weights(make("gpt2").model) == 12 * 12 * 768**2 + 50257 * 768


def test_only_the_experts_of_a_token_count() -> None:
    """Mixtral 8x7B: 2 of 8 experts, the router, attention with 8 shared heads, the head."""
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 8 * 4096
    assert active_weights(make("mixtral-8x7b").model) == 32 * block + 32_000 * 4096


def test_frozen_weights_cost_four_and_adapters_six() -> None:
    """Rank 16 on every matrix of Llama-3.1-8B: 81,920 rows and columns a block."""
    flops = model_flops(make(lora_rank=16, seq_len=4096))
    assert flops.weights == 4 * LLAMA_8B
    assert flops.adapters == 6 * 16 * 32 * 81_920
    assert flops.palm == flops.weights + flops.adapters + 6_442_450_944


def test_layers_with_a_window_attend_to_it() -> None:
    """Gemma-2-2B: every other of 26 layers, 4,096 of 8,192 tokens, 8 heads of 256."""
    spec = make("gemma-2-2b", seq_len=8192)
    assert windowed_layers(spec) == 13
    flops = model_flops(spec)
    assert flops.attention == 12 * 8 * 256 * (13 * 8192 + 13 * 4096)
    # In a window the first half of the queries sees a triangle, the second half all of it.
    assert flops.needed_attention == 12 * 8 * 256 * (13 * 4096 + 13 * (2048 + 4096) / 2)
    short = model_flops(make("gemma-2-2b", seq_len=4096))
    assert short.needed_attention == short.attention / 2


def test_latent_attention_counts_keys_and_values_of_their_own_widths() -> None:
    mla = MlaShape(
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    spec = make(seq_len=2048)
    latent = replace(spec, model=replace(spec.model, mla=mla))
    assert model_flops(latent).attention == 6 * 32 * 32 * (192 + 128) * 2048


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("gpt_oss", {}),
        ("cohere2", {}),
        ("olmo3", {}),
        ("exaone4", {"sliding_window": 4096, "sliding_window_pattern": 4}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 20}),
        ("qwen3", {"use_sliding_window": True}),
    ],
)
def test_windowed_layers_are_those_of_the_modelling_code(family: str, keys: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **keys)
    spec = _windowed(family, config.num_hidden_layers, keys)
    assert windowed_layers(spec) == config.layer_types.count("sliding_attention")
    listed = _windowed(family, config.num_hidden_layers, {"layer_types": config.layer_types})
    assert windowed_layers(listed) == windowed_layers(spec)


def _windowed(family: str, layers: int, keys: dict[str, Any]) -> RunSpec:
    spec = make()
    shape = replace(spec.model, family=family, num_layers=layers, sliding_window=128)
    return replace(spec, model=shape, hf_config=keys)


def test_every_layer_of_mistral_has_the_window() -> None:
    assert windowed_layers(_windowed("mistral", 32, {})) == 32
    assert windowed_layers(make()) == 0


@pytest.mark.parametrize(("gpu", "precision"), [("cpu", "bf16"), ("v100-32gb", "bf16")])
def test_no_utilisation_without_a_known_peak(gpu: str, precision: str) -> None:
    assert utilisation(make(gpu=gpu, precision=precision), 1000.0) is None
    assert utilisation(make(), None) is None


def test_an_nvme_offload_takes_what_its_traffic_takes() -> None:
    """12 bytes of states and 4 of gradient an element each way, on a drive that the ranks share."""
    memory = make(zero=3, gpus=2, offload_optimizer="cpu", micro_batch=1)
    drive = make(zero=3, gpus=2, offload_optimizer="nvme", nvme_path="/nvme", micro_batch=1)
    seconds = [step_time(spec) for spec in (memory, drive)]
    assert seconds[0] is not None and seconds[1] is not None
    more = seconds[1].offload - seconds[0].offload
    assert more == pytest.approx(2 * 16 * param_count(drive.model) / NVME_BYTES_PER_SECOND, rel=1e-6)
