"""The readers behind the screens, without any screen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmtop.profiler.record.feed import read_state
from llmtop.profiler.report.build import build_report
from llmtop.tui.feeds import runsfeed
from llmtop.tui.feeds.feed import LOOK_SECONDS, follow_run
from llmtop.tui.feeds.monitorfeed import KEPT_LINES, LogTail, MonitorFeed
from llmtop.tui.feeds.runsfeed import RunsFeed, run_row
from llmtop.tui.screenshot import write_monitor_svg, write_plan_svg
from tests.recorded import ManualClock, make_recorded_run
from tests.tui.tuiruns import LiveRun


def test_log_tail_keeps_the_newest_lines_and_the_unfinished_one(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    tail = LogTail(path, "rank 0")
    assert tail.poll() is None
    path.write_bytes(b"one\ntw")
    text = tail.poll()
    assert text is not None and text.lines == ("one", "tw")
    assert tail.poll() is None
    with path.open("ab") as file:
        file.write(b"o\n\xff\xfe\n")
    text = tail.poll()
    assert text is not None and text.lines == ("one", "two", "\ufffd\ufffd")
    path.write_text("".join(f"{number}\n" for number in range(300_000)))
    text = tail.poll()
    assert text is not None and len(text.lines) == KEPT_LINES
    while (more := tail.poll()) is not None:
        text = more
    assert text.lines[-1] == "299999"


def test_log_tail_of_a_huge_file_reads_only_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"x" * 100 + b"\n" + b"".join(b"%d\n" % number for number in range(400_000)))
    text = LogTail(path, "rank 0").poll()
    assert text is not None and text.lines[-1] == "399999" and text.total_lines < 200_000


def test_log_tail_starts_again_when_the_file_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("before\n")
    tail = LogTail(path, "rank 0")
    tail.poll()
    path.write_text("new\n")
    text = tail.poll()
    assert text is not None and text.lines[-1] == "new"


def test_monitor_feed_gives_a_view_only_when_something_came(live: LiveRun) -> None:
    feed = MonitorFeed(live.run)
    view = feed.poll()
    assert view is not None and view.state.steps_finished == 20
    assert view.breakdown.actual_peak_bytes is not None
    assert feed.poll() is None
    live.steps(21, 21)
    view = feed.poll()
    assert view is not None and view.state.steps_finished == 21
    assert not feed.ended


def test_monitor_feed_changes_the_log(live: LiveRun) -> None:
    feed = MonitorFeed(live.run)
    first = feed.poll_log()
    assert first is not None and first.source == "rank 0"
    assert feed.poll_log() is None
    feed.choose_log("supervisor")
    second = feed.poll_log()
    assert second is not None and second.source == "supervisor" and second.lines == ()
    feed.choose_log(0)
    assert feed.poll_log() == first


def test_a_log_comes_with_the_view_that_is_due(live: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by itself where there is nothing else to paint."""
    clock, stop, told = ManualClock(0.0), threading.Event(), list[tuple[float, str]]()
    monkeypatch.setattr("llmtop.tui.feeds.feed.time.monotonic", lambda: clock.now)
    lines = live.run.log_path(0).open("a")

    def both() -> None:
        live.steps(21, 21)
        lines.write("with a step\n")

    # The first half a second after the view with which it begins.
    looks = [both, lambda: None, lambda: lines.write("alone\n"), lambda: None, stop.set]

    class Woken(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == LOOK_SECONDS
            clock.advance(LOOK_SECONDS)
            looks.pop(0)()
            lines.flush()
            return False

    with lines:
        follow_run(
            MonitorFeed(live.run),
            lambda message: told.append((clock.now, type(message).__name__)),
            stop,
            Woken(),
        )
    assert told == [
        (0.0, "ViewArrived"),
        (0.0, "LogArrived"),
        (1.0, "ViewArrived"),
        (1.0, "LogArrived"),
        (1.5, "LogArrived"),
    ]


def test_runs_feed_reads_an_ended_run_once(root: Path) -> None:
    ended = make_recorded_run(root, steps=4)
    feed = RunsFeed(root)
    (rows,) = feed.scan()
    assert [row.status for row in rows] == ["completed"]
    for path in ended.path.glob("*.jsonl"):
        path.unlink()
    (rows,) = feed.scan()
    assert [(row.status, row.step) for row in rows] == [("completed", 4)]


def test_runs_feed_reads_a_run_that_goes_on_after_its_end(root: Path) -> None:
    """By a log that grows, by a supervisor that is new, and whatever is there when all is read anew."""
    run = LiveRun(root)
    run.start()
    run.steps(1, 3)
    run.run.supervisor_pid_path.unlink()
    os.utime(run.run.spec_path, (0, 0))  # it was made long ago
    feed = RunsFeed(root)

    def told() -> tuple[str, int | None]:
        *_, (row,) = feed.scan()
        return row.status, row.step

    assert told() == ("lost", 3)
    run.steps(4, 4)
    assert told() == ("lost", 4)
    run.run.write_supervisor_pid()
    assert told() == ("running", 4)
    run.end("failed", "rank 1 was killed")
    assert told() == ("failed", 4)
    run.recorder.start()
    run.steps(4, 5)
    assert told() == ("running", 5)
    run.end("completed", "all done")
    assert told() == ("completed", 5)
    run.close()
    for path in run.run.path.glob("*.jsonl"):
        path.write_bytes(b"")
    assert told() == ("completed", 5)
    feed.read_anew()
    assert told() == ("starting", 0)


def test_runs_feed_gives_a_long_list_in_growing_parts(root: Path) -> None:
    for _ in range(20):
        make_recorded_run(root, steps=1)
    parts = list(RunsFeed(root).scan())
    assert [len(rows) for rows in parts] == [16, 20]


def test_runs_feed_shows_a_long_record_before_it_reads_the_next(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runsfeed, "_BYTES_A_BATCH", 1)
    for _ in range(3):
        make_recorded_run(root, steps=1)
    feed = RunsFeed(root)
    assert [len(rows) for rows in feed.scan()] == [1, 2, 3, 3]
    assert [len(rows) for rows in feed.scan()] == [3], "nothing is new"


def test_pictures_are_written_by_the_app_itself(live: LiveRun, tmp_path: Path) -> None:
    write_monitor_svg(live.run, tmp_path / "monitor.svg", columns=80, rows=24)
    picture = (tmp_path / "monitor.svg").read_text()
    assert picture.startswith("<svg") and "20/60" in picture and "tiny-llama" in picture
    write_plan_svg("test-8b", tmp_path / "plan.svg")
    assert "llama-3.1-8b" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize("first", ["runs", "plan", "monitor", "help"])
def test_no_screen_loads_torch_or_plots_to_be_there(first: str, tmp_path: Path) -> None:
    code = (
        f"import sys; import llmtop.tui.app, llmtop.tui.screens.{first}\n"
        "print([n for n in ('torch', 'deepspeed', 'transformers', 'numpy', 'plotext') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_list_and_the_report_give_the_same_speed(root: Path) -> None:
    run = make_recorded_run(root, steps=9)
    listed = run_row(run, read_state(run)).tokens_per_second
    assert listed == pytest.approx(build_report(run).tokens_per_second)


def test_the_list_has_no_speed_of_the_processes_before(root: Path) -> None:
    live = LiveRun(root, steps=20)
    live.start()
    live.steps(1, 6)
    live.end("stopped", "asked")
    assert run_row(live.run, read_state(live.run)).tokens_per_second is not None
    live.go_on(after=6)
    live.recorder.steady_seconds *= 4
    assert run_row(live.run, read_state(live.run)).tokens_per_second is None
    live.steps(7, 11)
    live.close()
    state = read_state(live.run)
    newest = state.series.tokens_per_second[-1]
    assert newest is not None
    assert run_row(live.run, state).tokens_per_second == pytest.approx(newest, rel=0.2)
