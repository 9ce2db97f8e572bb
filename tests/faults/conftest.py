"""Runs of fake ranks under real supervisors, to do harm to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.supervised import Supervised, cleaned_up, fake_ranks

Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a run of a scenario of `fake_rank`, in `root` if that is given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)

    def begin(scenario: str, root: Path | None = None, *, graces: str = "", **options: object) -> Supervised:
        fake_ranks(monkeypatch, scenario, graces)
        supervised = Supervised(root or tmp_path / "runs", **options)  # type: ignore[arg-type]
        started.append(supervised)
        supervised.start()
        return supervised

    with cleaned_up() as started:
        yield begin
