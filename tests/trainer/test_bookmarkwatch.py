"""The bookmark of a run is a cache: whatever happens while it is kept, the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.profiler.record.bookmark import read_bookmark
from llmtop.profiler.record.bookmarking import Bookmarker
from llmtop.trainer.supervisor.bookmarkwatch import BookmarkWatch
from tests.recorded import make_recorded_run


def test_a_bug_in_it_is_told_once_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Bookmarker) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Bookmarker, "turn", broken)
    run, told = make_recorded_run(tmp_path), list[str]()
    watch = BookmarkWatch(run, told.append)
    watch.turn()
    watch.turn()
    watch.finish()
    assert len(told) == 1 and "KeyError: 'a bug'" in told[0]
    assert read_bookmark(run) is None
