"""What most tests of hosts take place in: the lab, or hosts that are all this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.in_lab import tidy_lab
from tests.hosts.lab import Lab
from tests.hosts.over_hosts import GRACES, OverHosts, Start, fake_ranks, stand_in
from tests.trainer.supervised import cleaned_up


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with tidy_lab(tmp_path) as made:
        yield made


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A started run; its ranks play a scenario of `fake_rank`."""
    stand_in(tmp_path, monkeypatch)
    with cleaned_up() as started:

        def make(scenario: str, *, graces: str = GRACES, **options: Any) -> OverHosts:
            fake_ranks(monkeypatch, scenario, graces)
            made = OverHosts(tmp_path / "runs", **options)
            started.append(made)
            made.start()
            return made

        yield make
