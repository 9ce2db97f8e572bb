"""What a model needs to be loaded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets import catalog
from llmtop.presets.spec import ModelShape
from llmtop.profiler.memory.loading import FORMS, cache_bytes, gguf_bytes, loaded

METADATA_BYTES = 12_000_000
"""The most that a file holds beside its tensors: vocabulary and merges of 128,256 or 151,936 tokens."""


def shape(name: str) -> ModelShape:
    return catalog.load_model(name).shape


@pytest.mark.parametrize(
    ("model", "mixture", "file_gigabytes"),
    [
        ("llama-3.1-8b", "Q8_0", 8.54),
        ("llama-3.1-8b", "Q6_K", 6.60),
        ("llama-3.1-8b", "Q5_K_M", 5.73),
        ("llama-3.1-8b", "Q4_K_M", 4.92),
        ("llama-3.1-8b", "Q4_0", 4.66),
        ("qwen2.5-7b", "Q8_0", 8.10),
        ("qwen2.5-7b", "Q4_K_M", 4.68),
        ("mistral-7b", "Q8_0", 7.70),
        ("mistral-7b", "Q4_K_M", 4.37),
    ],
)
def test_files_that_others_have_published(model: str, mixture: str, file_gigabytes: float) -> None:
    """Sizes as listed beside the files on the Hugging Face hub, to a hundredth of a GB."""
    size = gguf_bytes(shape(model), mixture)
    listed = 1e9 * file_gigabytes
    assert listed - 5e6 - METADATA_BYTES <= size <= listed + 5e6


def test_8b_in_8_bits_fits_a_t4_with_its_cache() -> None:
    rows = {row.form: row for row in loaded(shape("llama-3.1-8b"), context=8192)}
    memory = catalog.load_gpu("t4").memory_bytes
    assert memory is not None
    assert rows["gguf:Q8_0"].total_bytes < memory < rows["bf16"].total_bytes
    assert rows["int8"].total_bytes < memory


def test_the_cache_is_what_grouped_heads_keep() -> None:
    # 32 layers, 8 heads of 128 for keys and as many for values, 2 bytes each.
    assert cache_bytes(shape("llama-3.1-8b"), 8192) == 32 * 2 * 8 * 128 * 2 * 8192


def test_rows_that_are_no_whole_blocks_take_another_type() -> None:
    # 896 columns are no multiple of 256: llama.cpp stores such rows in 5 bits instead of 4.
    small = shape("qwen2.5-0.5b")
    assert small.hidden_size % 256
    assert gguf_bytes(small, "Q4_K_M") > gguf_bytes(small, "Q4_0")


@pytest.mark.parametrize("model", ["llama-3.2-1b", "gemma-2-2b", "gpt2", "qwen3-30b-a3b"])
@given(context=st.integers(1, 200_000), requests=st.integers(1, 64))
def test_more_bits_and_more_tokens_never_need_less(model: str, context: int, requests: int) -> None:
    rows = {row.form: row for row in loaded(shape(model), context=context, requests=requests)}
    assert set(rows) == set(FORMS)
    ordered = [rows[f"gguf:{name}"].weights_bytes for name in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M")]
    assert rows["bf16"].weights_bytes > ordered[0] and ordered == sorted(ordered, reverse=True)
    more = loaded(shape(model), context=context + 1, requests=requests + 1)
    assert all(row.total_bytes > rows[row.form].total_bytes for row in more)
