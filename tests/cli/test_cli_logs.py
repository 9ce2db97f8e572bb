"""`llmtop logs`: of a log of any length no more is held than a block, and its end is found from behind."""

from __future__ import annotations

import random
import re
import tracemalloc
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record import logend
from llmtop.profiler.record.logend import end_lines, offset_of_last
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.commands import logs
from llmtop.tui.commands.logs import LogTail
from tests.cli.conftest import Llmtop
from tests.recorded import make_recorded_run


@pytest.fixture
def run(runs_root: Path) -> RunDir:
    made = make_recorded_run(runs_root, steps=3)
    for rank in (0, 1):
        made.log_path(rank).write_text("".join(f"{rank}: line {n}\n" for n in range(100)))
    return made


def reference(content: bytes) -> list[str]:
    """As people read it: a carriage return ends a line too."""
    lines = re.split(rb"\r\n|\n|\r", content)
    return [line.decode() for line in (lines if lines[-1] else lines[:-1])]


@pytest.mark.parametrize("seed", range(60))
def test_every_line_comes_once_however_the_log_is_cut(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(logs, "BLOCK_BYTES", 64)
    monkeypatch.setattr(logend, "_BLOCK_BYTES", draw.choice((1, 2, 3, 7, 64)))
    content = b"".join(
        b"x" * draw.randrange(6) + draw.choice((b"\n", b"\r", b"\r\n", b"y"))
        for _ in range(draw.randrange(80))
    )
    path, at, came = tmp_path / "log", 0, []
    tail = LogTail(path)
    while at < len(content):
        more = draw.randrange(1, 30)
        with path.open("ab") as file:
            file.write(content[at : at + more])
        at += more
        came += list(tail.lines())
    came += list(tail.lines(last=True))
    assert came == reference(content)
    path.write_bytes(content)
    for count in range(len(reference(content)) + 2):
        with path.open("rb") as file:
            begin = offset_of_last(file, count)
        assert reference(content[begin:]) == reference(content)[max(0, len(reference(content)) - count) :]


def test_a_long_log_is_printed_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BLOCK_BYTES", 1 << 16)
    path = tmp_path / "log"
    path.write_bytes((b"x" * 999 + b"\n") * 16_000 + b"y" * 1_000_000)
    tracemalloc.start()
    try:
        count = sum(1 for _ in LogTail(path).lines(last=True))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count > 16_000 and peak_bytes < 2_000_000


def test_the_end_of_a_log_of_gigabytes_is_found_without_the_rest(llmtop: Llmtop, run: RunDir) -> None:
    with run.log_path(0).open("r+b") as file:
        file.truncate(4 << 30)  # a hole: it takes no room on the disk
        file.seek(0, 2)
        file.write(b"\nstep 1\nstep 2\nstep 3 goes on")
    assert llmtop("logs", "latest", "--rank", "0", "--tail", "2").out == "step 2\nstep 3 goes on\n"
    assert end_lines(run.log_path(0))[-2:] == ["step 2", "step 3 goes on"]


def test_tail_is_of_each_rank_and_with_follow_all_that_comes_after(llmtop: Llmtop, run: RunDir) -> None:
    out = llmtop("logs", "latest", "--tail", "2").out.splitlines()
    assert out == [f"[rank {rank}] {rank}: line {n}" for rank in (0, 1) for n in (98, 99)]
    assert llmtop("logs", "latest", "--tail", "0", "--follow").out == ""
    run.log_path(1).unlink()
    assert llmtop("logs", "latest", "--tail", "1").out == "[rank 0] 0: line 99\n"
    refused = llmtop("logs", "latest", "--tail", "-1")
    assert refused.code == ExitCode.USAGE and "--tail -1" in refused.err


def test_who_follows_gets_each_line_once_with_the_tail_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\nthree\n")
    tail = LogTail(path, 1)
    assert list(tail.lines()) == ["three"]
    with path.open("a") as file:
        file.write("four\nfi")
    assert list(tail.lines()) == ["four"]
    path.write_text("anew\n")
    assert list(tail.lines()) == ["anew"], "somebody has emptied it"


def test_a_rank_that_has_printed_nothing_is_told(run: RunDir, llmtop: Llmtop) -> None:
    run.log_path(1).unlink()
    answer = llmtop("logs", "latest", "--rank", "1", "--tail", "3")
    assert (answer.code, answer.out) == (ExitCode.DONE, "")
    assert f"rank 1 of run {run.run_id} has printed nothing" in answer.err
    assert "printed" not in llmtop("logs", "latest").err
    run.log_path(0).write_text("")
    assert f"no rank of run {run.run_id} has printed anything" in llmtop("logs", "latest").err
