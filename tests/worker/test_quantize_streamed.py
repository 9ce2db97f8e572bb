"""Perplexity of a model that is never whole in memory: the same numbers, and what it takes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from llmtop.presets import catalog
from llmtop.trainer.quantize.job import Measured, MeasureJob, PackJob
from llmtop.trainer.quantize.measuring import measuring_bytes
from llmtop.trainer.quantize.source import read_source
from llmtop.trainer.quantize.target import read_target
from llmtop.trainer.quantize.working import have_done
from llmtop.trainer.worker.packing.ggufwriting import write_gguf
from llmtop.trainer.worker.packing.measuring import WholeModel, skeleton, source_model, unmade
from llmtop.trainer.worker.packing.streaming import StreamedModel
from llmtop.trainer.worker.packing.unpacking import FolderNumbers, GgufNumbers
from tests.worker.ggufmodels import WIDE, add_byte_level, large_model, load, make_model

pytestmark = pytest.mark.slow

STREAMED = ("qwen2", "gemma3", "phi", "mixtral", "qwen2_moe")
"""Tied and not, scaled embeddings, layer norms and a head with a bias, experts of both spellings."""


@pytest.mark.parametrize("case", STREAMED)
def test_a_model_that_is_never_whole_in_memory_answers_as_one_that_is(case: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny", case, tokenizer=False)
    source, ids = read_source(folder), torch.tensor([list(range(3, 60)), list(range(400, 457))])
    streamed = source_model(source, torch.float32)
    assert isinstance(streamed, StreamedModel)
    assert streamed.nats(ids) == pytest.approx(WholeModel(load(folder)).nats(ids), rel=1e-5)
    # In pieces: of the tokens whose logits are computed, and of the text that passes beside each other.
    numbers = FolderNumbers(source, partial(unmade, source, torch.float32), torch.float32)
    pieces = StreamedModel(skeleton(source, torch.float32), numbers, torch.device("cpu"), 4 * 512 * 5)
    assert [pieces.nats(row[None])[0] for row in ids] == pytest.approx(streamed.nats(ids), rel=1e-5)
    assert all(parameter.device.type == "meta" for parameter in attention_of(streamed).parameters())


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe"])
def test_experts_in_one_tensor_are_read_as_those_in_many(case: str, tmp_path: Path) -> None:
    folder, stacked = make_model(tmp_path / "tiny", case, tokenizer=False), tmp_path / "stacked"
    load(folder).save_pretrained(str(stacked), save_original_format=False)
    ids = torch.tensor([list(range(3, 60))])
    many, one = (source_model(read_source(each), torch.float32) for each in (folder, stacked))
    assert isinstance(one, StreamedModel) and one.nats(ids) == many.nats(ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", STREAMED)
def test_on_a_gpu_it_answers_as_the_whole_model_does_there(case: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny", case, tokenizer=False)
    source, ids = read_source(folder), torch.tensor([list(range(3, 60))])
    whole = WholeModel(load(folder).cuda()).nats(ids)
    assert source_model(source, torch.float32).nats(ids) == pytest.approx(whole, rel=1e-5)
    file = tmp_path / "tiny.gguf"
    write_gguf(PackJob(source=str(folder), form="gguf:F32", target=str(file)), quiet)
    numbers = GgufNumbers(source, "F32", file)
    read = StreamedModel(skeleton(source, torch.float32), numbers, torch.device("cuda"), 1 << 20)
    assert read.nats(ids) == pytest.approx(whole, rel=1e-5)


def attention_of(model: StreamedModel) -> torch.nn.Module:
    found: torch.nn.Module = model._trunk.layers[0].self_attn
    return found


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one whose three large matrices take 384 MiB in 32 bits."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whose context is host memory too
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # several wait for each other, where others use the cores
    large = large_model(tmp_path)
    add_byte_level(large)
    (tmp_path / "text.txt").write_text("Some words to measure on. ")
    peaks = []
    for folder in (large.with_name("small"), large):
        file = tmp_path / f"{folder.name}.gguf"
        write_gguf(PackJob(source=str(folder), form="gguf:BF16", target=str(file)), quiet)
        found = have_done(measure_job(folder, file, tmp_path / "text.txt"), quiet)
        assert isinstance(found, Measured) and found.perplexity.change == 0
        assert found.perplexity.peak_host_bytes is not None
        peaks.append(found.perplexity.peak_host_bytes)
        needed = measuring_bytes(read_source(folder).shape, read_target("gguf:BF16"), 64, 4)
        assert peaks[-1] <= needed
    assert peaks[1] - peaks[0] < 3 * 4 * 512 * WIDE * 3 / 4, peaks


def measure_job(folder: Path, made: Path, text: Path) -> MeasureJob:
    return MeasureJob(
        source=str(folder),
        form="gguf:BF16",
        made=str(made),
        text=str(text),
        window=64,
        seconds=60,
        dtype="float32",
    )


def quiet(answer: object) -> None:
    """Nobody listens."""


def test_a_model_of_another_family_is_loaded_whole(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny", tokenizer=False, model_type="olmo")
    source, form = read_source(folder), read_target("nf4")
    assert isinstance(source_model(source, torch.float32), WholeModel)
    # And that is what is asked for before.
    shape = replace(source.shape, num_layers=200)
    assert measuring_bytes(shape, form, 64, 4) - measuring_bytes(source.shape, form, 64, 4) > 4 * 190 * 64**2
    known = replace(shape, family="llama")
    assert measuring_bytes(known, form, 64, 4) < measuring_bytes(shape, form, 64, 4)


def test_memory_to_measure_does_not_grow_with_the_layers() -> None:
    shape = catalog.load_model("llama-3.1-8b").shape
    needed = measuring_bytes(shape, read_target("gguf:Q8_0"), 512, 4)
    assert needed == measuring_bytes(replace(shape, num_layers=2), read_target("gguf:Q8_0"), 512, 4)
    assert needed < 4 << 30, "an 8B, in 32 bits"
    # What bitsandbytes made is loaded whole.
    assert measuring_bytes(shape, read_target("nf4"), 512, 2) > 5 << 30
