"""The commands that look at runs, on recorded ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode
from llmtop.profiler.fold.rankstate import RankState, StageTime
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir, list_runs
from llmtop.trainer.control import wait_for_end
from llmtop.trainer.supervisor import rankenv
from llmtop.tui.commands import attach, stop
from llmtop.tui.commands.follow import QUIET_SECONDS, Narrator
from llmtop.tui.commands.plain import PlainTeller
from llmtop.tui.feeds.runsfeed import run_row
from llmtop.tui.widgets.runcolumns import COLUMNS
from tests.cli.conftest import Llmtop
from tests.recorded import make_recorded_run
from tests.recorded_spec import recorded_spec
from tests.tui.tuiruns import LiveRun


@pytest.fixture
def completed(runs_root: Path) -> RunDir:
    return make_recorded_run(runs_root, steps=12)


def test_ls_lists_runs_newest_first(llmtop: Llmtop, runs_root: Path) -> None:
    first = make_recorded_run(runs_root, steps=3, end="failed")
    second = make_recorded_run(runs_root, steps=5)
    runs = llmtop("ls", "--json").json()["runs"]
    assert [line["run_id"] for line in runs] == [second.run_id, first.run_id]
    assert [line["status"] for line in runs] == ["completed", "failed"]
    assert (runs[0]["step"], runs[0]["steps"], runs[0]["world_size"]) == (5, 5, 2)
    text = llmtop("ls").out
    assert all(run.run_id in text for run in (first, second))


def test_ls_knows_a_run_from_a_machine(llmtop: Llmtop, completed: RunDir) -> None:
    for ref in (completed.run_id, completed.run_id[-4:], "latest"):
        answer = llmtop("ls", ref)
        assert answer.code == ExitCode.USAGE and f"'{ref}' is a run" in answer.err
        assert f"llmtop report {ref}" in answer.err
    assert "'elsewhere' is no machine" in llmtop("ls", "elsewhere").err


def test_ls_without_runs_says_how_to_start_one(llmtop: Llmtop) -> None:
    answer = llmtop("ls")
    assert (answer.code, answer.out) == (ExitCode.DONE, "")
    assert "llmtop demo" in answer.err
    assert llmtop("ls", "--json").json()["runs"] == []


def test_a_file_where_the_runs_should_be_is_told_as_one(
    llmtop: Llmtop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "README.md"
    file.write_text("# text")
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(file))
    for words in (("ls",), ("report", "latest"), ("tune", "--resume", "latest")):
        answer = llmtop(*words)
        assert answer.code == ExitCode.USAGE and "README.md is not a folder" in answer.err, words


def test_ls_shows_a_damaged_run_and_goes_on(llmtop: Llmtop, completed: RunDir, runs_root: Path) -> None:
    damaged = make_recorded_run(runs_root, steps=3)
    damaged.spec_path.write_text("{")
    answer = llmtop("ls", "--json")
    by_id = {line["run_id"]: line for line in answer.json()["runs"]}
    assert by_id[damaged.run_id]["status"] == "unreadable"
    assert by_id[damaged.run_id]["steps"] is None
    assert by_id[completed.run_id]["status"] == "completed"
    assert str(damaged.spec_path) in answer.err
    assert damaged.run_id in llmtop("ls").out


@pytest.mark.parametrize("log", ["rank-0", "supervisor", "hardware"])
def test_a_log_that_cannot_be_read_takes_no_view_down(
    log: str, llmtop: Llmtop, completed: RunDir, runs_root: Path
) -> None:
    damaged = make_recorded_run(runs_root, steps=3)
    path = damaged.path / f"{log}.jsonl"
    path.unlink()
    path.mkdir()
    (path / "something").touch()
    by_id = {line["run_id"]: line for line in llmtop("ls", "--json").json()["runs"]}
    assert by_id[completed.run_id]["status"] == "completed"
    assert damaged.run_id in by_id
    report = llmtop("report", damaged.run_id, "--json")
    assert report.code == ExitCode.DONE
    assert report.json()["skipped_lines"] == 1
    assert damaged.run_id in llmtop("report", damaged.run_id).out


@pytest.mark.parametrize("command", ["attach", "logs", "stop", "report"])
def test_an_unknown_run_names_the_nearest(command: str, llmtop: Llmtop, completed: RunDir) -> None:
    answer = llmtop(command, completed.run_id[:-1] + "zz")
    assert answer.code == ExitCode.USAGE
    assert completed.run_id in answer.err


def test_logs_name_the_rank_of_each_line(llmtop: Llmtop, completed: RunDir) -> None:
    out = llmtop("logs", "latest").out.splitlines()
    kept = {rank: completed.log_path(rank).read_text().splitlines() for rank in (0, 1)}
    assert out == [f"[rank {rank}] {line}" for rank in kept for line in kept[rank]]
    one = llmtop("logs", "latest", "--rank", "1").out
    assert one.splitlines() == kept[1] != []


def test_logs_follow_an_ended_run_to_its_torn_last_line(llmtop: Llmtop, completed: RunDir) -> None:
    with completed.log_path(1).open("ab") as log:
        log.write(b"no newline \xff at the end")
    answer = llmtop("logs", completed.run_id, "--rank", "1", "--follow")
    assert answer.out.splitlines()[-1] == "no newline \N{REPLACEMENT CHARACTER} at the end"


def test_logs_of_a_rank_that_is_not(llmtop: Llmtop, completed: RunDir) -> None:
    answer = llmtop("logs", "latest", "--rank", "2")
    assert answer.code == ExitCode.USAGE
    assert "use 0 to 1" in answer.err


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("completed", ExitCode.DONE, "completed after step 4"),
        ("stopped", ExitCode.DONE, "stopped after step 4"),
        ("failed", ExitCode.JOB_FAILED, "rank 0 was killed by SIGKILL"),
        ("out_of_memory", ExitCode.OUT_OF_MEMORY, "rank 0 ran out of device memory"),
    ],
)
def test_attach_headless_ends_as_the_run_did(
    end: str, code: ExitCode, told: str, llmtop: Llmtop, runs_root: Path
) -> None:
    make_recorded_run(runs_root, steps=4, end=end)  # type: ignore[arg-type]
    answer = llmtop("attach", "latest", "--headless")
    assert (answer.code, answer.out) == (code, "")
    assert "step 4/4" in answer.err
    assert told in answer.err


def test_looking_at_a_process_says_that_it_goes_on_and_how_it_ends(
    llmtop: Llmtop, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = "import sys; sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE)
    # The monitor is left at once.
    monkeypatch.setattr(attach, "can_draw", lambda: True)
    monkeypatch.setattr(attach, "watch", lambda run, *, read_only: ExitCode.DONE)
    try:
        left = llmtop("attach", "--pid", str(process.pid))
        (run,) = list_runs(runs_root)
        assert left.code == ExitCode.DONE and run.supervisor_alive()
        told = " ".join(left.err.split())
        assert f"run {run.run_id} looks at process {process.pid} until that ends, also when you have" in told
        assert f"llmtop stop {run.run_id} ends the looking and leaves the process alone" in told
        assert llmtop("stop", "latest").code == ExitCode.DONE and process.poll() is None
        # Lines may be ended in any way, so they begin with it.
        monkeypatch.setattr(attach, "follow_to_end", watched := Mock(return_value=ExitCode.DONE))
        lines = llmtop("attach", "--pid", str(process.pid), "--headless")
        (second,) = (one for one in list_runs(runs_root) if one.run_id != run.run_id)
        assert watched.called and f"llmtop stop {second.run_id}" in " ".join(lines.err.split())
    finally:
        process.communicate()
        for one in list_runs(runs_root):
            assert wait_for_end(one, 60.0) is not None
    # No such words of a run that is named.
    assert "looks at process" not in llmtop("attach", second.run_id, "--headless").err


@pytest.fixture
def lost(runs_root: Path) -> RunDir:
    """The recorded run's supervisor is a process that has ended by now."""
    run = make_recorded_run(runs_root, steps=2, end=None)
    gone = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    run.write_supervisor_pid(gone.pid)
    gone.communicate()
    return run


def test_attach_to_a_run_whose_supervisor_is_gone(llmtop: Llmtop, lost: RunDir) -> None:
    answer = llmtop("attach", "latest", "--headless")
    assert answer.code == ExitCode.JOB_FAILED
    assert "lost" in answer.err


def test_stop_says_how_an_ended_run_had_ended(llmtop: Llmtop, completed: RunDir) -> None:
    answer = llmtop("stop", "latest")
    assert answer.code == ExitCode.DONE
    assert answer.out == f"run {completed.run_id} had ended: completed: all ranks finished all steps\n"


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
def test_stop_ends_what_a_lost_run_left(
    handler: str, llmtop: Llmtop, lost: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "TERM_SECONDS", 10.0 if handler == "SIG_DFL" else 0.3)
    program = (
        f"import signal, sys; signal.signal(signal.SIGTERM, signal.{handler});"
        " print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, rankenv.RUN_ID: lost.run_id},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        answer = llmtop("stop", "latest")
        process.wait(30)
    assert answer.code == ExitCode.DONE
    assert f"ending what is left of it: {process.pid}" in answer.out
    assert answer.out.endswith("no process is left\n")
    assert ("did not end when asked" in answer.err) == (handler == "SIG_IGN")


def test_processes_of_a_run_are_found_by_their_mark(completed: RunDir) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        env={**os.environ, rankenv.RUN_ID: completed.run_id},
    ) as process:
        assert stop.processes_left(completed) == [process.pid]
    assert stop.processes_left(completed) == []


def test_report_json_has_predicted_and_actual_by_component(llmtop: Llmtop, completed: RunDir) -> None:
    answer = llmtop("report", "latest", "--json")
    assert answer.code == ExitCode.DONE
    report = answer.json()
    inside = [row for row in report["components"] if row["in_peak"]]
    assert all(row["predicted_bytes"] is not None for row in inside)
    actual = sum(row["actual_bytes"] for row in inside)
    assert actual + report["unexplained_bytes"] == report["actual_peak_bytes"]
    assert completed.run_id in llmtop("report", "latest").out


def test_a_run_that_goes_on_stands_where_its_new_processes_stand(llmtop: Llmtop, runs_root: Path) -> None:
    """In lists, in lines, for who follows it and for a snapshot: where it had been counts no more."""
    live = LiveRun(runs_root)
    live.start()
    live.steps(1, 9)
    live.save(4)
    live.end("stopped", "asked to")
    narrator, teller = Narrator(live.spec), PlainTeller(live.run)

    def listed() -> tuple[object, int | None, str]:
        (line,) = llmtop("ls", "--json").json()["runs"]
        row = run_row(live.run, read_state(live.run))
        (shown,) = (column.text(row, 0.0) for column in COLUMNS if column.title == "step")
        assert row.step == line["step"]
        assert shown in llmtop("ls").out
        return line["status"], row.step, shown

    def told() -> tuple[str, list[str]]:
        state = read_state(live.run)
        return next(iter(teller.lines(state, 0.0))), list(narrator.lines(state, 0.0))

    assert listed() == ("stopped", 9, "9/60")
    assert "step 9/60" in told()[0]
    live.go_on()
    assert listed() == ("starting", None, "n/a")
    assert llmtop("ls", "--json").json()["runs"][0]["last_loss"] is None, "it was that of step 9"
    usage = " ".join(llmtop("ls", "--help").out.split())
    assert "null is not known: so are step and last_loss of a run that goes on again" in usage
    plain, followed = told()
    assert "step n/a  loss n/a  memory" in plain
    assert followed == ["starting: first step"]
    live.load(4)
    assert listed() == ("starting", 4, "4/60")
    # One of before the steps that it had made would be refused by where it had been.
    assert llmtop("snapshot", "latest", "--what", "modules", "--step", "7", "--dry-run").code == ExitCode.DONE
    assert "after step 4/60  loss n/a" in told()[0]
    live.steps(5, 5)
    assert listed() == ("running", 5, "5/60")
    plain, followed = told()
    assert "step 5/60  loss 6." in plain
    assert [line.partition("  ")[0] for line in followed] == ["step 5/60"]
    live.steps(6, 6)
    live.end("stopped", "asked to")
    assert listed() == ("stopped", 6, "6/60")
    told()
    live.go_on(after=4)
    assert listed() == ("starting", 4, "4/60")
    assert "after step 4/60  loss n/a" in told()[0], "its supervisor has found that one"
    live.end("failed", "no room")
    assert listed() == ("failed", 4, "4/60")
    assert not [line for line in told()[1] if line.startswith("step ")], "it has made none"
    assert llmtop("report", "latest", "--json").json()["steps_finished"] == 4
    live.close()


def test_the_narrator_says_each_thing_once() -> None:
    narrator = Narrator(recorded_spec(steps=100))

    def told(state: RunState, now: float) -> list[str]:
        return list(narrator.lines(state, now))

    starting = RunState(ranks={0: RankState(rank=0, stages=(StageTime(stage="process_group", began=0.0),))})
    assert told(starting, 0.0) == ["starting: process group"]
    assert told(starting, 1.0) == []
    compiling = replace(starting, compiling="cpu_adam")
    assert [line.split(":")[0] for line in told(compiling, 2.0)] == ["compiling cpu_adam"]
    assert told(compiling, 3.0) == []
    stepped = replace(starting, steps_finished=1, last_loss=7.5)
    assert [line.split("  ")[:2] for line in told(stepped, 4.0)] == [["step 1/100", "loss 7.5000"]]
    assert told(replace(stepped, steps_finished=4), 5.0) == []
    assert told(replace(stepped, steps_finished=6), 6.0) != []
    assert told(replace(stepped, steps_finished=7), 6.0 + QUIET_SECONDS) != [], "steps are slow"
    hanging = replace(stepped, steps_finished=7, hang_seconds=300.0)
    assert told(hanging, 20.0) == ["no step for 5m 00s: the run may hang"]
    assert told(hanging, 21.0) == []
    assert told(replace(stepped, steps_finished=100), 22.0)[0].startswith("step 100/100")
