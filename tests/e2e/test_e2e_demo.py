"""The whole way once: predict, train two ranks under ZeRO-2 on real text, report."""

from __future__ import annotations

import stat

import msgspec
import pytest

from llmtop.profiler.report.contents import Report
from tests.e2e.conftest import Demo
from tests.trust.guard import sent

pytestmark = pytest.mark.slow


def test_the_demo_tells_what_it_does_and_ends_well(demo: Demo) -> None:
    assert demo.done.returncode == 0, demo.done.stderr[-3000:]
    assert "verdict: fits" in demo.done.stderr
    assert "step 60/60" in demo.done.stderr
    assert demo.run.run_id in demo.done.stdout
    spec = demo.run.spec()
    assert (spec.world_size, spec.options.zero, spec.gpu.kind) == (2, 2, "cpu")


def test_it_turns_to_no_other_machine_and_leaves_its_folder_to_its_owner(demo: Demo) -> None:
    """It would fail as well if it needed a network."""
    assert demo.done.returncode == 0 and sent(demo.env) == ""
    folders = [demo.run.path, *(path for path in demo.run.path.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_it_learns(demo: Demo) -> None:
    report = _report(demo)
    assert report.steps_finished >= 60
    assert report.first_loss is not None and report.last_loss is not None
    assert report.last_loss < 0.7 * report.first_loss


def test_the_report_adds_up_and_explains_the_peak(demo: Demo) -> None:
    report = _report(demo)
    assert report.actual_peak_bytes is not None and report.unexplained_bytes is not None
    inside = [row for row in report.components if row.in_peak]
    assert {row.component for row in inside} >= {"parameters", "optimizer_state", "activations", "runtime"}
    assert all(row.predicted_bytes is not None and row.actual_bytes is not None for row in inside)
    actual = sum(row.actual_bytes or 0 for row in inside)
    assert actual + report.unexplained_bytes == report.actual_peak_bytes
    assert abs(report.unexplained_bytes) < 0.15 * report.actual_peak_bytes


def test_what_was_in_use_is_as_predicted_and_what_the_heap_kept_lies_beside_it(demo: Demo) -> None:
    report = _report(demo)
    assert report.actual_peak_bytes is not None
    assert report.actual_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.03)
    (kept,) = [row for row in report.components if not row.in_peak]
    assert kept.component == "fragmentation" and kept.actual_bytes is not None
    held = {rank.rank: rank.peak_rss_bytes or 0 for rank in report.ranks}
    assert report.actual_peak_bytes + kept.actual_bytes in held.values()


def test_the_run_is_listed_and_its_logs_are_kept(demo: Demo) -> None:
    assert demo.run.run_id in demo.llmtop("ls").stdout
    assert demo.llmtop("logs", "latest").returncode == 0
    assert demo.llmtop("stop", "latest").stdout.startswith(f"run {demo.run.run_id} had ended: completed")


def _report(demo: Demo) -> Report:
    answer = demo.llmtop("report", "latest", "--json")
    assert answer.returncode == 0, answer.stderr
    return msgspec.json.decode(answer.stdout, type=Report)
