"""The port that the ranks of a run meet at."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llmtop.trainer.supervisor import rankenv


def _ports_given_to_anyone(monkeypatch: pytest.MonkeyPatch, folder: Path, words: str) -> None:
    told = folder / "range"
    told.write_text(words)
    monkeypatch.setattr(rankenv, "_EPHEMERAL_PORTS", told)


def test_it_is_none_that_the_kernel_hands_out_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _ports_given_to_anyone(monkeypatch, tmp_path, "20000\t60999\n")
    found = {rankenv.free_port() for _ in range(50)}
    assert all(1024 <= port < 20000 for port in found)
    assert len(found) > 1, "runs that start together must not meet"


def test_one_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(rankenv, "_FIRST_UNPRIVILEGED_PORT", port)
        _ports_given_to_anyone(monkeypatch, tmp_path, f"{port + 1} 60999")
        assert rankenv.free_port() != port


@pytest.mark.parametrize("words", ["", "odd", "1024 65535"])
def test_where_every_port_may_be_handed_out_any_free_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    _ports_given_to_anyone(monkeypatch, tmp_path, words)
    with socket.socket() as probe:
        probe.bind(("", rankenv.free_port()))
