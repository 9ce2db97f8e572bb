"""`llmtop quantize` as a person types it."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import msgspec
import psutil
import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.quantized import Quantized
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from llmtop.trainer import weightsout
from llmtop.trainer.quantize.convert import aside, keep
from llmtop.trainer.tune.interrupt import SIGNALS
from llmtop.tui.commands import quantize as command
from tests.cli.conftest import Llmtop
from tests.recorded import make_recorded_run
from tests.worker.ggufmodels import large_model, make_model
from tests.worker.handmade_state import saved_run

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def kept(path: Path) -> Quantized:
    return msgspec.json.decode(path.read_bytes(), type=Quantized)


def test_a_folder_becomes_a_file_with_a_report(
    llmtop: Llmtop, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(here / "tiny")
    capsys.readouterr()  # what libraries wrote as they were loaded
    dry = llmtop("quantize", "tiny", "--to", "gguf:Q8_0", "--dry-run", "--json").json()
    assert [path.name for path in here.iterdir()] == ["tiny"]
    made = llmtop("quantize", "tiny", "--to", "gguf:q8_0", "--no-perplexity")
    assert made.code == 0, made.err
    assert "tiny-Q8_0.gguf: gguf:Q8_0 of tiny (llama, 140K parameters)" in made.out
    assert "the worst" in made.out and "smallest GPUs with that: t4" in made.out
    assert "(+0.00%)" in made.out, "as many bytes as predicted"
    report = kept(here / "tiny-Q8_0.gguf.quantized.json")
    assert report.perplexity is None
    assert (report.predicted_bytes, len(report.errors)) == (dry["predicted_bytes"], 21)
    assert sorted(path.name for path in here.iterdir()) == [
        "tiny",
        "tiny-Q8_0.gguf",
        "tiny-Q8_0.gguf.quantized.json",
    ]
    again = llmtop("quantize", "tiny", "--to", "gguf:Q8_0")
    assert again.code == 2 and "is there already" in again.err


def test_a_run_becomes_a_file_and_its_report_tells_of_it(
    llmtop: Llmtop, here: Path, runs_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved_run(runs_root / "20261130-120000-hand-made-0001", scale=0.1)
    capsys.readouterr()
    made = llmtop("quantize", "latest", "--to", "gguf:Q4_0", "--out", "run.gguf", "--json", "--no-perplexity")
    assert made.code == 0, made.err
    found = made.json()
    assert (found["source"], found["step"], found["family"]) == (run.run_id, 4, "llama")
    # The run took bytes as tokens: so does the file.
    tokens = gguf.GGUFReader("run.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert tokens[ord("H")] == "H" and tokens[256] == "<|endoftext|>" and not found["notes"]
    assert sorted(path.name for path in here.iterdir()) == ["run.gguf", "run.gguf.quantized.json"]
    assert kept(run.quantized_path("run.gguf")).step == 4


def test_the_report_of_a_run_has_a_section(tmp_path: Path, runs_root: Path) -> None:
    run = make_recorded_run(runs_root)
    assert "In fewer bits" not in render(build_report(run), 100)
    keep(_kept(), run.quantized_path("a.gguf"))
    run.quantized_path("broken").write_text("{")
    text = render(build_report(run), 100)
    assert "In fewer bits" in text and "n/a: it cannot be read" in text
    assert "a.gguf: gguf:Q4_0 of 20261130-a, step 7 (llama, 8.03B parameters)" in text
    assert _page(run).count("a.gguf: gguf:Q4_0 of 20261130-a") == 1


def _kept() -> Quantized:
    return Quantized(
        source="20261130-a",
        step=7,
        form="gguf:Q4_0",
        output="a.gguf",
        model="llama",
        family="llama",
        parameters=8_030_261_248,
        before_bytes=16 << 30,
        predicted_bytes=4 << 30,
        tensor_bytes=4 << 30,
        file_bytes=(4 << 30) + 7_000_000,
        context=8192,
        load_bytes=6 << 30,
        fits_on=("t4",),
        errors=(),
        no_perplexity="it was not asked for",
        seconds=100.0,
        peak_host_bytes=200 << 20,
    )


def _page(run: RunDir) -> str:
    from llmtop.profiler.export.secrets import Scrubber
    from llmtop.profiler.record.feed import read_state
    from llmtop.profiler.report.history import read_history
    from llmtop.profiler.report.page import run_page
    from llmtop.profiler.report.pagedata import page_of

    return run_page(page_of(run, read_state(run), read_history(run), Scrubber({}), ()))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("tiny", "--to", "gguf:Q4_K_M"), "only llama.cpp's own program packs to it"),
        (("nowhere/model", "--to", "int8"), "nowhere/model: no such folder"),
        (("nowhere", "--to", "int8"), "neither a folder of weights nor a run"),
        (("tiny", "--to", "int8", "--text", "none.txt"), "no such file"),
        (("tiny", "--to", "int8", "--from", "3"), "--from is for a run"),
        (("tiny", "--to", "int8", "--seconds", "0"), "no number above 0"),
        (("tiny", "--too", "int8"), "did you mean '--to'?"),
        (("tiny", "--to", "int8", "--out", "none/made"), "the folder none is not there"),
        (("tiny", "--to", "int8", "--out", "none/made", "--dry-run"), "mkdir -p none"),
        (("tiny/model.safetensors", "--to", "int8"), "it is a file, not a folder"),
        (("file.gguf", "--to", "int8"), "it is a file, not a folder"),
        (("empty", "--to", "int8"), "fix: give a folder with config.json and safetensors"),
    ],
)
def test_mistakes_are_told_and_nothing_is_made(
    words: tuple[str, ...], what: str, llmtop: Llmtop, here: Path
) -> None:
    make_model(here / "tiny", tokenizer=False)
    (here / "file.gguf").touch()
    (here / "empty").mkdir()
    answer = llmtop("quantize", *words)
    assert answer.code == 2 and what in answer.err, answer.err
    assert sorted(path.name for path in here.iterdir()) == ["empty", "file.gguf", "tiny"]


@pytest.mark.parametrize("number", SIGNALS, ids=str)
def test_whoever_ends_it_leaves_nothing_and_nobody(
    number: signal.Signals, llmtop: Llmtop, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(here / "tiny")
    seen: list[Path] = []
    ended: list[subprocess.Popen[bytes]] = []

    def interrupted(answer: object) -> None:
        seen.extend(here.glob(".*.partial/made"))
        signal.raise_signal(number)

    start = subprocess.Popen

    def remembered(*words: Any, **keys: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = start(*words, **keys)
        ended.append(process)
        return process

    monkeypatch.setattr(command, "_progress", lambda: interrupted)
    monkeypatch.setattr(subprocess, "Popen", remembered)
    answer = llmtop("quantize", "tiny", "--to", "gguf:Q8_0")
    assert answer.code == 130 and "interrupted" in answer.err
    assert seen, "it came when there was half a file"
    assert [path.name for path in here.iterdir()] == ["tiny"]
    assert len(ended) == 1 and ended[0].poll() is not None


def test_one_that_is_killed_leaves_no_output_and_nobody(here: Path) -> None:
    large_model(here)
    out, half = here / "large-Q4_0.gguf", here / ".large-Q4_0.gguf.partial" / "made"
    words = ["quantize", "large", "--to", "gguf:Q4_0", "--no-perplexity"]
    with subprocess.Popen(
        [sys.executable, "-m", "llmtop.tui.cli", *words], stderr=subprocess.DEVNULL
    ) as llmtop:
        try:
            while not (half.is_file() and half.stat().st_size > 1 << 20):
                assert llmtop.poll() is None, "it ended by itself"
                time.sleep(0.01)
            packers = psutil.Process(llmtop.pid).children(recursive=True)
        finally:
            llmtop.kill()
    assert packers and half.is_file()
    _, alive = psutil.wait_procs(packers, timeout=60)
    assert not alive and not out.exists()
    with aside(out):
        assert not half.exists(), "the next one takes it away"
    assert sorted(path.name for path in here.iterdir()) == ["large", "small"]


@pytest.mark.parametrize(("form", "package"), [("gguf:Q8_0", "gguf"), ("nf4", "bitsandbytes")])
def test_a_package_that_is_not_there_is_missed_before_weights_are_taken_out(
    form: str, package: str, runs_root: Path, here: Path, llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_recorded_run(runs_root, steps=3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(weightsout, "take_weights_out", lambda *_: pytest.fail("they were taken out"))
    answer = llmtop("quantize", "latest", "--to", form)
    assert answer.code == ExitCode.USAGE
    assert f"the package `{package}` is not installed" in answer.err
    assert "pip install -e '.[quantize]'" in " ".join(answer.err.split())
