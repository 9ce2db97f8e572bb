"""Runs of other machines by `HOST:`: listed, and read by commands that need no more than their record."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.ending import ending
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RunEnded
from llmtop.profiler.record.remote import ON_ITS_MACHINE, command_for
from llmtop.profiler.record.rundir import SUPERVISOR
from llmtop.profiler.record.segments import segment_path
from llmtop.trainer.hosts import following
from llmtop.tui import cli
from llmtop.tui.cli import main
from llmtop.tui.commandline.arguments import CommandParser
from llmtop.tui.commandline.runs import find_run_here
from tests.cli.conftest import Answer, Llmtop
from tests.fleets import PlayedFleet
from tests.hosts.over_hosts import stand_in
from tests.recorded import make_recorded_run
from tests.recorded_spec import recorded_prediction, recorded_spec

PATH_OF_RUNS = "export LLMTOP_RUNS_DIR={root}/runs-of-$host"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs of machines are, as `runs-of-HOST`."""
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs-here"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(following.PYTHON, sys.executable)
    stand_in(tmp_path, monkeypatch, more=PATH_OF_RUNS.format(root=tmp_path))
    return tmp_path


def apart(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a run of another machine is followed until it ends."""
    return subprocess.run(
        [sys.executable, "-m", "llmtop.tui.cli", *words], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def llmtop(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> Llmtop:
    def call(*words: str) -> Answer:
        code = main(list(words))
        return Answer(code, *capsys.readouterr())

    return call


def by_id(answer: Answer) -> dict[str, dict[str, Any]]:
    return {line["run_id"]: line for line in answer.json()["runs"]}


def without_place(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "host"}


def test_runs_of_other_machines_are_listed_as_they_are_there(
    elsewhere: Path, llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = elsewhere / "runs-of-gpu-1", elsewhere / "runs-of-me@gpu-2"
    make_recorded_run(first, steps=4)
    make_recorded_run(first, steps=400, end="failed")
    lost = make_recorded_run(first, steps=3, end=None)
    gone = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    lost.write_supervisor_pid(gone.pid)
    going_on = make_recorded_run(second, steps=3, end=None)
    going_on.write_supervisor_pid()
    damaged = make_recorded_run(second, steps=3)
    damaged.spec_path.write_text("{")
    fleet = PlayedFleet(second, hosts=3)
    fleet.start()
    fleet.step(5)
    fleet.close()
    gone.communicate()
    answer = llmtop("ls", "gpu-1:", "me@gpu-2:", "gpu-1:", "--json")
    assert answer.code == ExitCode.DONE, answer.err
    told = by_id(answer)
    for host, root in (("gpu-1", first), ("me@gpu-2", second)):
        monkeypatch.setenv("LLMTOP_RUNS_DIR", str(root))
        here = by_id(llmtop("ls", "--json"))
        there = {run_id: line for run_id, line in told.items() if line["host"] == host}
        assert {run_id: without_place(line) for run_id, line in there.items()} == {
            run_id: without_place(line) for run_id, line in here.items()
        }
    assert told[lost.run_id]["status"] == "lost" and told[going_on.run_id]["status"] == "running"
    assert told[damaged.run_id]["status"] == "unreadable"
    assert f"me@gpu-2:{damaged.run_id}" in answer.err
    assert [line["host"] for line in answer.json()["hosts"]] == ["gpu-1", "me@gpu-2"]


def test_a_long_log_is_listed_by_its_ends(
    elsewhere: Path, llmtop: Llmtop, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = elsewhere / "runs-of-gpu-1"
    run = make_recorded_run(root, steps=2000, end=None)
    run.write_supervisor_pid()
    path = run.events_path(0)
    *lines, last, rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1000]))
    segment_path(path, 1).write_bytes(b"".join([*lines[1000:], last]))
    # Gone on from a moment ago: nothing whole is there yet.
    segment_path(path, 2).write_bytes(rest[:20])
    told = by_id(llmtop("ls", "gpu-1:", "--json"))[run.run_id]
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(root))
    here = by_id(llmtop("ls", "--json"))[run.run_id]
    assert without_place(told) == without_place(here) and told["step"] > 1990


def test_a_host_that_does_not_answer_is_named_while_others_show(elsewhere: Path, llmtop: Llmtop) -> None:
    run = make_recorded_run(elsewhere / "runs-of-gpu-1", steps=4)
    (elsewhere / "runs-of-gpu-3").mkdir()
    (elsewhere / "notes").mkdir()
    (elsewhere / "notes" / "unreachable-gpu-2").touch()
    answer = llmtop("ls", "gpu-1:", "gpu-2:", "gpu-3:")
    assert answer.code == ExitCode.USAGE
    assert f"gpu-1  {run.run_id}" in answer.out and "completed" in answer.out
    assert "gpu-2 cannot be asked" in answer.err and "No route to host" in answer.err
    assert "try: ssh gpu-2" in answer.err
    assert f"no run on gpu-3, in {elsewhere / 'runs-of-gpu-3'}" in answer.err
    told = llmtop("ls", "gpu-1:", "gpu-2:", "--json").json()
    assert [line["host"] for line in told["runs"]] == ["gpu-1"]
    assert told["hosts"][1]["runs_root"] is None and "No route" in told["hosts"][1]["problem"]
    alone = llmtop("ls", "gpu-2:")
    assert alone.code == ExitCode.USAGE and alone.err.count("gpu-2 cannot be asked") == 1


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("gpu-1", "llmtop ls gpu-1:"),
        ("gpu-1:latest", "llmtop report gpu-1:latest"),
        ("-oProxyCommand=x:", "unknown option"),
        ("a b:", "is not the name of a host"),
    ],
)
def test_what_is_no_machine_is_not_asked(elsewhere: Path, llmtop: Llmtop, word: str, told: str) -> None:
    answer = llmtop("ls", word)
    assert answer.code == ExitCode.USAGE and told in answer.err
    assert not (elsewhere / "notes").exists()


def test_a_machine_whose_connection_breaks_while_it_lists_is_asked_again(
    elsewhere: Path, llmtop: Llmtop
) -> None:
    first = make_recorded_run(elsewhere / "runs-of-gpu-1", steps=4)
    second = make_recorded_run(elsewhere / "runs-of-gpu-1", steps=5)
    # The first connection ends in the middle of what it tells.
    ssh, broke = elsewhere / "bin" / "ssh", elsewhere / "broke"
    first_time = f'if [ ! -e {broke} ]; then touch {broke}; sh -c "$last" | (head -c 9000; kill -9 0); fi'
    ssh.write_text(ssh.read_text().replace("exec sh", f"{first_time}\nexec sh"))
    told = by_id(llmtop("ls", "gpu-1:", "--json"))
    assert (elsewhere / "broke").exists()
    assert {run_id: line["step"] for run_id, line in told.items()} == {first.run_id: 4, second.run_id: 5}


def test_two_runs_of_other_machines_are_compared(elsewhere: Path) -> None:
    first = make_recorded_run(elsewhere / "runs-of-gpu-1", steps=4)
    second = make_recorded_run(elsewhere / "runs-of-gpu-2", steps=4, grad_accum=2)
    told = apart("compare", f"gpu-1:{first.run_id}", "gpu-2:latest", "--json")
    assert told.returncode == 0, told.stderr
    both = json.loads(told.stdout)
    assert (both["first"]["run_id"], both["second"]["run_id"]) == (first.run_id, second.run_id)
    assert [one["option"] for one in both["options"]] == ["grad_accum"]


def proposed_in(text: str, run_id: str) -> list[list[str]]:
    """Words of each command that names the run, up to what follows it in a sentence."""
    found = re.findall(
        rf"(?:ssh -t \S+ )?llmtop [a-z-]+ \S*{run_id}(?: (?:--\S+|\d+|\w+=\S+)(?<![.;,]))*", text
    )
    return [shlex.split(one) for one in found]


def takes(words: list[str]) -> argparse.Namespace:
    """What the command makes of its words; its parser ends the process for what it does not take."""
    assert words[0] == "llmtop"
    row = cli._find(words[1])
    parser = CommandParser(row.name, row.usage, row.help, row.example)
    cli._loaded(row).add_arguments(parser)
    return parser.parse(words[2:])


def test_commands_that_are_proposed_for_a_run_elsewhere_are_taken_where_they_are_called(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_recorded_run(elsewhere / "runs-of-gpu-1", kind="cuda", steps=20, end="out_of_memory")
    with EventWriter(run.events_path(SUPERVISOR), SUPERVISOR) as log:
        told_there = f"free some; llmtop resume {run.run_id} goes on after step 9; llmtop logs {run.run_id}"
        log.write(RunEnded(state="out_of_memory", reason="rank 0 had none left", rank=0, fix=told_there))
    told = apart("report", f"gpu-1:{run.run_id}")
    assert told.returncode == 0, told.stderr
    words = " ".join(told.stdout.split())
    assert f"free some; ssh -t gpu-1 llmtop resume {run.run_id} goes on after step 9" in words
    proposed = proposed_in(words, run.run_id)
    assert ["ssh", "-t", "gpu-1", "llmtop", "resume", run.run_id, "--fix", "1"] in [
        one[:8] for one in proposed
    ], words
    assert ["llmtop", "logs", f"gpu-1:{run.run_id}"] in proposed
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(elsewhere / "runs-of-gpu-1"))
    for one in proposed:
        if one[0] == "ssh":
            # The shell over there gets ssh's words as one line.
            there = shlex.split(" ".join(one[3:]))
            assert find_run_here(takes(there).run, there[1]).path == run.path
        else:
            assert one[1] not in ON_ITS_MACHINE and takes(one).run == f"gpu-1:{run.run_id}"


def test_a_command_over_there_reaches_it_word_for_word() -> None:
    words = ("data=/my texts", "note=it's", "--anew")
    told = command_for("a-run", "me@gpu-1", "resume", *words)
    ssh, option, host, *rest = shlex.split(told)
    assert (ssh, option, host) == ("ssh", "-t", "me@gpu-1")
    assert shlex.split(" ".join(rest)) == ["llmtop", "resume", "a-run", *words]
    assert command_for("a-run", "gpu-1", "resume", "--fix", "1") == "ssh -t gpu-1 llmtop resume a-run --fix 1"
    assert command_for("a-run", "gpu-1", "report") == "llmtop report gpu-1:a-run"
    assert command_for("a-run", "", "resume") == "llmtop resume a-run"


def test_what_is_proposed_for_a_lost_or_hanging_run_elsewhere_is_called_there() -> None:
    saved = CheckpointSaved(step=7, path="/there/step-7", size_bytes=1, seconds=1.0)
    lost = RunState(run_id="a-run", elsewhere="gpu-1", status="lost", checkpoints=(saved,))
    assert "; ssh -t gpu-1 llmtop resume a-run goes on after step 7" in ending(lost).fix
    hangs = RunState(run_id="a-run", elsewhere="gpu-1", status="running", hang_seconds=90.0)
    spec = recorded_spec("cuda", ranks=2)
    (found,) = (one for one in findings(hangs, spec, recorded_prediction(spec)) if one.key == "hang")
    assert found.command == "ssh -t gpu-1 llmtop stacks a-run"
    assert f"{found.command} (t in the monitor)" in found.change
    assert "end it with llmtop stop gpu-1:a-run" in found.change


def test_a_replay_of_a_run_elsewhere_wants_a_terminal_too(elsewhere: Path) -> None:
    make_recorded_run(elsewhere / "runs-of-gpu-2", steps=4)
    replay = apart("replay", "gpu-2:latest")
    assert replay.returncode == ExitCode.USAGE and "llmtop report gpu-2:" in replay.stderr


@pytest.mark.parametrize("command", sorted(ON_ITS_MACHINE))
def test_what_needs_the_machine_says_where_to_call_it(elsewhere: Path, llmtop: Llmtop, command: str) -> None:
    more = {"weights": ["out"], "quantize": ["--to", "nf4"]}.get(command, [])
    answer = llmtop(command, "gpu-1:latest", *more)
    assert answer.code == ExitCode.USAGE
    assert f"ssh -t gpu-1 llmtop {command} latest" in answer.err
    assert not (elsewhere / "notes").exists(), "it is not even asked"


@pytest.mark.parametrize("command", ["attach", "report", "logs", "stop", "export", "replay", "snapshot"])
def test_a_machine_without_a_run_leads_to_the_list_of_its_runs(
    elsewhere: Path, llmtop: Llmtop, command: str
) -> None:
    make_recorded_run(elsewhere / "runs-of-gpu-1", steps=4)
    answer = llmtop(command, "gpu-1:")
    assert answer.code == ExitCode.USAGE
    assert "no run of gpu-1 is named" in answer.err and "llmtop ls gpu-1:" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        "Welcome to gpu-1!",
        '{"say": "hello", "runs_root": "/x"}\\n{"say": "run", "id": "a", "parts": 7}',
        "[" * 100_000,
        '{"say": "run", "id": "a", "parts": [["../x", 0]], "path": "", "alive": 1, "age_seconds": 0}',
        '{"say": "hello"}\\n{"say": "run", "id": "a", "parts": [["spec.json", 0]], "path": "", "alive": 1,'
        ' "age_seconds": 1e300}',
    ],
)
def test_a_machine_that_says_something_else_is_named_and_not_asked_for_ever(
    elsewhere: Path, llmtop: Llmtop, words: str
) -> None:
    """As one whose shell greets whoever comes."""
    ssh = elsewhere / "bin" / "ssh"
    ssh.write_text(f"#!/bin/sh\nprintf '{words}\\n'\nexec cat > /dev/null\n")
    answer = llmtop("ls", "gpu-1:")
    assert answer.code == ExitCode.USAGE and "gpu-1 cannot be asked" in answer.err
    assert "Traceback" not in answer.err
