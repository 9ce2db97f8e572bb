"""How a byte-level tokenizer cuts text before it merges, in the word that llama.cpp has for it.

llama.cpp knows a tokenizer by a name (`tokenizer.ggml.pre`) and has its expression built in
(`src/llama-vocab.cpp`); a file under a wrong name would be read with other tokens and nobody would be told.
"""

from __future__ import annotations

from typing import Any

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _UPPER + "|" + _LOWER + r"|\p{N}" + _SLASHED
_GPT4O = f"{_UPPER}{_ENDINGS}?|{_LOWER}{_ENDINGS}?" + r"|\p{N}{1,3}" + _SLASHED
_BY_EXPRESSION = {_QWEN2: "qwen2", _TEKKEN: "tekken", _GPT4O: "gpt-4o"}


def pre_tokenizer(tokenizer: dict[str, Any]) -> str | None:
    """llama.cpp's word for what a tokenizer.json does; None for what it has no word for."""
    parts = _parts(tokenizer.get("pre_tokenizer"))
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return None if parts[0].get("add_prefix_space") else "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and _cuts(parts[1]):
        return "smollm"
    if kinds != ["Split", "ByteLevel"] or _cuts(parts[1]) or parts[0].get("invert"):
        return None
    pattern = parts[0].get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    if expression == _LLAMA3:
        # The same expression under two names: under the first, a word that is a token is never merged.
        return "llama-bpe" if tokenizer.get("model", {}).get("ignore_merges") else "dbrx"
    return _BY_EXPRESSION.get(expression) if isinstance(expression, str) else None


def _parts(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, dict):
        return []
    if found.get("type") == "Sequence":
        inner = found.get("pretokenizers")
        return [part for part in inner if isinstance(part, dict)] if isinstance(inner, list) else []
    return [found]


def _cuts(byte_level: dict[str, Any]) -> bool:
    return bool(byte_level.get("use_regex", True))
