"""Text to token ids: the model's own tokenizer, one made from the data on the spot, or plain bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.inputs import TOKENIZER_FILES, holds_tokenizer, own_tokenizer_folder
from llmtop.presets.paths import expand_user
from llmtop.presets.spec import RunSpec

END_OF_TEXT = "<|endoftext|>"
_TRAINING_CHARS = 32 << 20
"""Enough text for stable merges; a larger corpus would only make training of the tokenizer slower."""


class Tokenizer(Protocol):
    """What packing needs to know of a tokenizer."""

    vocab_size: int
    """Every id is below it."""
    end_id: int
    """Stands between documents."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...


class ByteTokenizer:
    """UTF-8 bytes as ids; the end of text is id 256, or the NUL byte, which no text holds."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 256:
            raise UsageError(
                f"the model's vocabulary of {vocab_size} is too small for any byte-level tokenizer",
                why="there are 256 bytes",
                fix="use a model with a vocabulary of at least 256",
            )
        self.end_id = 256 if vocab_size > 256 else 0
        self.vocab_size = self.end_id + 1 if self.end_id else 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


class FolderTokenizer:
    """A tokenizer in Hugging Face's files."""

    def __init__(self, folder: Path, config_end_id: int | None = None) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            # A broken file raises whatever its parser stumbles over.
            raise LlmtopError(f"cannot load the tokenizer in {folder}", why=str(error)) from error
        # A text longer than the model's positions is cut into sequences later: no need to warn.
        self._tokenizer.model_max_length = int(1e30)
        end_id = self._tokenizer.eos_token_id
        if end_id is None:
            end_id = config_end_id
        if end_id is None:
            raise LlmtopError(
                f"the tokenizer in {folder} has no end-of-text token",
                fix="set eos_token in its tokenizer_config.json",
            )
        self.end_id = int(end_id)
        self.vocab_size = max(len(self._tokenizer), self.end_id + 1)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return ids


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Make a byte-level BPE tokenizer of at most `vocab_size` entries and save it in Hugging Face's files."""
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = HfTokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_first_chars(texts, _TRAINING_CHARS), trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END_OF_TEXT).save_pretrained(str(folder))


def tokenizer_folder(spec: RunSpec) -> Path | None:
    """The folder whose tokenizer the run uses; None when one is made from the data."""
    choice = spec.options.tokenizer
    if choice == "auto":
        return own_tokenizer_folder(spec)
    folder = Path(expand_user(choice))
    if not holds_tokenizer(folder):
        raise UsageError(
            f"tokenizer = {choice!r}: no tokenizer there",
            why=f"none of {', '.join(TOKENIZER_FILES)} is in that folder",
            fix="name a folder that holds one, or use 'auto' or 'bytes'",
        )
    return folder


def _first_chars(texts: Iterable[str], limit: int) -> Iterable[str]:
    taken = 0
    for text in texts:
        yield text
        taken += len(text)
        if taken >= limit:
            return
