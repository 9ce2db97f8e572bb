"""GGUF files of every family: what transformers reads back computes what the source does, within the type."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch

from llmtop.presets.errors import LlmtopError
from llmtop.trainer.quantize.job import Packed, PackJob
from llmtop.trainer.quantize.plan import plan_gguf
from llmtop.trainer.quantize.source import read_source
from llmtop.trainer.worker.packing.ggufwriting import write_gguf
from llmtop.trainer.worker.packing.reading import in_halves, interleaved
from llmtop.trainer.worker.packing.unpacking import GgufNumbers
from tests.worker.ggufmodels import CASES, FAMILIES, MIXTURES, add_byte_level, load, logits, make_model

KINDS = {
    **dict.fromkeys(("F32", "BF16"), 0.0),
    "F16": 1e-4,
    "Q8_0": 0.006,
    "Q5_1": 0.04,
    "Q5_0": 0.05,
    "Q4_1": 0.085,
    "Q4_0": 0.09,
}
"""How far the numbers of a tensor may move, as a part of them."""
ADDED_UP = 10
"""By how much more logits may: each layer adds its own. Rows in a wrong order change them wholly."""
UNREAD = ("gemma", "phi", "mixtral")
"""Families that transformers cannot read from GGUF."""
TOLD = {"gemma2", "gemma3", "mistral", "qwen3", "qwen2_moe", "qwen3_moe"}
"""Of these transformers does not read all from GGUF: softcaps, windows, heads' width, experts', the name."""
ROUTED = 0.5
"""The same with experts. Logits of nothing that is right are as far off as they are long."""

ModelOf = Callable[[str], Path]


def quiet(answer: object) -> None:
    """Nobody listens."""


def written(folder: Path, kind: str) -> tuple[Path, Packed]:
    target = folder.with_name(f"{folder.name}-{kind}.gguf")
    job = PackJob(source=str(folder), form=f"gguf:{kind}", target=str(target))
    return target, write_gguf(job, quiet)


def off(there: torch.Tensor, here: torch.Tensor) -> float:
    return float((there - here).square().sum().sqrt() / here.square().sum().sqrt())


@torch.no_grad()
def filled(model: Any, folder: Path, kind: str, file: Path) -> Any:
    """The model with the numbers of the file and none of its own."""
    numbers = GgufNumbers(read_source(folder), kind, file)
    for name, parameter in model.named_parameters():
        parameter.fill_(torch.nan)
        numbers.fill(name, parameter)
    return model


def read_back(file: Path, folder: Path, case: str) -> Any:
    from transformers import AutoConfig, LlamaConfig

    keys: dict[str, Any] = {}
    if case in TOLD:
        config = AutoConfig.from_pretrained(str(folder))
        plain = {**config.to_dict(), "model_type": "llama"}
        keys["config"] = LlamaConfig(**plain) if case == "mistral" else config
    return load(file.parent, gguf_file=file.name, **keys)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case, made once."""
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = make_model(tmp_path_factory.mktemp("models") / case.replace(" ", "-"), case)
        return made[case]

    return folder


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, kind) for case in FAMILIES[1:] for kind in ("F32", "Q8_0")),
        *(("llama", kind) for kind in KINDS),
    ],
)
def test_logits_are_those_of_the_source(case: str, kind: str, model_of: ModelOf) -> None:
    folder = model_of(case)
    file, packed = written(folder, kind)
    unread = case in UNREAD
    model = filled(load(folder), folder, kind, file) if unread else read_back(file, folder, case)
    there = logits(load(folder))
    if case not in MIXTURES:
        assert off(logits(model), there) <= ADDED_UP * KINDS[kind]
    elif kind == "F32":
        # A product over experts adds up in another order than the model that has been trained.
        assert off(logits(model), there) <= 1e-6
    else:
        # Where two experts are nearly as good, a small change chooses the other one.
        assert off(logits(model), there) <= ROUTED
    worst = packed.errors[0].relative_rms
    assert worst is not None and worst <= KINDS[kind]
    assert worst >= KINDS[kind] / 2 or not kind.startswith("Q")


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_predicted(case: str, model_of: ModelOf) -> None:
    source = read_source(model_of(case))
    plans = {kind: plan_gguf(source, kind) for kind in KINDS}
    assert all(plan.predicted_bytes == plan.size_bytes for plan in plans.values())
    file, packed = written(source.folder, "Q4_1")
    tensors = gguf.GGUFReader(file).tensors
    assert plans["Q4_1"].size_bytes == packed.tensor_bytes == sum(tensor.n_bytes for tensor in tensors)
    assert file.stat().st_size > packed.tensor_bytes


@pytest.mark.parametrize("case", CASES)
def test_every_number_comes_back(case: str, model_of: ModelOf) -> None:
    """Not changed by one: rows that change places, norms, fused matrices, tied heads."""
    folder = model_of(case)
    file, _ = written(folder, "F32")
    model = load(folder)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    filled(model, folder, "F32", file)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_rows_change_places_as_llama_cpp_wants_them() -> None:
    rows = numpy.arange(16, dtype=numpy.float32).reshape(16, 1)
    changed = interleaved(rows, 8)
    assert changed[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert (in_halves(changed, 8) == rows).all()


def test_types_of_a_file_below_8_bits(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny", "llama odd rows")
    kinds = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(written(folder, "Q4_0")[0]).tensors
    }
    assert kinds["output_norm.weight"] == "F32"
    # Rows of 48 or 80 numbers are no whole blocks of 32.
    assert {kinds["token_embd.weight"], kinds["output.weight"], kinds["blk.0.ffn_down.weight"]} == {"F16"}
    even = make_model(tmp_path / "even", "llama")
    kinds = {
        tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(written(even, "Q4_0")[0]).tensors
    }
    assert (kinds["token_embd.weight"], kinds["output.weight"]) == ("Q4_0", "Q8_0")


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def test_metadata_tells_what_the_tensors_do_not(tmp_path: Path) -> None:
    found = fields(written(make_model(tmp_path / "two", "gemma2"), "F32")[0])
    assert found["general.architecture"] == "gemma2" and found["general.name"] == "two"
    assert found["gemma2.attention.key_length"] == 32
    assert found["gemma2.attn_logit_softcapping"] == 50 and found["gemma2.final_logit_softcapping"] == 30
    assert found["gemma2.attention.sliding_window"] == 8
    found = fields(written(make_model(tmp_path / "three", "gemma3 scaled"), "F32")[0])
    assert found["gemma3.rope.freq_base"] == 1e6 and found["gemma3.rope.freq_base_swa"] == 1e4
    assert found["gemma3.rope.scaling.type"] == "linear" and found["gemma3.rope.scaling.factor"] == 8
    found = fields(written(make_model(tmp_path / "yarn", "qwen2 yarn"), "F32")[0])
    assert found["qwen2.rope.scaling.type"] == "yarn"
    assert found["qwen2.rope.scaling.original_context_length"] == 32
    found = fields(written(make_model(tmp_path / "phi", "phi3 long"), "F32")[0])
    assert found["phi3.rope.scaling.type"] == "longrope"
    assert found["phi3.rope.scaling.attn_factor"] == pytest.approx(1.527525)


def test_metadata_of_experts_and_of_layer_norms(tmp_path: Path) -> None:
    found = fields(written(make_model(tmp_path / "wide", "mixtral"), "F32")[0])
    assert (found["llama.expert_count"], found["llama.expert_used_count"]) == (4, 2)
    assert found["llama.feed_forward_length"] == 128 and "llama.expert_feed_forward_length" not in found
    assert found["llama.rope.freq_base"] == 1e6, "of Mixtral's own class"
    found = fields(written(make_model(tmp_path / "shared", "qwen2_moe"), "F32")[0])
    assert found["qwen2moe.expert_feed_forward_length"] == 32
    assert found["qwen2moe.expert_shared_feed_forward_length"] == 96
    phi = fields(written(make_model(tmp_path / "phi", "phi"), "F32")[0])
    assert phi["phi2.rope.dimension_count"] == 8, "half of a head, where a Phi does not say"
    assert phi["phi2.attention.layer_norm_epsilon"] == pytest.approx(1e-5)


def test_what_chooses_experts_is_not_rounded(tmp_path: Path) -> None:
    file, _ = written(make_model(tmp_path / "tiny", "qwen2_moe"), "Q4_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.1.ffn_gate_inp.weight"] == kinds["blk.1.ffn_gate_inp_shexp.weight"] == "F32"
    assert kinds["blk.1.ffn_gate_exps.weight"] == "Q4_0"


@pytest.mark.parametrize("case", MIXTURES)
def test_experts_in_one_tensor_are_taken_apart(case: str, tmp_path: Path) -> None:
    """As transformers' own code has them, where they are not saved in the form of their family."""
    folder, stacked = make_model(tmp_path / "tiny", case), tmp_path / "stacked" / "tiny"
    load(folder).to(torch.bfloat16).save_pretrained(str(stacked), save_original_format=False)
    names = set(read_source(stacked).tensors)
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    add_byte_level(stacked)
    file, _ = written(stacked, "Q8_0")
    assert file.read_bytes() == written(folder, "Q8_0")[0].read_bytes()
    numbers = GgufNumbers(read_source(stacked), "Q8_0", file)
    assert all(name in numbers for name, _ in load(stacked).named_parameters())


def test_llama_3s_factors_are_those_of_32_bit_steps(tmp_path: Path) -> None:
    """As torch computes them, which llama.cpp's converter does: to the last bit."""
    folder = make_model(tmp_path / "long", "llama 3.1, tied", head_dim=128)
    file, _ = written(folder, "F32")
    found = next(one for one in gguf.GGUFReader(file).tensors if one.name == "rope_freqs.weight").data
    frequencies = 1.0 / (500_000.0 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128))
    expected = []
    for wavelength in (2 * math.pi / frequency for frequency in frequencies):
        smooth = (16 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        expected.append(1.0 if wavelength < 4 else 8.0 if wavelength > 16 else float(between))
    assert len(set(expected)) > 1 and found.tolist() == expected


def test_old_spellings_of_rope_are_read(tmp_path: Path) -> None:
    """As folders from before transformers 5 have them."""
    import json

    folder = make_model(tmp_path / "old", "llama 3.1, tied")
    expected = fields(written(folder, "F32")[0])
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(config))
    file, _ = written(folder, "F32")
    assert fields(file) == expected
    factors = next(one for one in gguf.GGUFReader(file).tensors if one.name == "rope_freqs.weight").data
    rotary = load(folder).model.rotary_emb
    plain = rotary.config.rope_parameters["rope_theta"] ** (-torch.arange(0, 16, 2) / 16)
    assert numpy.allclose(factors, (plain / rotary.inv_freq).numpy())


@pytest.mark.parametrize(("kind", "value"), [("F16", 1e6), ("Q8_0", float("inf")), ("BF16", float("nan"))])
def test_numbers_that_a_type_cannot_hold_are_told_by_their_tensor(
    kind: str, value: float, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        LlmtopError, match=rf"layers\.1\.mlp\.up_proj\.weight holds numbers that {kind} cannot"
    ):
        written(folder, kind)
