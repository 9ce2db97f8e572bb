"""Every test of the command line sees its own runs folder and no presets of the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from llmtop.tui.cli import main


class Answer(NamedTuple):
    """What one call of the command line gave."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return msgspec.json.decode(self.out)


Llmtop = Callable[..., Answer]


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
