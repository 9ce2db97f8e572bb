"""Lines for the person who looks: as wide as the terminal, and nothing that is copied is broken."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.tui.cli import main
from llmtop.tui.commandline import telling
from tests.recorded import make_recorded_run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(st.lists(st.text("abcdefg-", min_size=1, max_size=30), min_size=1), st.integers(40, 100))
def test_every_line_fits_and_no_word_is_lost(words: list[str], width: int) -> None:
    lines = telling.fit(" ".join(words), width)
    assert all(len(line) <= width for line in lines)
    assert " ".join(lines).split() == words


def test_a_command_stays_in_one_line() -> None:
    command = "llmtop attach 20261129-184500-cpu-demo-1a58"
    for width in range(44, 100):
        lines = telling.fit(f"  fix: watch it from another terminal: {command}; or leave it to itself", width)
        assert any(command in line for line in lines)
        assert all(line.startswith(" " * 7) for line in lines[1:])


def test_errors_and_notes_keep_to_the_terminal(runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    narrow = Terminal()
    monkeypatch.setattr(sys, "stderr", narrow)
    assert main(["plan", "--gpu", "cpu"]) == 2
    assert main(["plan", "--model", "llama-3.1-8b", "--zero", "7"]) == 2
    assert main(["run", "--model", "llama-3.1-70b", "--gpu", "h200", "--zero", "3"]) == 3
    text = narrow.getvalue()
    assert max(map(len, text.splitlines())) <= 60
    assert "\n  why: " in text and "weights" in text


def test_elsewhere_a_line_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    telling.tell("word " * 100)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_list_of_runs_fits_the_terminal(
    width: int, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_recorded_run(runs_root, kind="cuda")
    monkeypatch.setenv("COLUMNS", str(width))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["ls"]) == 0
    lines = terminal.getvalue().splitlines()
    assert run.run_id in lines[1] and "status" in lines[0]
    assert max(map(len, lines)) <= max(width, 60)
