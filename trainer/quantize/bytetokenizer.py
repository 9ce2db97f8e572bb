"""A tokenizer's files for a model that was trained on bytes: each is the token of its number."""

from __future__ import annotations

from pathlib import Path

from llmtop.presets.inputs import SMALLEST_BPE_VOCAB, holds_tokenizer
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.wholefile import document

END_OF_TEXT = "<|endoftext|>"
_BYTES = 256
_WRITTEN_AS_THEY_ARE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that GPT-2's alphabet writes as the character of their number; the others get one from 256 on."""


def used_bytes(spec: RunSpec, folder: Path) -> bool:
    """Whether the run's tokens were bytes, and its folder of weights has no tokenizer for that reason."""
    chosen = spec.options.tokenizer == "bytes" or spec.model.vocab_size < SMALLEST_BPE_VOCAB
    return chosen and not holds_tokenizer(folder)


def write_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """BPE that merges nothing. The end of text is the token behind the bytes, where there is room for one."""
    has_end = vocab_size > _BYTES
    added = [_added(_BYTES, END_OF_TEXT)] if has_end else []
    vocabulary = {text: byte for byte, text in enumerate(_alphabet())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": END_OF_TEXT} if has_end else {})
    (folder / "tokenizer.json").write_bytes(document(tokenizer))
    (folder / "tokenizer_config.json").write_bytes(document(config))


def _added(row: int, text: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": row, "content": text, "special": True, **flags}


def _alphabet() -> list[str]:
    """GPT-2's: the visible character that stands for each byte."""
    others = iter(range(_BYTES, 2 * _BYTES))
    return [chr(byte if byte in _WRITTEN_AS_THEY_ARE else next(others)) for byte in range(_BYTES)]
