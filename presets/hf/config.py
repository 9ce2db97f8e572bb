"""Hugging Face config.json to a model shape, every architecture family, with exact parameter counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmtop.presets.errors import UsageError
from llmtop.presets.foreign import read_bytes, why_unreadable
from llmtop.presets.hf.canonical import FAMILIES, canonical
from llmtop.presets.hf.family import Family, Flag
from llmtop.presets.hf.reader import MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, ConfigReader
from llmtop.presets.spec import ModelShape

MAX_PARAMETERS = 10**15
"""Above this a configuration is a mistake, and byte counts would no longer fit 64 bits."""

MAX_FILE_BYTES = 4 << 20
"""Published configurations have some kilobytes."""


def read_file(path: Path) -> dict[str, Any]:
    """The object in a config.json; raises UsageError that names the file and line."""
    import json  # presets need none

    try:
        text = read_bytes(path, MAX_FILE_BYTES).decode("utf-8")
        config = json.loads(text)
        if "\\u" in text:
            # Half of a pair can be spelt, and then neither be shown nor written out.
            json.dumps(config, ensure_ascii=False).encode()
    except OSError as error:
        fix = "give a config.json, or the folder that holds it"
        raise UsageError(f"{path}: cannot be read", why=why_unreadable(error), fix=fix) from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}:{error.lineno}: not valid JSON",
            why=f"{error.msg} at column {error.colno}",
            fix="mend that line, or copy or download the file again",
        ) from error
    except (ValueError, RecursionError) as error:
        # Not UTF-8, a number of thousands of digits, or nested beyond any real configuration.
        why, fix = str(error).splitlines()[0], "copy or download the file again"
        raise UsageError(f"{path}: not a readable JSON file", why=why, fix=fix) from error
    if not isinstance(config, dict):
        why, fix = "the file holds no JSON object", "copy or download the file again"
        raise UsageError(f"{path}: not a model configuration", why=why, fix=fix)
    return config


def read_shape(config: dict[str, Any], name: str, where: str) -> ModelShape:
    """The shape that the configuration describes; `where` names the file in errors."""
    plain = canonical(config, where)
    family = FAMILIES[plain["model_type"]]
    reader = ConfigReader(plain, where)
    shape = _common_shape(reader, family, name)
    if family.finish is not None:
        shape = family.finish(reader, shape)
    _check(reader, family, shape)
    return shape


def _flag(reader: ConfigReader, flag: Flag) -> bool:
    return flag if isinstance(flag, bool) else reader.flag(*flag)


def _common_shape(reader: ConfigReader, family: Family, name: str) -> ModelShape:
    keys = family.keys
    hidden = reader.integer(keys.hidden)
    heads = reader.integer(keys.heads)
    kv_heads = heads
    if keys.kv_heads is not None:
        explicit_null = keys.kv_heads in reader.config and not reader.has(keys.kv_heads)
        absent = heads if explicit_null else family.kv_heads_default or heads
        kv_heads = reader.integer(keys.kv_heads, absent)
    positions = reader.optional_integer(keys.positions, maximum=MAX_POSITIONS) if keys.positions else None
    final_softcap, attention_softcap = _softcaps(reader, family)
    return ModelShape(
        name=name,
        family=str(reader.config["model_type"]),
        num_layers=reader.integer(keys.layers, maximum=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=_intermediate(reader, family, hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(reader, family, hidden, heads),
        vocab_size=reader.integer("vocab_size", maximum=MAX_VOCABULARY),
        max_positions=positions,
        tied_embeddings=reader.flag("tie_word_embeddings", family.tied),
        gated_mlp=family.gated,
        fused_gate_up=family.fused_gate_up,
        fused_qkv=family.fused_qkv,
        activation=_activation(reader, family),
        norm=family.norm,
        norm_bias=family.norm_bias,
        norm_weight=_flag(reader, family.norm_weight),
        norms_per_layer=family.norms_per_layer,
        parallel_block=_flag(reader, family.parallel),
        qk_norm=family.qk_norm if _has_qk_norm(reader, family) else "none",
        qkv_bias=_flag(reader, family.qkv_bias),
        output_bias=_flag(reader, family.output_bias),
        mlp_bias=_flag(reader, family.mlp_bias),
        head_bias=_flag(reader, family.head_bias),
        learned_positions=_learned_positions(reader, family),
        embedding_norm=family.embedding_norm,
        attention_sinks=family.attention_sinks,
        sliding_window=_sliding_window(reader, family),
        logit_softcap=final_softcap,
        attention_softcap=attention_softcap,
        dropout=0.0 if keys.dropout is None else reader.number(keys.dropout, family.dropout) or 0.0,
        score_dropout=reader.number(keys.score_dropout, family.score_dropout) or 0.0,
    )


def _head_dim(reader: ConfigReader, family: Family, hidden: int, heads: int) -> int:
    if hidden % heads and (family.divisible or _head_dim_is_derived(reader, family)):
        raise reader.contradiction(
            f"{family.keys.hidden} = {hidden} is not a multiple of {family.keys.heads} = {heads}",
            "the heads share the hidden size equally",
        )
    derived = max(1, hidden // heads)
    if family.keys.head_dim is None:
        return derived
    return reader.integer(family.keys.head_dim, family.head_dim_default or derived)


def _head_dim_is_derived(reader: ConfigReader, family: Family) -> bool:
    if family.keys.head_dim is None:
        return "kv_lora_rank" not in reader.config
    return family.head_dim_default is None and not reader.has(family.keys.head_dim)


def _intermediate(reader: ConfigReader, family: Family, hidden: int) -> int:
    key = family.keys.intermediate
    if key is None:
        return 4 * hidden
    return reader.integer(key, 4 * hidden if family.four_times else None)


def _activation(reader: ConfigReader, family: Family) -> str:
    for key in family.keys.activation:
        if reader.has(key):
            return reader.word(key)
    return family.activation


def _has_qk_norm(reader: ConfigReader, family: Family) -> bool:
    return family.qk_norm_key is None or reader.flag(family.qk_norm_key, False)


def _learned_positions(reader: ConfigReader, family: Family) -> int:
    if family.position_offset is None or family.keys.positions is None:
        return 0
    return reader.integer(family.keys.positions, maximum=MAX_POSITIONS) + family.position_offset


def _sliding_window(reader: ConfigReader, family: Family) -> int | None:
    if family.sliding_window_key is not None and not reader.flag(family.sliding_window_key, False):
        return None
    if "sliding_window" in reader.config or family.sliding_window is None:
        # 0 turns it off in some files.
        return reader.optional_integer("sliding_window", minimum=0, maximum=MAX_POSITIONS) or None
    return family.sliding_window


def _softcaps(reader: ConfigReader, family: Family) -> tuple[float | None, float | None]:
    if family.softcaps is None:
        return None, None
    keys = ("final_logit_softcapping", "attn_logit_softcapping")
    final, attention = (
        reader.number(key) if key in reader.config else default
        for key, default in zip(keys, family.softcaps, strict=True)
    )
    return final or None, attention or None


def _check(reader: ConfigReader, family: Family, shape: ModelShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        key = family.keys.kv_heads or "num_kv_heads"
        raise reader.contradiction(
            f"{family.keys.heads} = {shape.num_heads} is not a multiple of {key} = {shape.num_kv_heads}",
            "each key-value head serves the same number of query heads",
        )
    widths = [shape.intermediate_size, shape.num_heads * shape.head_dim]
    per_layer = 3 * shape.hidden_size * max(widths)
    if shape.moe is not None:
        moe = shape.moe
        experts = moe.num_experts * moe.expert_intermediate_size + moe.shared_intermediate_size
        per_layer = max(per_layer, 3 * shape.hidden_size * experts)
    outside = 2 * (shape.vocab_size + shape.learned_positions) * shape.hidden_size
    if shape.num_layers * per_layer + outside > MAX_PARAMETERS:
        raise reader.contradiction(
            "the sizes together make more than a quadrillion parameters",
            f"{shape.num_layers} layers of hidden size {shape.hidden_size} and widths up to {max(widths)}",
        )
