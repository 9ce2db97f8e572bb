"""What the documents show of the program's answers is what it answers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from llmtop.profiler.record.events import RunEnd
from tests.cli.conftest import Llmtop

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_SHOWN = re.compile(r"```sh\n(?P<commands>[^`]*)```\n\n```\n(?P<answer>[^`]*)```")


def shown_answers(*paths: Path) -> list[tuple[list[str], str]]:
    """Commands and the answer that a document shows below them, of those that only predict; by default of
    all documents."""
    blocks = [block for path in paths or DOCUMENTS for block in _SHOWN.finditer(path.read_text())]
    found = [(block["commands"].strip().splitlines(), block["answer"]) for block in blocks]
    return [(commands, answer) for commands, answer in found if all(map(_only_predicts, commands))]


def _only_predicts(command: str) -> bool:
    return command.startswith("llmtop plan ") or "--dry-run" in command


def test_there_are_answers_to_look_at() -> None:
    assert len(shown_answers()) == 3


@pytest.mark.parametrize(("commands", "answer"), shown_answers())
def test_the_documents_show_what_the_program_says(commands: list[str], answer: str, llmtop: Llmtop) -> None:
    told = " ".join(" ".join(llmtop(*shlex.split(command)[1:]).out for command in commands).split())
    for part in answer.split("...\n"):
        for line in filter(None, (" ".join(line.split()) for line in part.splitlines())):
            assert line in told, line


def test_the_tuning_guide_reckons_with_the_figures_of_its_answers(llmtop: Llmtop) -> None:
    guide = ROOT / "docs" / "tuning.md"
    (planned, _), (_, answer), _ = shown_answers(guide)
    fix = llmtop(*shlex.split(planned[0])[1:], "--offload-optimizer", "cpu", "--json").json()
    before = fix["tokens_per_second"]
    after = int(re.findall(r"([\d,]+)$", answer.splitlines()[3])[0].replace(",", ""))
    text = " ".join(guide.read_text().split())
    assert f"{after:,} instead of {before:,.0f} tokens/s, {after / before:.2f} times as fast" in text
    left = fix["device_memory_bytes"] - fix["needed_bytes"]
    assert f"The fix left {left / 2**30:.0f} GiB of each card unused" in text


def test_the_guide_to_quantizing_tells_what_a_model_would_need(llmtop: Llmtop) -> None:
    answer = llmtop("plan", "llama-3.1-8b", "--load", "--context", "8192", "--json").json()
    (row,) = [row for row in answer["forms"] if row["form"] == "gguf:Q8_0"]
    text = (ROOT / "docs" / "quantization.md").read_text()
    told = f"Llama-3.1-8B at Q8_0 is {row['weights_bytes'] / 1e9:.2f} GB, and with 8,192 tokens it fits a T4"
    assert told in text and "t4" in row["fits_on"]


def test_the_guide_to_scripts_tells_each_way_in_which_they_end() -> None:
    _, _, told = (ROOT / "docs" / "scripts.md").read_text().partition("## How it ends")
    section = told.partition("\n## ")[0]
    assert [end for end in get_args(RunEnd) if f"`{end}`" not in section] == []


def test_the_readme_tells_the_accuracy_that_was_measured() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    rows = [line.split("|") for line in (ROOT / "docs" / "accuracy.md").read_text().splitlines()]
    launched, today = (
        {cells[2].strip(): cells for cells in rows if cells[0] == "" and len(cells) == length}
        for length in (8, 13)
    )
    peak, device = launched["peak allocated"], launched["device memory"]
    mean, worst = re.findall(r"(?:mean|worst) ([\d.]+ %)", peak[4])
    assert f"the peak of {peak[6].strip()} runs" in readme
    assert f"off by {mean} on average and by {worst} at worst" in readme
    then, held_out = (
        re.findall(r"mean ([\d.]+ %)", cells[4])[0] for cells in (device, today["device memory"])
    )
    assert f"was off by {then} on average" in readme and f"it is {held_out} on runs held out" in readme
