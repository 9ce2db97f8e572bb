"""`llmtop attach --plain`: lines for logs, made where there is no terminal too, in ASCII alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.events import HangSuspected
from llmtop.profiler.record.feed import read_state
from llmtop.tui.commands.plain import PlainTeller
from tests.cli.conftest import Llmtop
from tests.recorded import make_recorded_run
from tests.recorded_spec import Kind
from tests.tui.tuiruns import LiveRun

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \w")


@pytest.mark.parametrize("words", [("--plain",), ()])
def test_a_run_that_has_ended_is_told_in_one_line(
    words: tuple[str, ...], llmtop: Llmtop, runs_root: Path
) -> None:
    make_recorded_run(runs_root, kind="cuda", ranks=2, steps=12)
    answer = llmtop("attach", "latest", *words)
    assert answer.code == ExitCode.DONE and answer.out.isascii()
    first, *rest = answer.out.splitlines()
    assert LINE.match(first)
    for part in ("completed", "step 12/12", "loss 4.", "tok/s", "GPU0 ", "GPU1 ", "GiB"):
        assert part in first
    assert rest[-1] == "completed: all ranks finished all steps"


@pytest.mark.parametrize(("end", "code"), [("failed", 4), ("out_of_memory", 5)])
def test_it_ends_as_the_run_did(end: str, code: int, llmtop: Llmtop, runs_root: Path) -> None:
    make_recorded_run(runs_root, end=end, steps=5)  # type: ignore[arg-type]
    answer = llmtop("attach", "latest", "--plain")
    assert answer.code == code and "critical: " in answer.out and answer.err.startswith("error: ")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_findings_are_told_once_as_they_come_and_go(kind: Kind, tmp_path: Path) -> None:
    live = LiveRun(tmp_path, kind=kind)
    live.start()
    teller = PlainTeller(live.run)
    assert "starting  first step" in next(iter(teller.lines(read_state(live.run), 0.0)))
    live.steps(1, 10)
    list(teller.lines(read_state(live.run), 1.0))
    live.recorder.time.advance(90)
    live.recorder.supervisor.write(HangSuspected(last_step=10, quiet_seconds=90.0, threshold_seconds=60.0))
    hung = list(teller.lines(read_state(live.run), 2.0))
    assert "no step for" in hung[0]
    assert any(line.startswith("  critical: ") for line in hung[1:])
    assert list(teller.lines(read_state(live.run), 3.0))[1:] == []
    live.steps(11, 12)
    assert any(line.startswith("  no longer: ") for line in teller.lines(read_state(live.run), 4.0))
    live.close()


def test_a_time_between_lines_must_be_one(llmtop: Llmtop, runs_root: Path) -> None:
    make_recorded_run(runs_root, steps=3)
    assert "is not a time" in llmtop("attach", "latest", "--plain", "--every", "0").err


def test_many_gpus_are_told_by_their_range(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, kind="cuda", ranks=17, steps=2)
    state = read_state(run)
    (line, *_) = PlainTeller(run).lines(state, 0.0)
    assert "memory 36.0 GiB on each of 17 GPUs" in line
    assert state.hardware is not None
    first, *others = state.hardware.devices
    fuller = replace(first, memory_used_bytes=40 << 30)
    uneven = replace(state, hardware=replace(state.hardware, devices=(fuller, *others)))
    (line, *_) = PlainTeller(run).lines(uneven, 0.0)
    assert "memory 36.0 GiB to 40.0 GiB on 17 GPUs" in line


def test_a_dumb_terminal_gets_lines_and_no_app(
    llmtop: Llmtop, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_recorded_run(runs_root, steps=3)
    monkeypatch.setattr("llmtop.tui.commandline.streams.on_terminal", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert "step 3/3" in llmtop("attach", "latest").out
    for words in ((), ("--read-only",), ("replay", "latest")):
        answer = llmtop(*words)
        assert answer.code == ExitCode.USAGE and "TERM is dumb" in answer.err
