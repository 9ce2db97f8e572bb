"""Signs of life in a folder tell how far the clock of a host is ahead, and how sure that is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from llmtop.profiler.record.hosts import lead_beat_path
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.hosts.beat import HostSign, LeadBeat, LeadSign, SignClock, lead_sign

AHEAD = 3 * 3600.0


class Folder:
    """What a lead and a host write, as time passes by hand."""

    def __init__(self, path: Path) -> None:
        self.now = 1000.0
        self._path = lead_beat_path(RunDir(path))
        self.lead = LeadBeat(RunDir(path), wall=lambda: self.now)
        self.clock = SignClock(self.lead, wall=lambda: self.now)

    def lead_gives(self) -> LeadSign:
        self.lead._due = 0.0
        self.lead.turn()
        return lead_sign(self._path.read_bytes())

    def host_answers(self, heard: LeadSign) -> bytes:
        return msgspec.json.encode(HostSign(t=self.now + AHEAD, heard=heard))


def test_the_true_difference_is_never_farther_away_than_what_is_said(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for hears_after, seen_after in ((3.0, 0.1), (0.0, 30.0), (0.4, 0.1), (9.0, 9.0)):
        heard = folder.lead_gives()
        folder.now += hears_after
        answer = folder.host_answers(heard)
        folder.now += seen_after
        folder.clock.see(answer)
        folder.now += 5.0
        folder.clock.see(answer)
        told = folder.clock.clock
        assert told is not None and abs(told.offset_seconds - AHEAD) <= told.error_seconds + 1e-6
    assert folder.clock.clock is not None
    assert folder.clock.clock.error_seconds == pytest.approx(0.25), "the shortest of them"


def test_what_answers_no_sign_of_this_start_tells_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.lead_gives()
    for answer in (folder.host_answers(LeadSign("another", 1)), folder.host_answers(LeadSign()), b"{", b""):
        folder.clock.see(answer)
    assert folder.clock.clock is None
    heard = folder.lead_gives()
    folder.now -= 60.0
    folder.clock.see(folder.host_answers(heard))
    assert folder.clock.clock is None, "the clock here was set meanwhile"
