"""What packing costs, measured for real: memory, errors, perplexity; folders of bitsandbytes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.quantized import Quantized
from llmtop.trainer.quantize import convert
from llmtop.trainer.quantize.convert import Choice, aside, measured, outlook, quantize
from llmtop.trainer.quantize.job import Packed, PackJob
from llmtop.trainer.quantize.source import read_source
from llmtop.trainer.quantize.target import read_target
from llmtop.trainer.quantize.working import have_done
from tests.worker.ggufmodels import WIDE, large_model, load, logits, make_model

pytestmark = [
    pytest.mark.slow,
    # Of bitsandbytes' 8-bit product in bfloat16, and of torchao, which transformers loads where it is.
    pytest.mark.filterwarnings("ignore"),
]

ROOT = Path(__file__).resolve().parents[2]


def quiet(answer: object) -> None:
    """Nobody listens."""


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    large = large_model(tmp_path)
    peaks, sizes = [], []
    for folder in (large.with_name("small"), large):
        job = PackJob(source=str(folder), form="gguf:Q8_0", target=str(tmp_path / f"{folder.name}.gguf"))
        packed = have_done(job, quiet)
        assert isinstance(packed, Packed) and packed.peak_host_bytes is not None
        peaks.append(packed.peak_host_bytes)
        sizes.append(packed.tensor_bytes)
    largest = 4 * 512 * WIDE
    assert sizes[1] > largest / 2
    # Its numbers in 32 bits alone would be more, and there are three such tensors.
    assert peaks[1] < largest, peaks
    assert peaks[1] - peaks[0] < largest * 3 / 4, peaks


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same jobs without a process for each: torch and transformers are loaded once."""
    from llmtop.trainer.worker.packing.__main__ import do

    monkeypatch.setattr(convert, "have_done", do)


def made(folder: Path, form: str, out: Path, **choice: Any) -> Quantized:
    source, target = read_source(folder), read_target(form)
    chosen = Choice(**choice)
    with aside(out) as place:
        result = quantize(source, target, out, place, chosen, quiet)
        return measured(result, source, target, out, chosen, quiet)


@pytest.mark.usefixtures("in_this_process")
def test_perplexity_tells_fewer_bits_from_more(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny", "gemma2")
    text = tmp_path / "held-out.txt"
    text.write_text("A text that nobody has trained on. " * 40)
    found = {}
    for form in ("gguf:F32", "gguf:Q4_0"):
        result = made(folder, form, tmp_path / form.replace(":", "-"), text=str(text), window=64)
        assert result.perplexity is not None, result.no_perplexity
        assert result.perplexity.text == str(text) and not result.perplexity.cut_by_time
        assert result.tensor_bytes == result.predicted_bytes
        found[form] = result.perplexity
    assert found["gguf:F32"].change == 0
    assert found["gguf:Q4_0"].before == found["gguf:F32"].before != found["gguf:Q4_0"].after
    assert found["gguf:Q4_0"].tokens > 300


@pytest.mark.usefixtures("in_this_process")
def test_what_does_not_fit_in_memory_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "tiny")
    monkeypatch.setattr(convert, "memory_left_bytes", lambda: 512 << 20)
    result = made(folder, "gguf:Q8_0", tmp_path / "a.gguf")
    assert result.perplexity is None and "of host memory, and 512 MiB is free" in result.no_perplexity
    assert (tmp_path / "a.gguf").is_file()


@pytest.mark.usefixtures("in_this_process")
def test_time_that_runs_out_is_told_and_both_read_the_same(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    result = made(folder, "gguf:F32", tmp_path / "a.gguf", seconds=1e-9, window=16)
    assert result.perplexity is not None and result.perplexity.cut_by_time
    assert result.perplexity.tokens == 15 and result.perplexity.change == 0


@pytest.mark.usefixtures("in_this_process")
def test_what_cannot_be_measured_is_told_and_the_file_stays(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny", tokenizer=False)
    result = made(folder, "gguf:Q8_0", tmp_path / "a.gguf")
    assert result.perplexity is None and "the folder has no tokenizer" in result.no_perplexity
    assert any("no tokenizer" in note for note in result.notes)
    assert (tmp_path / "a.gguf").read_bytes().startswith(b"GGUF")


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("form", "most"), [("int8", 0.01), ("nf4", 0.1)])
def test_transformers_loads_what_bitsandbytes_packed(form: str, most: float, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, out = make_model(tmp_path / "tiny"), tmp_path / "out"
    result = made(folder, form, out, window=64, text=_text(tmp_path))
    assert result.perplexity is not None, result.no_perplexity
    assert abs(result.perplexity.change) < most
    assert len(result.errors) == 14
    assert most / 3 < (result.relative_rms or 0) < most
    # Beside the numbers, a description of each packed matrix: a byte, or some 160 of JSON.
    assert 0 <= result.tensor_bytes - result.predicted_bytes <= (0 if form == "int8" else 14 * 256)
    model = AutoModelForCausalLM.from_pretrained(str(out), device_map={"": "cpu"})
    there = logits(load(folder))
    assert float((logits(model) - there).norm() / there.norm()) < 10 * most
    assert AutoTokenizer.from_pretrained(str(out))("a b")["input_ids"]


def _text(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("Some words to measure on, and some more of them. " * 20)
    return str(path)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("family", "told"), [("llama", "lack 1 tensor: "), ("olmo", "lack: 1 tensor, as ")])
def test_bitsandbytes_refuses_weights_that_are_not_the_models(family: str, told: str, tmp_path: Path) -> None:
    """Before anything is made where llmtop knows the tensors of a family; else as transformers loads them."""
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path / "tiny", model_type=family)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LlmtopError, match=told + r"model\.layers\.1\.mlp\.up_proj\.weight"):
        made(folder, "nf4", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_process_that_dies_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_model(tmp_path / "tiny"), tmp_path / "a.gguf"
    start = subprocess.Popen

    def another(command: list[str], **keys: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = start([*command[:-1], "tests.worker.dying_packer"], **keys)
        return process

    monkeypatch.setattr(subprocess, "Popen", another)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(LlmtopError, match="was killed"):
        made(folder, "gguf:Q8_0", out)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.usefixtures("in_this_process")
def test_the_outlook_is_what_comes_out(tmp_path: Path) -> None:
    folder, out = make_model(tmp_path / "tiny", "qwen3"), tmp_path / "a.gguf"
    before = outlook(read_source(folder), read_target("gguf:Q5_1"), out, Choice())
    after = made(folder, "gguf:Q5_1", out, perplexity=False)
    assert before.predicted_bytes == after.tensor_bytes and before.load_bytes == after.load_bytes
    assert after.no_perplexity == "it was not asked for"
    assert after.fits_on[0] == "t4"
