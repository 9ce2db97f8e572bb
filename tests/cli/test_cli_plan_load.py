"""`plan --load` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Llmtop
from tests.presets.family_cases import CASES


def test_every_precision_has_a_row_and_a_verdict(llmtop: Llmtop) -> None:
    found = llmtop("plan", "llama-3.1-8b", "--load", "--gpu", "t4")
    assert found.code == 0, found.err
    verdicts = {line.split()[0]: line for line in found.out.splitlines() if " GiB " in line}
    assert "does not fit" in verdicts["bf16"]
    assert all(" fits " in line for form, line in verdicts.items() if form != "bf16")


def test_json_holds_the_same_in_bytes(llmtop: Llmtop) -> None:
    words = ("--load", "--gpu", "t4", "--context", "131072", "--requests", "2", "--json")
    found = llmtop("plan", "llama-3.1-8b", *words).json()
    assert (found["context"], found["requests"]) == (131072, 2)
    for form in found["forms"]:
        parts = form["weights_bytes"] + form["cache_bytes"] + form["other_bytes"]
        assert (form["total_bytes"], form["fits"]) == (parts, parts <= found["gpu_memory_bytes"])


def test_questions_are_asked_one_at_a_time(llmtop: Llmtop) -> None:
    both = llmtop("plan", "llama-3.1-8b", "--load", "--where")
    assert (both.code, "--where and --load are different questions" in both.err) == (2, True)
    alone = llmtop("plan", "llama-3.1-8b", "--context", "4096")
    assert (alone.code, "--context is of --load" in alone.err) == (2, True)


def test_each_precision_names_the_gpus_that_hold_it(llmtop: Llmtop) -> None:
    found = llmtop("plan", "llama-3.1-8b", "--load", "--gpu", "t4", "--json").json()
    held = {form["form"]: form["fits_on"] for form in found["forms"]}
    assert "t4" in held["gguf:Q8_0"] and "t4" not in held["bf16"]
    assert set(held["bf16"]) < set(held["gguf:Q4_0"])
    text = " ".join(llmtop("plan", "llama-3.1-8b", "--load", "--gpu", "t4").out.split())
    assert "the largest that fits: bf16 on b200" in text and "int8 on v100-16gb, t4" in text
    giant = " ".join(llmtop("plan", "deepseek-v3", "--load", "--gpu", "t4").out.split())
    assert "nothing on" in giant


def test_a_context_beyond_the_models_positions_is_told(llmtop: Llmtop) -> None:
    words = ("plan", "gpt2", "--load", "--gpu", "t4", "--context")
    assert "made for 1,024 positions" in llmtop(*words, "2048").out
    assert "made for" not in llmtop(*words, "1024").out.partition("weights as")[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model's, below the current folder."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "OUT"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CASES["llama"]))
    return made


def test_a_models_folder_may_stand_where_its_name_does(llmtop: Llmtop, folder: Path) -> None:
    for written in ("OUT", "./OUT", str(folder)):
        answer = llmtop("plan", written, "--load", "--gpu", "t4")
        assert answer.code == 0 and answer.out.startswith("OUT, loaded with "), answer.err


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao"])
def test_packed_weights_are_answered_for_by_their_shape(method: str, llmtop: Llmtop, folder: Path) -> None:
    plain = llmtop("plan", "OUT", "--load", "--gpu", "t4", "--json").json()
    packed = {**CASES["llama"], "quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(packed))
    (folder / "model.safetensors").touch()
    for words in (("OUT",), ("--model", "OUT")):
        answer = llmtop("plan", *words, "--load", "--gpu", "t4", "--json")
        assert f"its weights are packed ({method})" in answer.err and "random" not in answer.err
        assert answer.json() == plain


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("./empty", "that is a folder"),
        ("./nothing", "no such recipe file or model folder"),
        ("some-user/llama-3.1-8b", "hf download"),
        ("./OTU", "did you mean OUT?"),
        ("qwen3-8bb", "no recipe or model preset is called 'qwen3-8bb'\n  fix: did you mean 'qwen3-8b'? "
         "`llmtop presets models` lists the models"),
    ],
)  # fmt: skip
def test_what_is_neither_recipe_nor_model_is_told(
    written: str, told: str, llmtop: Llmtop, folder: Path
) -> None:
    (folder.parent / "empty").mkdir()
    answer = llmtop("plan", written, "--load")
    assert answer.code == 2 and told in answer.err and "fix:" in answer.err, answer.err
