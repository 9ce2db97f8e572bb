"""Tokenizers in GGUF files: what a reader makes of them, and those that cannot be written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from llmtop.presets.errors import LlmtopError
from llmtop.trainer.quantize.bytetokenizer import write_byte_tokenizer
from llmtop.trainer.quantize.job import PackJob
from llmtop.trainer.quantize.source import read_source
from llmtop.trainer.worker.packing.ggufwriting import write_gguf
from llmtop.trainer.worker.packing.pretokens import pre_tokenizer
from llmtop.trainer.worker.packing.vocabulary import add_vocabulary
from tests.worker.ggufmodels import add_sentencepiece, make_model

TEXT = "The assert statement, in 2024: x = [1, 22, 333]\n\n  don't  stop \u00e9 \u6f22"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Tokenizer = dict[str, Any]


class Written:
    """What a writer was told, without a file."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        return lambda value: self.values.__setitem__(name.removeprefix("add_"), value)


def told(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    writer = Written()
    return writer.values, add_vocabulary(writer, read_source(folder))  # type: ignore[arg-type]


def changed(folder: Path, change: Callable[[Tokenizer], object]) -> Path:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))
    return folder


def test_a_byte_level_tokenizer_reads_text_alike(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_model(tmp_path / "tiny")
    write_gguf(
        PackJob(source=str(folder), form="gguf:F16", target=str(tmp_path / "a.gguf")), lambda said: None
    )
    source = AutoTokenizer.from_pretrained(str(folder))
    back = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="a.gguf")
    assert back(TEXT)["input_ids"] == source(TEXT)["input_ids"]
    assert back.eos_token == "<|endoftext|>"


def test_rows_without_a_token_are_unused_and_special_ones_are_told(tmp_path: Path) -> None:
    values, notes = told(make_model(tmp_path / "tiny"))
    assert notes == ()
    assert (values["tokenizer_model"], values["tokenizer_pre"]) == ("gpt2", "gpt-2")
    tokens, kinds = values["token_list"], values["token_types"]
    assert len(tokens) == len(kinds) == 512
    assert tokens[0] == "<|endoftext|>" and kinds[0] == gguf.TokenType.CONTROL
    assert tokens[511] == "[PAD511]" and kinds[511] == gguf.TokenType.UNUSED
    assert values["eos_token_id"] == 0 and values["add_bos_token"] is False
    assert len(values["token_merges"]) > 100


@pytest.mark.parametrize("as_json", [False, True])
def test_sentencepiece_has_its_scores_in_the_order_of_its_merges(as_json: bool, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    folder = make_model(tmp_path / "tiny", tokenizer=False)
    model = add_sentencepiece(folder, as_json=as_json)
    values, notes = told(folder)
    assert notes == () and values["tokenizer_model"] == "llama"
    assert values["add_space_prefix"] is True and values["add_bos_token"] is True
    assert (values["bos_token_id"], values["eos_token_id"], values["unk_token_id"]) == (1, 2, 0)
    tokens, kinds, scores = values["token_list"], values["token_types"], values["token_scores"]
    pieces = SentencePieceProcessor(model_file=str(model))
    assert tokens[:500] == [pieces.IdToPiece(row) for row in range(500)]
    assert kinds[0] == gguf.TokenType.UNKNOWN and kinds[1] == gguf.TokenType.CONTROL
    assert kinds[tokens.index("<0x0A>")] == gguf.TokenType.BYTE
    assert merged(values, TEXT) == pieces.encode(TEXT)
    assert len(set(scores)) > 100


def merged(values: dict[str, Any], text: str) -> list[int]:
    """What llama.cpp does with a SentencePiece vocabulary: the pair with the best score is joined first."""
    rows = {token: row for row, token in enumerate(values["token_list"])}
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        joined = [
            (values["token_scores"][rows[one + two]], -at)
            for at, (one, two) in enumerate(zip(parts, parts[1:], strict=False))
            if one + two in rows
        ]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = [[part] if part in rows else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [rows[token] for tokens in spelled for token in tokens]


def test_tokens_that_were_added_are_matched_whole(tmp_path: Path) -> None:
    def add(tokenizer: Tokenizer) -> None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": 500, "content": "<tool>", "special": False, **flags})
        tokenizer["added_tokens"].append({"id": 501, "content": "<|call|>", "special": False, **flags})

    values, _ = told(changed(make_model(tmp_path / "tiny"), add))
    assert values["token_types"][500] == gguf.TokenType.USER_DEFINED
    assert values["token_types"][501] == gguf.TokenType.CONTROL


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, "gpt-2"),
        ({"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}, None),
        ({"type": "Whitespace"}, None),
        (None, None),
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}], "smollm"),
        (
            [{"type": "Split", "pattern": {"Regex": LLAMA3}}, {"type": "ByteLevel", "use_regex": False}],
            "dbrx",
        ),
        ([{"type": "Split", "pattern": {"Regex": "a|b"}}, {"type": "ByteLevel", "use_regex": False}], None),
    ],
)
def test_how_text_is_cut_has_a_name_or_none(parts: Any, name: str | None) -> None:
    found = {"type": "Sequence", "pretokenizers": parts} if isinstance(parts, list) else parts
    assert pre_tokenizer({"pre_tokenizer": found, "model": {}}) == name


def test_the_expressions_are_those_of_the_families_own_tokenizers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known

    for name in ("llama-bpe", "qwen2", "tekken", "gpt-4o"):
        parts = [
            {"type": "Split", "pattern": {"Regex": known[name]}},
            {"type": "ByteLevel", "use_regex": False},
        ]
        tokenizer = {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
            "model": {"ignore_merges": True},
        }
        assert pre_tokenizer(tokenizer) == name


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda it: it["model"].update(type="WordPiece"), "cannot be written"),
        (lambda it: it.update(pre_tokenizer={"type": "Whitespace"}), "cuts text by a rule"),
        (lambda it: it["model"]["vocab"].update(extra=700), "does not match the model"),
        (lambda it: it["model"].update(vocab=[]), "has no vocabulary"),
    ],
)
def test_what_cannot_be_written_is_told(
    change: Callable[[Tokenizer], object], what: str, tmp_path: Path
) -> None:
    folder = changed(make_model(tmp_path / "tiny"), change)
    with pytest.raises(LlmtopError) as error:
        told(folder)
    assert what in str(error.value)


def test_broken_and_old_files_are_told(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    (folder / "tokenizer.json").write_bytes(b"{cut")
    with pytest.raises(LlmtopError, match="cannot load the tokenizer"):
        told(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(LlmtopError, match="old form"):
        told(folder)
    (folder / "vocab.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(LlmtopError, match="cannot load the tokenizer"):
        told(folder)
    (folder / "tokenizer.model").unlink()
    values, notes = told(folder)
    assert values["tokenizer_model"] == "none" and "token ids only" in notes[0]


@pytest.mark.parametrize(("size", "end"), [(512, 256), (256, 0)])
def test_a_model_of_bytes_reads_bytes(size: int, end: int, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_model(tmp_path / "tiny", tokenizer=False, vocab_size=size)
    write_byte_tokenizer(folder, size)
    text = "H\u00e9llo\n\t\x7f \U0001f600"
    assert AutoTokenizer.from_pretrained(str(folder))(text)["input_ids"] == list(text.encode())
    values, _ = told(folder)
    assert values["eos_token_id"] == end
    assert len(values["token_list"]) == size and len(values["token_merges"]) == 1


def test_a_name_with_phi3_in_it_is_kept_where_its_tokens_are_there(tmp_path: Path) -> None:
    """llama.cpp looks for those tokens wherever it reads that name."""
    values, _ = told(make_model(tmp_path / "My-Phi-3-mini"))
    assert values["name"] == "My-phi-mini"
