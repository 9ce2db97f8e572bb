"""The nearest name: what people write for it, and never what is alike by chance."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets.errors import begun, nearest
from llmtop.presets.option_values import check, field_types
from llmtop.presets.paths import nearest_sibling

GPUS = ("a100-40gb", "h100", "h100-80gb", "h200", "rtx-4090", "v100-16gb", "v100-32gb")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
OPTIONS = tuple(field_types())


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("h200-141gb", GPUS, "h200"),
        ("h100-81gb", GPUS, "h100-80gb"),
        ("4090", GPUS, "rtx-4090"),
        ("A100", GPUS, "a100-40gb"),
        ("mi300x", GPUS, None),
        ("fa2", ATTENTION, "flash_attention_2"),
        ("flash", ATTENTION, "flash_attention_2"),
        ("xformers", ATTENTION, None),
        ("learnrate", OPTIONS, "learning_rate"),
        ("optim", OPTIONS, "optimizer"),
        ("step", OPTIONS, "steps"),
        ("quant", OPTIONS, "quantization"),
        ("lr", OPTIONS, "learning_rate"),
        ("lr", ("lora_rank", "seed"), None),
        ("batch_size", OPTIONS, "micro_batch"),
        ("--batch-size", ("--micro-batch", "--seed"), "--micro-batch"),
        ("per_device_train_batch_size", OPTIONS, "micro_batch"),
        ("gradient_accumulation_steps", OPTIONS, "grad_accum"),
        ("max_seq_length", OPTIONS, "seq_len"),
        ("int4", ("none", "int8", "nf4"), "nf4"),
        ("8bit", ("none", "int8", "nf4"), "int8"),
        ("gpu", ("none", "cpu", "nvme"), "cpu"),
        ("stage3_prefetch_buket", ("stage", "stage3_prefetch_bucket"), "stage3_prefetch_bucket"),
    ],
)
def test_what_is_meant(word: str, known: tuple[str, ...], meant: str | None) -> None:
    assert nearest(word, known) == meant


def test_marks_between_letters_do_not_hide_what_a_name_begins_with() -> None:
    assert begun("llama3", ("gpt2", "llama-3.1-8b", "llama-2-7b", "llama-3.2-1b")) == (
        "llama-3.1-8b",
        "llama-3.2-1b",
    )
    assert begun("A100", GPUS) == ("a100-40gb",) and begun("", GPUS) == begun("-", GPUS) == ()


@given(st.sampled_from(OPTIONS), st.data())
def test_a_slip_of_the_hand_is_found(name: str, data: st.DataObject) -> None:
    assert nearest(name.upper().replace("_", "-"), OPTIONS) == name
    at = data.draw(st.integers(0, len(name) - 1))
    if len(name) > 8:
        assert nearest(name[:at] + name[at + 1 :], OPTIONS) is not None


def test_files_are_alike_by_their_names_and_not_by_their_endings(tmp_path: Path) -> None:
    for name in ("o.jsonl", "corpus.jsonl", "corpus.txt"):
        (tmp_path / name).touch()
    assert nearest_sibling(tmp_path / "nothere.jsonl") is None
    assert nearest_sibling(tmp_path / "corpsu.jsonl") == tmp_path / "corpus.jsonl"
    assert nearest_sibling(tmp_path / "corpus.json") is not None
    assert nearest_sibling(tmp_path / "no" / "folder") is None


def test_thousands_are_written_out() -> None:
    with pytest.raises(Exception, match="4096 or 4000"):
        check("seq_len", "4k", "--seq-len 4k")
