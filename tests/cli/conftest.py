"""Every test of the command line sees its own runs folder and no presets of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from llmtop.tui.cli import main
from tests.trainer.supervised import Supervised, cleaned_up, fake_ranks


class Answer(NamedTuple):
    """What one call of the command line gave."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return msgspec.json.decode(self.out)


Llmtop = Callable[..., Answer]
Start = Callable[..., Supervised]


@pytest.fixture
def runs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "runs"
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(root))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return root


@pytest.fixture
def llmtop(runs_root: Path, capsys: pytest.CaptureFixture[str]) -> Llmtop:
    """Call the command line in this process, where neither stdin nor stdout is a terminal."""

    def call(*words: str) -> Answer:
        code = main(list(words))
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call


@pytest.fixture
def start(runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a run of a scenario of `fake_rank`; whatever is left at the end of the test is killed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def begin(scenario: str, **options: Any) -> Supervised:
        fake_ranks(monkeypatch, scenario)
        supervised = Supervised(runs_root, **options)
        started.append(supervised)
        supervised.start()
        return supervised

    with cleaned_up() as started:
        yield begin
