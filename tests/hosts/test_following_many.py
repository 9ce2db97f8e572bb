"""A large run on another machine: its hosts come first, a rank's own log when it is asked for."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtop.profiler.fleet.part import HostPart, RankPart
from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.holding import hold
from llmtop.profiler.record.hosts import HostDir, read_hosts
from llmtop.profiler.record.remote import read_remote
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import segments_of
from llmtop.trainer.hosts import following
from llmtop.trainer.hosts.farfolder import Followed, begin_of_last, newest_of
from llmtop.trainer.hosts.following import Following
from llmtop.trainer.hosts.selection import LogsWanted, Wanted
from llmtop.trainer.hosts.twin import Kept, Twin
from tests.fleets import PlayedFleet
from tests.hosts.lab import wait_for
from tests.hosts.over_hosts import stand_in
from tests.hosts.test_link import _child_of_link, break_link

HOSTS, RANKS = 36, 2
"""More than are copied whole."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its folder of runs."""
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "near-runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(following.PYTHON, sys.executable)
    runs = tmp_path / "far-runs"
    stand_in(tmp_path, monkeypatch, more=f"export LLMTOP_RUNS_DIR={runs}")
    ssh = tmp_path / "bin" / "ssh"
    # What is killed is the far end itself.
    ssh.write_text(ssh.read_text().replace('exec sh -c "$last"', 'exec sh -c "exec $last"'))
    return runs


@pytest.fixture
def fleet(machine: Path) -> Iterator[PlayedFleet]:
    played = PlayedFleet(machine, hosts=HOSTS, ranks=RANKS)
    played.start()
    for _ in range(6):
        played.step(1)
    for rank in (0, 40):
        played.run.log_path(rank).write_text("".join(f"{rank}: line {n}\n" for n in range(2000)))
    yield played
    played.close()


@pytest.fixture
def follow() -> Iterator[Callable[..., Following]]:
    made: list[Following] = []

    def begin(wanted: Wanted = "screen") -> Following:
        made.append(Following("gpu-1", "latest", wanted))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def reader_of(run: RunDir, fleet: PlayedFleet) -> FleetReader:
    hosts = read_hosts(run)
    assert hosts is not None
    return FleetReader(run, hosts, wall=lambda: fleet.time.now, monotonic=lambda: fleet.time.now)


def steps(reader: FleetReader) -> set[int]:
    reader.poll()
    return {host.summary.step if host.summary is not None else 0 for host in reader.fleet.hosts.values()}


def rank_files(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.path.glob("rank-*"))


def alike(near: RunDir, fleet: PlayedFleet, *names: str) -> bool:
    return all(
        (near.path / name).exists()
        and (near.path / name).read_bytes() == (fleet.run.path / name).read_bytes()
        for name in names
    )


def test_hosts_come_without_their_ranks_and_a_rank_when_it_is_asked_for(
    fleet: PlayedFleet, follow: Callable[..., Following]
) -> None:
    follows = follow()
    near = follows.run
    reader = reader_of(near, fleet)
    assert steps(reader) == {6} and len(reader.fleet.hosts) == HOSTS
    assert rank_files(near) == [] and not list(near.path.glob("hosts/*/hardware*"))
    far_summary = fleet.played["node20"].dir.summary_path
    near_summary = HostDir(near.path, fleet.played["node20"].host).summary_path
    assert len(near_summary.read_bytes().splitlines()) == 3
    assert far_summary.read_bytes().endswith(near_summary.read_bytes())
    fleet.step(2)
    wait_for(lambda: steps(reader) == {8})
    host = fleet.played["node21"].host
    number = follows.bring(host, range(40, 41))
    wait_for(lambda: follows.has_come(number), lambda: follows.problem)
    assert rank_files(near) == ["rank-40.jsonl", "rank-40.log"]
    assert alike(near, fleet, "rank-40.jsonl", "rank-40.log", "hosts/node21/hardware.jsonl")
    assert read_state(RankPart(near, host, 40)).steps_finished == 8
    # What both halves had said of the hosts goes on beside it.
    fleet.step(1)
    wait_for(lambda: steps(reader) == {9} and alike(near, fleet, "rank-40.jsonl"))
    assert follows.bring(host, range(40, 41)) == number, "it comes already"
    whole = follows.bring(host, host.ranks)
    wait_for(lambda: follows.has_come(whole))
    assert set(read_state(HostPart(near, host)).ranks) == {40, 41}


def test_a_connection_that_breaks_loses_no_line_and_the_next_viewer_goes_on_from_there(
    fleet: PlayedFleet, follow: Callable[..., Following]
) -> None:
    first = follow()
    host = fleet.played["node21"].host
    asked = first.bring(host, host.ranks)
    wait_for(lambda: first.has_come(asked))
    reader = reader_of(first.run, fleet)
    for _ in range(3):
        pid = break_link()
        fleet.step(2)
        wait_for(lambda gone=pid: _child_of_link() not in (gone, 0))  # type: ignore[misc]
        wait_for(lambda: alike(first.run, fleet, "rank-40.jsonl", "rank-41.jsonl", "supervisor.jsonl"))
        wait_for(lambda: steps(reader) == {fleet.steps})
    first.close()
    kept = (first.run.path / "rank-40.jsonl").stat().st_size
    fleet.step(2)
    second = follow()
    assert second.run.path == first.run.path
    assert (second.run.path / "rank-40.jsonl").stat().st_size == kept, "nobody has asked for it yet"
    assert steps(reader_of(second.run, fleet)) == {fleet.steps}
    number = second.bring(host, range(40, 41))
    wait_for(lambda: second.has_come(number))
    assert alike(second.run, fleet, "rank-40.jsonl")
    added = (fleet.run.path / "rank-40.jsonl").stat().st_size - kept
    assert 0 < second._link.came_bytes < added + 64 * 1024, "what was here is not sent again"


def test_a_host_whose_summaries_go_on_in_another_file_stays_in_sight(
    fleet: PlayedFleet, follow: Callable[..., Following]
) -> None:
    for played in fleet.played.values():
        played.summariser._writer._segment_bytes = 4000
    follows = follow()
    reader = reader_of(follows.run, fleet)
    for _ in range(12):
        fleet.step(1)
        wait_for(lambda: steps(reader) == {fleet.steps})
    path = HostDir(follows.run.path, fleet.played["node20"].host).summary_path
    newest = segments_of(fleet.played["node20"].dir.summary_path).newest
    assert newest >= 3
    wait_for(lambda: [one.name for one in path.parent.glob("summary*")] == [f"summary.{newest}.jsonl"])


def test_lines_of_a_large_run_are_told_from_its_first_host(
    fleet: PlayedFleet, follow: Callable[..., Following]
) -> None:
    near = follow("lines").run
    assert rank_files(near) == ["rank-0.jsonl", "rank-0.log", "rank-1.jsonl"]
    assert alike(near, fleet, "rank-0.jsonl", "rank-1.jsonl", "supervisor.jsonl")


def test_logs_alone_come_and_of_them_the_end_where_that_is_asked_for(
    fleet: PlayedFleet, follow: Callable[..., Following], tmp_path: Path
) -> None:
    first = follow(LogsWanted(rank=40, tail=3))
    ends = first.run
    assert rank_files(ends) == ["rank-40.log"] and not list(ends.path.glob("hosts/*/summary*"))
    assert (ends.path / "rank-40.log").read_text() == "".join(f"40: line {n}\n" for n in (1997, 1998, 1999))
    assert not ends.path.is_relative_to(tmp_path / "cache"), "a whole copy would begin in its middle"
    first.close()
    none = follow(LogsWanted(rank=40, tail=0)).run
    assert rank_files(none) == []
    with fleet.run.log_path(40).open("a") as file:
        file.write("new\n")
    wait_for(lambda: rank_files(none) == ["rank-40.log"] and none.log_path(40).read_text() == "new\n")
    break_link()
    with fleet.run.log_path(40).open("a") as file:
        file.write("y" * 99_999 + "\n")
    wait_for(lambda: none.log_path(40).read_text() == "new\n" + "y" * 99_999 + "\n")
    every = follow(LogsWanted()).run
    assert rank_files(every) == ["rank-0.log", "rank-40.log"]
    assert alike(every, fleet, "rank-0.log", "rank-40.log")


def test_a_small_run_over_hosts_comes_whole(machine: Path, follow: Callable[..., Following]) -> None:
    small = PlayedFleet(machine, hosts=3)
    small.start()
    small.step(3)
    near = follow().run
    names = [f"rank-{rank}.jsonl" for rank in range(6)]
    assert alike(near, small, *names, "hosts/node02/hardware.jsonl", "hosts/node03/summary.jsonl")
    small.close()


def test_how_the_connection_is_stands_in_the_folder(
    fleet: PlayedFleet, follow: Callable[..., Following]
) -> None:
    follows = follow()
    told = read_remote(follows.run.path)
    assert told is not None and told.connected and told.away_words(0.0) == ""
    (fleet.run.path.parent.parent / "notes" / "unreachable-gpu-1").touch()
    break_link()

    def away() -> str:
        told = read_remote(follows.run.path)
        return told.away_words((told.lost_at or 0.0) + 12.0) if told is not None else ""

    wait_for(lambda: "No route to host" in away())
    assert away().startswith("no connection to gpu-1 for 12.0 s: ") and follows.problem
    (fleet.run.path.parent.parent / "notes" / "unreachable-gpu-1").unlink()
    wait_for(lambda: away() == "")


# --- the parts of it --------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["\n", ""])
@pytest.mark.parametrize("part_bytes", [1, 3, 1 << 18])
def test_where_the_last_lines_begin(
    tmp_path: Path, ending: str, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtop.trainer.hosts.farfolder.PART_BYTES", part_bytes)
    lines = ["one", "", "three", "four"]
    (tmp_path / "log").write_text("\n".join(lines) + ending)
    for count in range(6):
        with (tmp_path / "log").open("rb") as file:
            begin = begin_of_last(file, count)
        rest = (tmp_path / "log").read_text()[begin:]
        assert rest == ("\n".join(lines[-count:]) + ending if count else "")


def test_of_numbered_files_the_newest_is_followed() -> None:
    names = ["h/s.jsonl", "h/s.2.jsonl", "h/s.10.jsonl", "h/s.until-9.jsonl", "i/s.jsonl", "rank-3.log", "x"]
    assert newest_of(names) == ["h/s.10.jsonl", "i/s.jsonl", "rank-3.log"]


def test_another_selection_on_a_standing_connection_repeats_and_loses_nothing(tmp_path: Path) -> None:
    """What is on its way while the far half is told anew comes once more, and is passed over."""
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    near.mkdir()
    (far / "a.jsonl").write_text("one\n")
    twin = Twin(near, Kept(grow=("a.jsonl",)))
    waiting: list[tuple[dict[str, object], bytes]] = []

    def look(message: dict[str, object]) -> None:
        followed = Followed(far, *(message[name] for name in ("grow", "last", "whole", "have")))  # type: ignore[arg-type]
        followed.look(lambda told, body=b"": waiting.append((told, body)), lambda: False)

    look(twin.follow_message())
    with (far / "a.jsonl").open("a") as file:
        file.write("two\n")
    twin.kept = Kept(grow=("a.jsonl", "b.jsonl"))
    (far / "b.jsonl").write_text("b\n")
    look(twin.follow_message())
    for told, body in waiting:
        twin.take(told, body)
    assert (near / "a.jsonl").read_text() == "one\ntwo\n" and (near / "b.jsonl").read_text() == "b\n"


def test_documents_come_again_only_where_they_were_replaced(tmp_path: Path) -> None:
    far, near = tmp_path / "far", tmp_path / "near"
    (far / "snapshots").mkdir(parents=True)
    (far / "spec.json").write_text("{}")
    (far / "snapshots" / "big.pickle").write_bytes(b"x" * 5000)
    kept = Kept(whole=("*.json", "snapshots/*"))

    def come(twin: Twin) -> list[str]:
        told: list[tuple[dict[str, Any], bytes]] = []
        message = json.loads(json.dumps(twin.follow_message()))
        parts = [message[name] for name in ("grow", "last", "whole", "have", "newest", "seen")]
        Followed(far, *parts).look(lambda said, body=b"": told.append((said, body)), lambda: False)
        for said, body in told:
            twin.take(said, body)
        return [said["path"] for said, _ in told]

    assert come(Twin(near, kept)) == ["snapshots/big.pickle", "spec.json"]
    assert come(Twin(near, kept)) == [], "also of who looks another day"
    (far / "spec.json").write_text("[]")
    assert come(Twin(near, kept)) == ["spec.json"]
    assert (near / "spec.json").read_text() == "[]"


def test_copies_that_nobody_looks_at_any_more_are_removed(
    fleet: PlayedFleet, follow: Callable[..., Following], tmp_path: Path
) -> None:
    cache = tmp_path / "cache" / "llmtop" / "remote"
    old, new, held = (cache / "ab12" / name for name in ("old-run", "new-run", "held-run"))
    for folder in (old, new, held):
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text("{}")
    month = 31 * 86400.0
    for folder in (old, held):
        os.utime(folder, (time.time() - month, time.time() - month))
    with hold(held, AssertionError):  # type: ignore[arg-type]
        follow()
    assert not old.exists() and new.exists() and held.exists()
