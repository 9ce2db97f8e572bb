"""Configurations as people have them: published counts, traps of absent keys, and errors that help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtop.presets.errors import UsageError
from llmtop.presets.hf import canonical as hf_canonical
from llmtop.presets.hf import config as hf_config
from llmtop.presets.spec import ModelShape
from llmtop.profiler.cost.shape import param_count
from tests.presets.family_cases import CASES

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "published_models.json").read_text()
)


def shape(config: dict[str, Any]) -> ModelShape:
    return hf_config.read_shape(config, "model", "config.json")


def error(config: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        shape(config)
    return caught.value


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_parameter_counts(model: str) -> None:
    assert param_count(shape(PUBLISHED[model]["config"])) == PUBLISHED[model]["params"]


LLAMA = CASES["llama"]


def test_gemma3_4b_leaves_sizes_to_its_class() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    # The language model of google/gemma-3-4b-pt, without its vision tower.
    assert param_count(shape(config)) == 3_880_263_168
    plain = hf_canonical.canonical(config, "config.json")
    assert plain["model_type"] == "gemma3_text"
    assert plain["vocab_size"] == 262208
    assert "vision_config" not in plain
    assert shape(config).tied_embeddings


def test_llama4_scout_text_model() -> None:
    text = {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "vocab_size": 202048,
    }
    # 109 billion in all with the vision tower.
    assert param_count(shape({"model_type": "llama4", "text_config": text})) == 107_769_861_120


def test_qwen2_vl_says_tied_at_the_outer_level() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "model_type"}
    nested = {
        "model_type": "qwen2_vl",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen2_vl_text",
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 2]},
        }
        | text,
    }
    read = shape(nested)
    assert read.tied_embeddings and read.qkv_bias and read.family == "qwen2"
    assert "rope_scaling" not in hf_canonical.canonical(nested, "config.json")
    flat = {"model_type": "qwen2_vl", "tie_word_embeddings": True, **text}
    assert param_count(shape(flat)) == param_count(read)


def test_deepseek_v3_671b() -> None:
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "num_nextn_predict_layers": 1,
    }
    # deepseek-ai/DeepSeek-V3 without its prediction layer, which transformers does not build.
    assert param_count(shape(config)) == 671_026_404_352
    # Without a sparse layer there is no router.
    assert shape(config | {"n_group": 256, "first_k_dense_replace": 61}).moe
    for keys in ({"n_group": 256}, {"n_group": 7}, {"n_group": 4, "topk_group": 5}, {"n_group": 2}):
        with pytest.raises(UsageError, match="n_group"):
            shape(config | keys)


def test_a_lite_model_that_lost_its_null_projects_queries_directly() -> None:
    config = CASES["deepseek_v2 lite"]
    assert "q_lora_rank" not in config
    assert hf_canonical.canonical(config, "config.json")["q_lora_rank"] is None


@pytest.mark.parametrize(("model_type", "heads"), [("RefinedWebModel", 1), ("RefinedWeb", 2)])
def test_falcon_by_its_first_name(model_type: str, heads: int) -> None:
    config = {
        "model_type": model_type,
        "vocab_size": 101,
        "hidden_size": 48,
        "n_layer": 2,
        "n_head": 6,
        "n_head_kv": 2,
        "multi_query": True,
        "bias": False,
    }
    assert shape(config).num_kv_heads == heads
    assert hf_canonical.canonical(config, "config.json")["num_attention_heads"] == 6


def test_the_architecture_names_the_family_when_model_type_is_gone() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert shape({**config, "architectures": ["LlamaForCausalLM"]}) == shape(LLAMA)
    told = error({**config, "architectures": ["LlamoForCausalLM"]})
    assert "LlamoForCausalLM" in told.what and "llama" in told.fix


def test_window_and_softcaps() -> None:
    qwen = CASES["qwen2"]
    assert shape({**qwen, "sliding_window": 32768, "use_sliding_window": False}).sliding_window is None
    assert shape({**qwen, "sliding_window": 32768, "use_sliding_window": True}).sliding_window == 32768
    assert shape({**CASES["mistral nemo"], "sliding_window": None}).sliding_window is None
    gemma = CASES["gemma2"]
    assert (shape(gemma).logit_softcap, shape(gemma).attention_softcap) == (30.0, 50.0)
    assert shape({**gemma, "final_logit_softcapping": None}).logit_softcap is None


@pytest.mark.parametrize(
    ("family", "change", "dropouts"),
    [
        ("opt", {}, (0.1, 0.0)),
        ("opt", {"dropout": 0.0}, (0.0, 0.0)),
        ("opt", {"attention_dropout": 0.2}, (0.1, 0.2)),
        ("gpt2", {"resid_pdrop": 0.0}, (0.0, 0.1)),
        ("gpt_neo", {}, (0.0, 0.0)),
        ("seed_oss", {"attention_dropout": 0.0}, (0.1, 0.0)),
        ("llama", {"attention_dropout": 0.3}, (0.0, 0.3)),
    ],
)
def test_each_dropout_is_read_from_its_own_key(
    family: str, change: dict[str, Any], dropouts: tuple[float, float]
) -> None:
    """Of the hidden state and of attention's scores; an absent one is its class's own."""
    keys = ("dropout", "attention_dropout", "resid_pdrop", "attn_pdrop", "resid_dropout", "residual_dropout")
    case = {key: value for key, value in CASES[family].items() if key not in keys}
    found = shape({**case, **change})
    assert (found.dropout, found.score_dropout) == dropouts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 50}, ("hidden_size = 50", "num_attention_heads = 6")),
        ({"num_key_value_heads": 4}, ("num_attention_heads = 6", "num_key_value_heads = 4")),
        ({"hidden_size": -48}, ("hidden_size", "-48", "whole number")),
        ({"hidden_size": 0}, ("hidden_size", "whole number")),
        ({"hidden_size": 48.0}, ("hidden_size", "48.0")),
        ({"hidden_size": True}, ("hidden_size", "true")),
        ({"hidden_size": "48"}, ("hidden_size", "'48'")),
        ({"vocab_size": 10**40}, ("vocab_size", "whole number")),
        ({"attention_bias": "no"}, ("attention_bias", "true or false")),
        ({"attention_dropout": float("nan")}, ("attention_dropout", "finite")),
        ({"attention_dropout": float("inf")}, ("attention_dropout", "finite")),
        ({"hidden_act": 3}, ("hidden_act", "a text")),
        (
            {"hidden_size": 480000, "intermediate_size": 500000, "num_hidden_layers": 1999},
            ("quadrillion",),
        ),
    ],
)
def test_values_that_cannot_be(change: dict[str, Any], words: tuple[str, ...]) -> None:
    told = str(error({**LLAMA, **change}))
    assert told.startswith("config.json:")
    for word in words:
        assert word in told


def test_a_missing_key_names_the_nearest_that_is_there() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    told = error({**config, "num_hiden_layers": 3})
    assert "'num_hidden_layers' is missing" in told.what
    assert "num_hiden_layers" in told.why


def test_both_names_of_one_key_must_agree() -> None:
    gpt2 = CASES["gpt2"]
    assert shape({**gpt2, "hidden_size": gpt2["n_embd"]}) == shape(gpt2)
    told = error({**gpt2, "hidden_size": 64})
    assert "n_embd = 48 and hidden_size = 64" in told.what


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "no JSON object"),
        ({}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "lama"}, "'llama'"),
        ({"model_type": "bert", "text_config": 3}, "text_config"),
        ({"text_config": {"hidden_size": 3}}, "model_type"),
        ({"model_type": "t5"}, "'t5' is not known"),
        ({"model_type": "chatglm", "add_bias_linear": True}, "add_bias_linear"),
    ],
)
def test_what_is_no_configuration(config: Any, words: str) -> None:
    assert words in str(error(config))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1,\n "b" 2}', ":2: not valid JSON"),
        (b"\xff\xfe\x00", "not a readable JSON file"),
        (b"[" * 100_000, "not a readable JSON file"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not a readable JSON file"),
        (b"[1]", "no JSON object"),
        (b"", ":1: not valid JSON"),
    ],
)
def test_files_that_hold_no_configuration(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        hf_config.read_file(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 300),
    st.floats(),
    st.text(max_size=6),
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
_KEYS = sorted({key for config in CASES.values() for key in config} | {"text_config", "architectures"})


@settings(max_examples=400)
@given(
    case=st.sampled_from(sorted(CASES)),
    changes=st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4),
    dropped=st.sets(st.sampled_from(_KEYS), max_size=2),
)
def test_any_mutation_is_a_shape_or_an_error_that_helps(
    case: str, changes: dict[str, Any], dropped: set[str]
) -> None:
    config = {key: value for key, value in {**CASES[case], **changes}.items() if key not in dropped}
    try:
        read = shape(config)
    except UsageError as refused:
        assert refused.what.startswith("config.json:")
    else:
        assert 0 < param_count(read) < 2 * hf_config.MAX_PARAMETERS


@settings(max_examples=200)
@given(st.dictionaries(st.one_of(st.sampled_from(_KEYS), st.text(max_size=8)), _JSON, max_size=8))
def test_any_object_is_a_shape_or_an_error(config: dict[str, Any]) -> None:
    try:
        shape(config)
    except UsageError as refused:
        assert refused.what
