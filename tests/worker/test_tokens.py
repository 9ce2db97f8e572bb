"""Tokenizers, and the flat files of token ids that ranks share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.worker.place import Place
from llmtop.trainer.worker.tokenizer import ByteTokenizer, FolderTokenizer
from llmtop.trainer.worker.tokens import load_tokens, make_tokenizer
from tests.worker.launching import make_run, tiny_spec

FIRST = Place(rank=0, local_rank=0, world_size=2, local_world_size=2)
SECOND = Place(rank=1, local_rank=1, world_size=2, local_world_size=2)


def run_with(folder: Path, vocab_size: int = 384, **options: Any) -> RunDir:
    return make_run(folder / "run", tiny_spec({"vocab_size": vocab_size}, **options))


def test_bytes_are_utf_8_with_an_end_that_no_text_holds() -> None:
    tokenizer = ByteTokenizer(300)
    assert tokenizer.encode(["aé"]) == [[97, 195, 169]]
    assert (tokenizer.end_id, tokenizer.vocab_size) == (256, 257)
    assert ByteTokenizer(256).end_id == 0
    with pytest.raises(UsageError, match="255"):
        ByteTokenizer(255)


def test_a_tokenizer_is_made_from_the_data_and_fits_the_model(tmp_path: Path) -> None:
    run = run_with(tmp_path, vocab_size=512)
    tokens = load_tokens(run, run.spec(), FIRST)
    assert tokens.dtype == numpy.uint16
    assert 300 < int(tokens.max()) < 512
    # Shorter than bytes: merges were learned.
    assert 100_000 < len(tokens) < 350_000
    tokenizer = make_tokenizer(run, run.spec())
    assert isinstance(tokenizer, FolderTokenizer)
    assert tokenizer.vocab_size <= 512
    assert (tokens == tokenizer.end_id).sum() > 50


def test_making_it_twice_gives_the_same_ids(tmp_path: Path) -> None:
    first, second = run_with(tmp_path / "a"), run_with(tmp_path / "b")
    made = [load_tokens(run, run.spec(), FIRST) for run in (first, second)]
    assert numpy.array_equal(made[0], made[1])


def test_other_ranks_wait_for_the_first_and_map_the_same_file(tmp_path: Path) -> None:
    run = run_with(tmp_path, tokenizer="bytes")
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(load_tokens(run, run.spec(), SECOND)))
    waiting.start()
    made = load_tokens(run, run.spec(), FIRST)
    waiting.join(60)
    assert numpy.array_equal(found[0], made)
    assert [path.name for path in run.tokens_dir.iterdir()] == [Path(str(getattr(made, "filename", ""))).name]


def test_documents_are_joined_by_the_end(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "ab"}\n{"text": "c"}\n')
    run = run_with(tmp_path, data=str(data), tokenizer="bytes")
    assert load_tokens(run, run.spec(), FIRST).tolist() == [97, 98, 256, 99, 256]


def test_large_vocabularies_need_wider_ids(tmp_path: Path) -> None:
    run = run_with(tmp_path, vocab_size=70_000, tokenizer="bytes")
    assert load_tokens(run, run.spec(), FIRST).dtype == numpy.uint32


def test_an_empty_file_gives_one_end_and_no_more(tmp_path: Path) -> None:
    data = tmp_path / "empty.txt"
    data.write_text("")
    run = run_with(tmp_path, data=str(data), tokenizer="bytes")
    assert load_tokens(run, run.spec(), FIRST).tolist() == [256]


def test_a_relaunch_reads_what_was_made(tmp_path: Path) -> None:
    data = tmp_path / "a.txt"
    data.write_text("text")
    run = run_with(tmp_path, data=str(data), tokenizer="bytes")
    before = load_tokens(run, run.spec(), FIRST).tolist()
    data.unlink()
    assert load_tokens(run, run.spec(), FIRST).tolist() == before


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    made = run_with(tmp_path / "big", vocab_size=1024)
    load_tokens(made, made.spec(), FIRST)
    run = run_with(tmp_path / "small", vocab_size=300, tokenizer=str(made.tokenizer_dir))
    with pytest.raises(UsageError, match="does not match the model"):
        load_tokens(run, run.spec(), FIRST)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path, tokenizer=str(tmp_path))
    with pytest.raises(UsageError, match="no tokenizer there"):
        load_tokens(run, run.spec(), FIRST)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    run = run_with(tmp_path, tokenizer=str(folder))
    with pytest.raises(LlmtopError, match="cannot load the tokenizer"):
        load_tokens(run, run.spec(), FIRST)


def test_the_weights_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    made = run_with(tmp_path / "made", vocab_size=512)
    load_tokens(made, made.spec(), FIRST)
    run = run_with(tmp_path / "with", vocab_size=512, weights_dir=str(made.tokenizer_dir))
    assert make_tokenizer(run, run.spec()).encode(["the"]) == make_tokenizer(made, made.spec()).encode(
        ["the"]
    )
    assert not run.tokenizer_dir.exists()
