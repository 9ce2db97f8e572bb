"""The report of a run over hosts tells of each host, in lines, as JSON and on the page."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.contents import Report
from llmtop.profiler.report.history import read_history
from llmtop.profiler.report.page import run_page
from llmtop.profiler.report.pagedata import page_of
from llmtop.profiler.report.text import render
from tests.fleets import PlayedFleet
from tests.recorded import make_recorded_run

HOSTS = 18


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> PlayedFleet:
    """A run that has ended; a link of one host is down and a rank of another failed."""
    made = PlayedFleet(tmp_path_factory.mktemp("runs"), hosts=HOSTS)
    made.start()
    made.step(3)
    made.network("node18", links_down=("eth1",))
    made.step(2)
    made.fail(6)
    made.summarise()
    made.step(1, still=frozenset({"node04"}))
    made.end("failed", "rank 6 failed", 6)
    made.close()
    return made


def test_the_worst_hosts_are_told_in_lines(fleet: PlayedFleet) -> None:
    lines = render(build_report(fleet.run), 200).splitlines()
    told = [line for line in lines[lines.index("Hosts") + 1 :] if line.startswith("  node")]
    assert len(told) == 16 and "  and 2 more hosts of which less is to be said" in lines
    (down,) = (line for line in told if line.startswith("  node18 "))
    assert "ranks 34 to 35: " in down and "GiB on rank 35" in down and down.endswith("; link eth1 is down")
    (failed,) = (line for line in told if line.startswith("  node04 "))
    assert "rank 6 failed" in failed
    assert not any("n/a of n/a" in line for line in lines), "memory is each host's own"


def test_what_stands_out_among_hosts_is_among_the_findings_once(fleet: PlayedFleet) -> None:
    report = build_report(fleet.run)
    keys = [one.key for one in report.findings]
    assert "link_down" in keys and len(keys) == len(set(keys))
    (again,) = (one for one in report.findings if one.key == "link_down")
    assert again.title == "link eth1 of host node18 is down"
    read = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert [host.name for host in read.hosts] == [f"node{n:02d}" for n in range(1, HOSTS + 1)]


def test_the_page_has_a_table_of_them(fleet: PlayedFleet) -> None:
    state, scrubber = read_state(fleet.run), Scrubber({})
    page = run_page(page_of(fleet.run, state, read_history(fleet.run), scrubber))
    assert "<th>what stands out</th>" in page and "<td>link eth1 is down</td>" in page


def test_a_run_on_one_machine_has_none(tmp_path: Path) -> None:
    report = build_report(make_recorded_run(tmp_path, steps=3))
    assert report.hosts == () and "\nHosts\n" not in render(report)
