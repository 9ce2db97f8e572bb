"""Tokenizes the data once per machine into a flat file of ids that every local rank maps."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy

from llmtop.presets.errors import UsageError
from llmtop.presets.inputs import SMALLEST_BPE_VOCAB
from llmtop.presets.spec import RunSpec
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import random_hex, sync_file, sync_folder
from llmtop.trainer.worker.data import Ids
from llmtop.trainer.worker.place import Place
from llmtop.trainer.worker.text import Piece, read_pieces
from llmtop.trainer.worker.tokenizer import (
    ByteTokenizer,
    FolderTokenizer,
    Tokenizer,
    tokenizer_folder,
    train_byte_level_bpe,
)

_PIECES_AT_A_TIME = 256
_WAIT_SECONDS = 0.05


def load_tokens(run: RunDir, spec: RunSpec, place: Place) -> Ids:
    """All token ids of the run's data, documents joined by the end-of-text id.

    The first rank of a machine makes the files, the others wait for them; a relaunch finds them made.
    """
    dtype = numpy.dtype(numpy.uint16 if spec.model.vocab_size <= 1 << 16 else numpy.uint32)
    path = run.tokens_dir / f"{_fingerprint(spec)}.{dtype.name}"
    if place.local_rank == 0:
        if not path.exists():
            _write_tokens(path, dtype, spec, make_tokenizer(run, spec))
    else:
        _wait_for(path)
    if path.stat().st_size == 0:
        return numpy.zeros(0, dtype)
    return numpy.memmap(path, dtype, mode="r")


def make_tokenizer(run: RunDir, spec: RunSpec) -> Tokenizer:
    """The tokenizer that the options ask for; one made from the data is saved in the run's folder."""
    vocab_size, options = spec.model.vocab_size, spec.options
    if options.tokenizer == "bytes":
        return ByteTokenizer(vocab_size)
    folder = tokenizer_folder(spec)
    if folder is None and vocab_size < SMALLEST_BPE_VOCAB:
        return ByteTokenizer(vocab_size)
    if folder is None:
        folder = run.tokenizer_dir
        if not folder.is_dir():
            _make_bpe(folder, spec)
    end_id = spec.hf_config.get("eos_token_id")
    made = FolderTokenizer(folder, end_id if isinstance(end_id, int) else None)
    if made.end_id >= vocab_size:
        raise UsageError(
            f"the tokenizer in {folder} does not match the model",
            why=f"its end-of-text id {made.end_id} is not below the model's vocabulary of {vocab_size}",
            fix="name the tokenizer that belongs to the model: --tokenizer FOLDER",
        )
    return made


def _make_bpe(folder: Path, spec: RunSpec) -> None:
    # Not by its pid: another machine that shares this folder may have the same one.
    aside = folder.with_name(f".{folder.name}.{random_hex(8)}.new")
    shutil.rmtree(aside, ignore_errors=True)
    pieces = read_pieces(spec.options.data, spec.options.text_field)
    train_byte_level_bpe((piece.text for piece in pieces), spec.model.vocab_size, aside)
    for file in aside.iterdir():
        sync_file(file)
    sync_folder(aside)
    try:
        aside.rename(folder)
        sync_folder(folder.parent)
    except OSError:
        # Another machine that shares this folder made the same tokenizer first.
        if not folder.is_dir():
            raise
        shutil.rmtree(aside)


def _write_tokens(path: Path, dtype: numpy.dtype[Any], spec: RunSpec, tokenizer: Tokenizer) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    aside = path.with_name(f".{path.name}.{random_hex(8)}.new")
    pieces = read_pieces(spec.options.data, spec.options.text_field)
    with aside.open("wb") as file:
        for ids in _encoded(pieces, tokenizer):
            _check_ids(ids, spec)
            file.write(ids.astype(dtype).tobytes())
        # A file of zeros that a power cut left would be trained on after a resume, and nobody would see it.
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def _encoded(pieces: Iterator[Piece], tokenizer: Tokenizer) -> Iterator[Ids]:
    while batch := list(islice(pieces, _PIECES_AT_A_TIME)):
        joined: list[int] = []
        for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
            joined += ids
            if piece.ends_document:
                joined.append(tokenizer.end_id)
        yield numpy.array(joined, dtype=numpy.int64)


def _check_ids(ids: Ids, spec: RunSpec) -> None:
    if ids.size and int(ids.max()) >= spec.model.vocab_size:
        raise UsageError(
            "the tokenizer does not match the model",
            why=f"it gave id {int(ids.max())}, the model's vocabulary is {spec.model.vocab_size}",
            fix="name the tokenizer that belongs to the model: --tokenizer FOLDER",
        )


def _fingerprint(spec: RunSpec) -> str:
    options = spec.options
    choice = [options.data, options.text_field, options.tokenizer, spec.weights_dir, spec.model.vocab_size]
    return hashlib.sha256(msgspec.json.encode(choice)).hexdigest()[:16]


def _wait_for(path: Path) -> None:
    """Without a time-out: a first rank that fails or hangs is the supervisor's to see."""
    while not path.exists():
        time.sleep(_WAIT_SECONDS)
