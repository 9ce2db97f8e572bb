"""What one row of the family tables says: how a `model_type` becomes a ModelShape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from llmtop.presets.hf.reader import ConfigReader
from llmtop.presets.spec import ModelShape

Flag = bool | tuple[str, bool]
"""Always so, or a configuration key with the value that its absence means."""

ATTENTION_BIAS: Flag = ("attention_bias", False)
MLP_BIAS: Flag = ("mlp_bias", False)


class Keys(Struct, frozen=True, kw_only=True):
    """The family's own names of the keys that every family has."""

    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str | None = "num_key_value_heads"
    """None: as many as there are heads, whatever the file says."""
    head_dim: str | None = "head_dim"
    """None: always the hidden size divided by the heads."""
    intermediate: str | None = "intermediate_size"
    """None: always four times the hidden size."""
    positions: str | None = "max_position_embeddings"
    activation: tuple[str, ...] = ("hidden_act",)
    dropout: str | None = None
    """Of the hidden state, after attention and after the MLP; None: there is none."""
    score_dropout: str = "attention_dropout"
    """Of attention's scores."""


class Family(Struct, frozen=True, kw_only=True):
    """How one `model_type` becomes a ModelShape."""

    keys: Keys = Keys()
    aliases: dict[str, str] = {}
    """Other spellings that files in use have, to the family's own key."""
    class_defaults: dict[str, Any] = {}
    """Sizes that a nested text_config leaves out where they equal the class's default."""
    kv_heads_default: int | None = None
    """None: as many as heads."""
    head_dim_default: int | None = None
    """None: hidden size divided by heads."""
    four_times: bool = False
    """An absent intermediate size means four times the hidden size."""
    divisible: bool = False
    """transformers refuses a hidden size that the heads do not divide, even with a head_dim."""
    tied: bool = False
    activation: str = "silu"
    dropout: float = 0.0
    score_dropout: float = 0.0
    gated: bool = True
    fused_gate_up: bool = False
    fused_qkv: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True
    norm_weight: Flag = True
    norms_per_layer: int = 2
    parallel: Flag = False
    qk_norm: Literal["none", "head", "full", "per_head"] = "none"
    qk_norm_key: str | None = None
    """The norm is there only when this key is true."""
    qkv_bias: Flag = False
    output_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: Flag = False
    position_offset: int | None = None
    """None: no learned positions; else the rows that the table has beyond the longest sequence."""
    embedding_norm: bool = False
    attention_sinks: bool = False
    sliding_window: int | None = None
    """The class's default."""
    sliding_window_key: str | None = None
    """The window counts only when this key is true."""
    softcaps: tuple[float | None, float | None] | None = None
    """Defaults of final_logit_softcapping and attn_logit_softcapping; None: the family has neither."""
    finish: Callable[[ConfigReader, ModelShape], ModelShape] | None = None
    """What no common key expresses: experts, latent attention, variants."""
