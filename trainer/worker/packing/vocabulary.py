"""The tokenizer of a folder as a GGUF file holds it: byte-level BPE, or SentencePiece with its scores."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import msgspec

from llmtop.presets.errors import LlmtopError
from llmtop.presets.foreign import read_json
from llmtop.presets.version import install_words
from llmtop.trainer.quantize.source import Source
from llmtop.trainer.worker.packing.pretokens import pre_tokenizer

_JSON, _MODEL, _CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
_MOST_BYTES = 256 << 20
_UNUSED_SCORE, _ADDED_SCORE = -10_000.0, -1_000.0
_SPACE = "\u2581"
_PHI3 = re.compile(r"phi-?3", re.IGNORECASE)
_PHI3_TOKENS = frozenset({"</s>", "<unk>", "<s>", "<|endoftext|>"})
_NO_MERGE = "\u0100 \u0100"
"""Of two NUL bytes, which no text holds: llama.cpp wants one merge at least of a byte-level tokenizer."""
_NO_PREFIX = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Families whose SentencePiece puts no space before a text."""


class _Added(NamedTuple):
    text: str
    special: bool


class _Vocabulary:
    """Rows of the embedding as tokens; what the tokenizer leaves out is there and unused."""

    def __init__(self, size: int, where: Path) -> None:
        self.tokens = [f"[PAD{row}]" for row in range(size)]
        self.scores = [_UNUSED_SCORE] * size
        self.kinds = [int(gguf.TokenType.UNUSED)] * size
        self._where = where

    def put(self, row: int, text: str, kind: gguf.TokenType, score: float = 0.0) -> None:
        if not 0 <= row < len(self.tokens):
            raise LlmtopError(
                f"the tokenizer in {self._where} does not match the model",
                why=f"it has a token {row}, and the model's vocabulary ends before {len(self.tokens)}",
                fix="put the tokenizer that belongs to the model into its folder",
            )
        self.tokens[row], self.scores[row], self.kinds[row] = text, score, int(kind)


def add_vocabulary(writer: gguf.GGUFWriter, source: Source) -> tuple[str, ...]:
    """In words what whoever uses the file should know. Raises LlmtopError for one that cannot be written."""
    folder = source.folder
    tokenizer = _document(folder / _JSON)
    if tokenizer is None and not (folder / _MODEL).is_file():
        if any((folder / name).is_file() for name in ("vocab.json", "merges.txt")):
            raise _needs_json(folder, "vocab.json and merges.txt do not say how text is cut")
        writer.add_tokenizer_model("none")
        writer.add_name(_name(source.name, ()))
        return ("the folder holds no tokenizer: the file has none, and llama.cpp takes token ids only",)
    vocabulary = _Vocabulary(source.shape.vocab_size, folder)
    if (folder / _MODEL).is_file() and (tokenizer is None or _is_sentencepiece(tokenizer)):
        _add_sentencepiece(writer, vocabulary, source, tokenizer)
    elif tokenizer is not None and _is_sentencepiece(tokenizer):
        _add_merged_sentencepiece(writer, vocabulary, source, tokenizer)
    else:
        _add_byte_level(writer, vocabulary, folder, tokenizer or {})
    _add_special(writer, source, tokenizer, vocabulary.tokens)
    writer.add_name(_name(source.name, vocabulary.tokens))
    return ()


def _name(name: str, tokens: Collection[str]) -> str:
    """The model's name. llama.cpp looks for Phi-3's tokens where it reads `phi3`, and fails without them."""
    return name if _PHI3_TOKENS.issubset(tokens) else _PHI3.sub("phi", name)


def _is_sentencepiece(tokenizer: dict[str, Any]) -> bool:
    return bool(tokenizer.get("model", {}).get("byte_fallback"))


def _add_byte_level(
    writer: gguf.GGUFWriter, vocabulary: _Vocabulary, folder: Path, tokenizer: dict[str, Any]
) -> None:
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE":
        raise LlmtopError(
            f"the tokenizer in {folder} cannot be written to GGUF",
            why=f"it is of the kind {model.get('type')}; BPE and SentencePiece can be",
            fix="--to int8 or --to nf4 keeps it as it is",
        )
    pre = pre_tokenizer(tokenizer)
    if pre is None:
        raise LlmtopError(
            f"the tokenizer in {folder} cannot be written to GGUF",
            why="it cuts text by a rule that llama.cpp has no name for, and under another it would read other"
            " tokens",
            fix="--to int8 or --to nf4 keeps it as it is",
        )
    added = _added(folder, tokenizer)
    for text, row in _tokens(model, folder):
        vocabulary.put(row, text, gguf.TokenType.NORMAL)
    for row, token in added.items():
        vocabulary.put(row, token.text, _kind(token))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)


def _add_sentencepiece(
    writer: gguf.GGUFWriter, vocabulary: _Vocabulary, source: Source, tokenizer: dict[str, Any] | None
) -> None:
    """By the model that SentencePiece itself has made."""
    folder = source.folder
    if importlib.util.find_spec("sentencepiece") is None:
        raise LlmtopError(
            f"the tokenizer in {folder} is SentencePiece's, and the package `sentencepiece` is not installed",
            fix=install_words("quantize"),
        )
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor()
    try:
        pieces.LoadFromFile(str(folder / _MODEL))
    except (OSError, RuntimeError) as error:
        raise LlmtopError(
            f"cannot load the tokenizer in {folder}",
            why=f"{_MODEL}: {str(error).splitlines()[0]}",
            fix="copy or download it again",
        ) from error
    for row in range(pieces.vocab_size()):
        kind = (
            gguf.TokenType.UNKNOWN
            if pieces.IsUnknown(row)
            else gguf.TokenType.CONTROL
            if pieces.IsControl(row)
            else gguf.TokenType.UNUSED
            if pieces.IsUnused(row)
            else gguf.TokenType.BYTE
            if pieces.IsByte(row)
            else gguf.TokenType.NORMAL
        )
        vocabulary.put(row, pieces.IdToPiece(row), kind, pieces.GetScore(row))
    prefix = source.shape.family not in _NO_PREFIX if tokenizer is None else _adds_space(tokenizer)
    _finish_sentencepiece(writer, vocabulary, _added(folder, tokenizer or {}), prefix)


def _add_merged_sentencepiece(
    writer: gguf.GGUFWriter, vocabulary: _Vocabulary, source: Source, tokenizer: dict[str, Any]
) -> None:
    """By a tokenizer.json: scores are the order of its merges, which came from SentencePiece's scores."""
    model = tokenizer["model"]
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(_merges(model, source.folder)):
        ranks.setdefault(first + second, rank)
    unknown = model.get("unk_token") or _named(source.folder, "unk")
    for text, row in _tokens(model, source.folder):
        is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kind = (
            gguf.TokenType.UNKNOWN
            if text == unknown
            else gguf.TokenType.BYTE
            if is_byte
            else gguf.TokenType.NORMAL
        )
        vocabulary.put(row, text, kind, -float(ranks.get(text, len(ranks))))
    _finish_sentencepiece(writer, vocabulary, _added(source.folder, tokenizer), _adds_space(tokenizer))


def _finish_sentencepiece(
    writer: gguf.GGUFWriter, vocabulary: _Vocabulary, added: dict[int, _Added], prefix: bool
) -> None:
    for row, token in added.items():
        known = 0 <= row < len(vocabulary.kinds) and vocabulary.kinds[row] == gguf.TokenType.UNKNOWN
        kind = gguf.TokenType.UNKNOWN if known else _kind(token)
        text = token.text if token.special else token.text.replace(_SPACE, " ")
        vocabulary.put(row, text, kind, 0.0 if known else _ADDED_SCORE)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.kinds)
    writer.add_add_space_prefix(prefix)


def _adds_space(tokenizer: dict[str, Any]) -> bool:
    """Whether a text begins with a space that nobody wrote."""
    for key, kind in (("normalizer", "Prepend"), ("pre_tokenizer", "Metaspace")):
        for part in _flat(tokenizer.get(key)):
            if part.get("type") == kind:
                return kind == "Prepend" or part.get("prepend_scheme", "always") != "never"
    return False


def _flat(found: Any) -> Iterator[dict[str, Any]]:
    if isinstance(found, dict):
        yield found
        for inner in ("normalizers", "pretokenizers"):
            for part in found.get(inner) or ():
                yield from _flat(part)


def _add_special(
    writer: gguf.GGUFWriter, source: Source, tokenizer: dict[str, Any] | None, tokens: list[str]
) -> None:
    """Merges, the ids of tokens with a meaning, whether a text begins or ends with one, the chat template."""
    byte_level = tokenizer is not None and not _is_sentencepiece(tokenizer)
    try:
        special = gguf.SpecialVocab(source.folder, load_merges=byte_level, n_vocab=source.shape.vocab_size)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        # What a broken file makes of it depends on where it is broken.
        raise LlmtopError(f"cannot read the tokenizer in {source.folder}", why=str(error)) from error
    if tokenizer is not None:
        for kind in ("bos", "eos"):
            special.add_special_token.setdefault(kind, False)
    for kind in ("bos", "eos", "unk", "pad"):
        # gguf finds them in tokenizer.json alone; what config.json says is for generation, and may be others.
        text = _named(source.folder, kind)
        if text in tokens:
            special.special_token_ids[kind] = tokens.index(text)
    if byte_level and not special.merges:
        special.merges = [_NO_MERGE]
    special.add_to_gguf(writer, quiet=True)


def _named(folder: Path, kind: str) -> str:
    """A special token's text, as the tokenizer's own configuration has it; empty without one."""
    found = (_document(folder / _CONFIG) or {}).get(f"{kind}_token")
    text = found.get("content") if isinstance(found, dict) else found
    return text if isinstance(text, str) else ""


def _tokens(model: dict[str, Any], folder: Path) -> Iterator[tuple[str, int]]:
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or not all(type(row) is int for row in vocabulary.values()):
        raise LlmtopError(f"cannot read the tokenizer in {folder}", why=f"{_JSON} has no vocabulary")
    yield from vocabulary.items()


def _merges(model: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """In both spellings: a pair, or a line with a space between."""
    for merge in model.get("merges") or ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2:
            raise LlmtopError(
                f"cannot read the tokenizer in {folder}", why=f"{_JSON} has the merge {merge!r}"
            )
        yield str(parts[0]), str(parts[1])


def _added(folder: Path, tokenizer: dict[str, Any]) -> dict[int, _Added]:
    """Tokens that no merge makes, by their rows."""
    found: dict[int, _Added] = {}
    config = _document(folder / _CONFIG) or {}
    named = config.get("added_tokens_decoder")
    for row, part in named.items() if isinstance(named, dict) else ():
        found[int(row)] = _Added(str(part.get("content", "")), bool(part.get("special")))
    for part in tokenizer.get("added_tokens") or ():
        found[int(part["id"])] = _Added(str(part["content"]), bool(part.get("special")))
    return found


def _kind(token: _Added) -> gguf.TokenType:
    """Some families do not mark all that are no text: `<|...|>` and Gemma's `<unused0>`."""
    looks = token.text.startswith(("<|", "<unused")) and token.text.endswith(">")
    return gguf.TokenType.CONTROL if token.special or looks else gguf.TokenType.USER_DEFINED


def _document(path: Path) -> dict[str, Any] | None:
    """None where it is not there."""
    if not path.is_file():
        return None
    try:
        return read_json(path, dict[str, Any], _MOST_BYTES)
    except (OSError, msgspec.DecodeError) as error:
        raise LlmtopError(
            f"cannot load the tokenizer in {path.parent}",
            why=f"{path.name}: {error}",
            fix="copy or download it again",
        ) from error


def _needs_json(folder: Path, why: str) -> LlmtopError:
    return LlmtopError(
        f"the tokenizer in {folder} is in an old form",
        why=why,
        fix="AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes tokenizer.json",
    )
