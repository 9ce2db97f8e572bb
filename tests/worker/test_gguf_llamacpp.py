"""llama.cpp itself reads the files: logits, tokens and text. Only where its Python package is installed.

It is no dependency: the package index has its source alone, and to compile that takes minutes.
`pip install llama-cpp-python` (0.3.36 was tried) makes these tests run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from llmtop.trainer.quantize.job import PackJob
from llmtop.trainer.worker.packing.ggufwriting import write_gguf
from tests.worker.ggufmodels import CASES, DENSE, IDS, MIXTURES, add_sentencepiece, load, logits, make_model

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytestmark = pytest.mark.slow

TEXT = "The assert statement, in 2024: x = [1, 22, 333]\n\n  don't  stop \u00e9 \u6f22"
HALF = 0.003
"""llama.cpp keeps keys and values in 16 bits: so far its logits may be from those in 32."""
PACKED = 0.06
ROUTED = 0.5
"""With experts: where two of them are nearly as good, a small change chooses the other one."""


def opened(folder: Path, kind: str) -> Any:
    file = folder.with_name(f"{folder.name}-{kind}.gguf")
    write_gguf(PackJob(source=str(folder), form=f"gguf:{kind}", target=str(file)), lambda answer: None)
    return llama_cpp.Llama(str(file), n_ctx=128, logits_all=True, verbose=False, n_threads=1)


@pytest.mark.parametrize(
    ("case", "kind", "bound"),
    [
        *((case, "F32", HALF) for case in CASES),
        *((case, "Q8_0", PACKED) for case in DENSE),
        *((case, "Q8_0", ROUTED) for case in MIXTURES),
    ],
)
def test_logits_are_those_of_transformers(case: str, kind: str, bound: float, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny", case)
    model = opened(folder, kind)
    model.eval(IDS)
    found, expected = numpy.array(model.scores[: len(IDS)]), logits(load(folder)).numpy()
    assert numpy.linalg.norm(found - expected) <= bound * numpy.linalg.norm(expected)
    answer = model.create_completion(IDS, max_tokens=4, temperature=0)
    assert answer["usage"]["completion_tokens"] > 0 or answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "sentencepiece as json"])
def test_text_becomes_the_same_tokens_and_tokens_text(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_model(tmp_path / "tiny", tokenizer=kind == "byte level")
    if kind != "byte level":
        add_sentencepiece(folder, as_json=kind.endswith("json"))
    model = opened(folder, "Q8_0")
    expected = AutoTokenizer.from_pretrained(str(folder))(TEXT, add_special_tokens=False)["input_ids"]
    assert model.tokenize(TEXT.encode(), add_bos=False) == expected
    assert model.detokenize(expected).decode().strip() == TEXT
    answer = model.create_completion("The assert", max_tokens=8, temperature=0)["choices"][0]
    assert answer["text"] or answer["finish_reason"] == "stop"
