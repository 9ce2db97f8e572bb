"""A run whose logs are thinned, seen by every reader of a record, also while it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ui_runs import BEGAN, sample_event
from llmtop.profiler.export.archive import export_run
from llmtop.profiler.export.contents import Member
from llmtop.profiler.export.importing import import_run
from llmtop.profiler.export.packing import Packer
from llmtop.profiler.mirrors.follow import _Events
from llmtop.profiler.record.bookmark import ended_summary
from llmtop.profiler.record.bookmarking import Bookmarker
from llmtop.profiler.record.events import (
    AnyEvent,
    LogThinned,
    RankStarted,
    RunEnded,
    RunStarted,
    StepFinished,
)
from llmtop.profiler.record.feed import RunReader, read_state
from llmtop.profiler.record.recording import Cursor, LogPlace, NoSuchPlace
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import (
    Position,
    has_log,
    segments_of,
)
from llmtop.profiler.record.thinning import Bounds, thin
from llmtop.profiler.replay import Replay
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from tests.profiler.longlogs import SEGMENT, steps, write
from tests.recorded_spec import recorded_prediction, recorded_spec

OF_A_RUN = Bounds(whole=3 * SEGMENT, thinned=24 * SEGMENT)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = recorded_spec("cuda", ranks=2)
    made = RunDir.create(tmp_path / "runs", spec, recorded_prediction(spec), {})
    started: list[AnyEvent] = [
        RunStarted(t=BEGAN, run_id=made.run_id, name="x", pid=1, host="h", world_size=2, llmtop_version="0"),
        *(RankStarted(t=BEGAN, rank=rank, pid=10 + rank) for rank in (0, 1)),
    ]
    write(made.events_path("supervisor"), started, "supervisor")
    add(made, 1, 300)
    return made


def add(run: RunDir, first: int, count: int) -> None:
    for rank in (0, 1):
        write(run.events_path(rank), [*steps(first, count, rank)], f"rank{rank}")
    found: list[AnyEvent] = [sample_event(BEGAN + step, step, 2) for step in range(first, first + count)]
    write(run.events_path("hardware"), found, "hardware")


def thin_all(run: RunDir) -> None:
    for path in run.event_logs():
        thin(path, OF_A_RUN)


def test_every_view_reads_a_thinned_run(run: RunDir, tmp_path: Path) -> None:
    live = RunReader(run)
    full = live.poll()
    thin_all(run)
    assert not run.events_path(0).exists() and has_log(run.events_path(0))
    assert list(run.rank_events()) == [0, 1]
    add(run, 301, 50)
    state = live.poll()
    assert state.steps_finished == 350, "who had read it goes on"
    assert state.series.count == full.series.count + 50
    anew = read_state(run)
    assert anew.steps_finished == 350 and anew.ranks[1].steps_seen == 350
    assert anew.ranks[0].peaks == state.ranks[0].peaks and anew.skipped_lines == 0
    assert set(anew.thinned) == {"rank0", "rank1", "hardware"}
    told = " ".join(render(build_report(run), 100).split())
    assert "steps and samples before" in told and "are added up in those that stay" in told
    replay = Replay(run, lambda _: {})
    replay.read_on(60.0)
    replay.seek(BEGAN + 120)
    assert replay.state.steps_finished <= 120 < replay.state.steps_finished + 64
    replay.seek(replay.end)
    assert replay.state == anew
    end = RunEnded(t=BEGAN + 351, state="completed", reason="done")
    write(run.events_path("supervisor"), [end], "supervisor")
    export_run(run, tmp_path / "run.zip")
    imported = import_run(tmp_path / "run.zip", tmp_path / "other")
    assert read_state(imported).steps_finished == 350


def test_a_bookmark_counts_where_its_place_is_whole_and_else_not(run: RunDir) -> None:
    Bookmarker(run).finish()
    before = run.bookmark_path.read_bytes()
    thin_all(run)
    reader = RunReader(run)
    assert reader.poll().series.count == 300, "from the bookmark: none of its steps was thinned away"
    add(run, 301, 400)
    thin_all(run)
    run.bookmark_path.write_bytes(before)
    state = read_state(run)
    assert state.steps_finished == 700 and state.series.count < 700
    assert state.ranks[0].steps_seen == 700


def test_the_end_of_a_run_of_several_files_is_known_without_them(run: RunDir) -> None:
    end = RunEnded(t=BEGAN + 301, state="completed", reason="done")
    write(run.events_path("supervisor"), [end], "supervisor")
    thin_all(run)
    Bookmarker(run).finish()
    summary = ended_summary(run)
    assert summary is not None and (summary.status, summary.step) == ("completed", 300)
    add(run, 301, 1)
    assert ended_summary(run) is None


def test_a_reader_inside_what_is_thinned_begins_anew(run: RunDir) -> None:
    reader = RunReader(run)
    reader.poll(20)
    replay = Replay(run, lambda _: {})
    replay.read_on(0.0)
    place = LogPlace(Position(1, offset=0), taken=1)
    thin_all(run)
    while reader.behind:
        state = reader.poll(20)
    assert state.steps_finished == 300 and state.ranks[0].steps_seen == 300
    replay.read_on(60.0)
    assert replay.complete and replay._front_state.ranks[0].steps_seen == 300
    with pytest.raises(NoSuchPlace):
        Cursor((run.events_path(0),), (place,))


def test_a_mirror_tells_no_step_twice_where_it_is_thinned(run: RunDir) -> None:
    events = _Events(run)
    batches = events.new()
    told = next(batches)
    thin_all(run)
    told += [event for batch in batches for event in batch]
    of_rank = [event.step for event in told if isinstance(event, StepFinished) and event.src == "rank0"]
    assert of_rank == sorted(set(of_rank)) and of_rank[-1] == 300
    assert any(isinstance(event, LogThinned) for event in told)


def test_an_archive_is_made_anew_where_the_record_is_thinned_under_it(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = RunEnded(t=BEGAN + 301, state="completed", reason="done")
    write(run.events_path("supervisor"), [end], "supervisor")
    add_member = Packer.add_member

    def thinned(packer: Packer, member: Member) -> None:
        if member.name == "rank-0.1.jsonl":
            thin_all(run)
        add_member(packer, member)

    monkeypatch.setattr(Packer, "add_member", thinned)
    export_run(run, tmp_path / "run.zip")
    imported = import_run(tmp_path / "run.zip", tmp_path / "other")
    assert segments_of(imported.events_path(0)) == segments_of(run.events_path(0))
    assert read_state(imported).ranks[0].steps_seen == 300
