"""One spelling for each architecture: nested, renamed and remote-code configurations made plain.

The result is what `transformers.AutoConfig.for_model` takes: the language model's own keys, under
the names that its configuration class has.
"""

from __future__ import annotations

from typing import Any

from llmtop.presets.errors import UsageError, nearest, written
from llmtop.presets.hf.family import Family
from llmtop.presets.hf.gpt_families import GPT_FAMILIES
from llmtop.presets.hf.llama_families import LLAMA_FAMILIES
from llmtop.presets.hf.reader import ConfigReader

FAMILIES: dict[str, Family] = LLAMA_FAMILIES | GPT_FAMILIES

_LANGUAGE_MODEL_OF = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Models that see images, and the family of the language model inside."""

_REMOTE_CODE = {"chatglm": "glm", "RefinedWeb": "falcon", "RefinedWebModel": "falcon"}
"""Model types of code that once came with the weights, and the family that has the same layout now."""


class UnknownArchitectureError(UsageError):
    """An architecture without a row in the family tables, which may be traced."""


def plain_keys(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The language model's own keys as the file has them, for an architecture that has no row."""
    plain = _language_model(config, where)
    for key in ("quantization_config", "auto_map"):
        plain.pop(key, None)
    return {**plain, "model_type": _model_type(plain, where)}


def canonical(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The language model's keys under its own class's names.

    Raises UnknownArchitectureError for a family without a row, UsageError for what cannot be read.
    """
    if not isinstance(config, dict):
        raise UsageError(f"{where}: not a model configuration", why="the file holds no JSON object")
    plain = _language_model(config, where)
    model_type = _model_type(plain, where)
    if model_type == "chatglm":
        plain = _from_chatglm(plain, where)
    elif model_type == "RefinedWeb":
        # The 40B model: grouped key-value heads came with the new decoder block only.
        plain = {"new_decoder_architecture": True, **plain, "model_type": "falcon"}
    else:
        plain = {**plain, "model_type": _family_name(model_type)}
    family = FAMILIES.get(plain["model_type"])
    if family is None:
        raise _unknown_architecture(model_type, where)
    _rename(plain, family, where)
    # Training starts from 16-bit or 32-bit weights, whatever the published files are packed in.
    plain.pop("quantization_config", None)
    if plain["model_type"] == "deepseek_v2":
        # The Lite models project queries directly and say so by null, which copies of the file lose.
        plain.setdefault("q_lora_rank", None)
    return plain


def is_plain(config: dict[str, Any], *, traced: bool = False) -> bool:
    """Whether weights beside this configuration are those of the language model alone, in today's layout."""
    model_type = config.get("model_type")
    if traced or not isinstance(model_type, str):
        return "text_config" not in config
    return model_type in FAMILIES


def _family_name(model_type: str) -> str:
    return _REMOTE_CODE.get(model_type) or _LANGUAGE_MODEL_OF.get(model_type) or model_type


def _language_model(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The nested text_config where there is one, with what it leaves to its class and to the outer level."""
    outer_type = config.get("model_type")
    text = config.get("text_config")
    if text is None or (isinstance(outer_type, str) and outer_type in FAMILIES):
        return dict(config)
    if not isinstance(text, dict):
        raise UsageError(f"{where}: text_config is not an object", fix="use the model's own config.json")
    inner_type = text.get("model_type") or outer_type
    if not isinstance(inner_type, str):
        raise ConfigReader(config, where).missing("model_type")
    family = FAMILIES.get(_family_name(inner_type))
    merged = {**(family.class_defaults if family else {}), **text, "model_type": inner_type}
    if text.get("tie_word_embeddings") is None and config.get("tie_word_embeddings") is not None:
        merged["tie_word_embeddings"] = config["tie_word_embeddings"]
    return merged


def _model_type(config: dict[str, Any], where: str) -> str:
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        if model_type in _LANGUAGE_MODEL_OF:
            _drop_multimodal_rope(config)
        return model_type
    architectures = config.get("architectures")
    if model_type is None and isinstance(architectures, list) and architectures:
        named = _type_of_architecture(str(architectures[0]))
        if named is not None:
            return named
        raise _unknown_architecture(str(architectures[0]), where)
    raise ConfigReader(config, where).missing("model_type")


def _type_of_architecture(architecture: str) -> str | None:
    """The model_type whose causal class has this name: LlamaForCausalLM is llama."""
    for suffix in ("ForCausalLM", "LMHeadModel"):
        if architecture.endswith(suffix):
            stem = architecture.removesuffix(suffix).lower()
            return next((name for name in FAMILIES if name.replace("_", "") == stem), None)
    return None


def _drop_multimodal_rope(config: dict[str, Any]) -> None:
    """Positions in three dimensions mean nothing to the language model by itself."""
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if isinstance(value, dict) and "mrope_section" in value:
            del config[key]


def _rename(config: dict[str, Any], family: Family, where: str) -> None:
    for alias, key in family.aliases.items():
        if alias not in config:
            continue
        value = config.pop(alias)
        if config.get(key) is None:
            config[key] = value
        elif value is not None and value != config[key]:
            raise ConfigReader(config, where).contradiction(
                f"{key} = {written(config[key])} and {alias} = {written(value)} contradict each other",
                "both keys mean the same",
            )


def _from_chatglm(config: dict[str, Any], where: str) -> dict[str, Any]:
    """ChatGLM2/3's raw keys as the `glm` family, which has the same tensors."""
    reader = ConfigReader(config, where)
    for key, needed in (("rmsnorm", True), ("post_layer_norm", True), ("add_bias_linear", False)):
        if reader.flag(key, needed) is not needed:
            raise reader.contradiction(
                f"{key} = {str(not needed).lower()} is not a layout of ChatGLM2 or ChatGLM3",
                "the glm family, which these models are built as, has no such variant",
            )
    heads = reader.integer("num_attention_heads")
    grouped = reader.flag("multi_query_attention", False)
    return {
        "model_type": "glm",
        "vocab_size": config.get("padded_vocab_size", config.get("vocab_size")),
        "hidden_size": config.get("hidden_size"),
        "intermediate_size": reader.integer("ffn_hidden_size"),
        "num_hidden_layers": reader.integer("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("multi_query_group_num") if grouped else heads,
        "head_dim": reader.integer("kv_channels"),
        "max_position_embeddings": config.get("seq_length"),
        "rms_norm_eps": reader.number("layernorm_epsilon", 1e-5),
        "attention_bias": reader.flag("add_qkv_bias", False),
        "attention_dropout": reader.number("attention_dropout", 0.0),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        "pad_token_id": 0,
    }


def _unknown_architecture(name: str, where: str) -> UnknownArchitectureError:
    guess = nearest(name, FAMILIES)
    return UnknownArchitectureError(
        f"{where}: the architecture '{name[:80]}' is not known",
        why="parameters and memory are counted by family, and this one has no row yet",
        fix=(f"did you mean '{guess}'? " if guess else "") + f"known: {', '.join(sorted(FAMILIES))}",
    )
