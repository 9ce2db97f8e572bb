"""The words of `--to`."""

from __future__ import annotations

import pytest

from llmtop.presets import catalog
from llmtop.presets.errors import UsageError
from llmtop.profiler.memory.loading import WRITTEN_KINDS, gguf_bytes, loaded_as, written_gguf_bytes
from llmtop.trainer.quantize.target import FORMS, read_target


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_known_in_any_case(form: str) -> None:
    assert read_target(form).form == form
    assert read_target(form.upper().replace("GGUF", "gguf")).form == form
    assert read_target(form.lower()).form == form


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("gguf:Q4_K_M", "gguf:Q4_1"),
        ("gguf:q6_k", "gguf:Q8_0"),
        ("Q5_K_S", "gguf:Q5_1"),
        ("gguf:IQ4_XS", "gguf:Q4_0"),
        ("gguf:TQ1_0", "gguf:Q4_0"),
        ("Q8_0", "gguf:Q8_0"),
        ("int9", "int8"),
        ("gguf:Q8", "gguf:Q8_0"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_nearest_that_can(word: str, instead: str) -> None:
    with pytest.raises(UsageError) as told:
        read_target(word)
    assert told.value.fix.removeprefix("did you mean ").rstrip("?").removeprefix("--to ") == instead


def test_a_word_that_means_nothing_lists_what_does() -> None:
    with pytest.raises(UsageError, match="not a known form") as told:
        read_target("zip")
    assert all(form in told.value.why for form in FORMS)


def test_8b_at_8_bits_is_8_gigabytes_and_a_half_and_fits_a_t4_with_its_cache() -> None:
    model = catalog.load_model("llama-3.1-8b").shape
    weights = written_gguf_bytes(model, "Q8_0")
    assert 8.4e9 < weights < 8.6e9
    assert weights == gguf_bytes(model, "Q8_0"), "as llama.cpp itself writes it"
    memory = catalog.load_gpu("t4").memory_bytes
    assert memory is not None
    assert loaded_as(model, "gguf:Q8_0", weights, context=8192).total_bytes < memory
    assert loaded_as(model, "gguf:BF16", written_gguf_bytes(model, "BF16"), context=8192).total_bytes > memory


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b", "gemma-2-2b"])
def test_fewer_bits_are_fewer_bytes(name: str) -> None:
    model = catalog.load_model(name).shape
    sizes = [written_gguf_bytes(model, kind) for kind in WRITTEN_KINDS if kind != "F16"]
    assert sizes == sorted(set(sizes), reverse=True)
