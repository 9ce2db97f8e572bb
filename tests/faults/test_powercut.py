"""What a power cut leaves of a run: torn lines, files that are cut, empty or not there. Every run opens."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.eventtail import EventTail
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir, list_runs
from llmtop.profiler.replay import Replay
from llmtop.profiler.report.build import build_report
from llmtop.tui.cli import main
from tests.recorded import make_recorded_run

CUTS = 40
NEEDED = ("spec.json", "prediction.json")
"""Synced before anybody is told of the run; without them it is damaged, and said to be."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_recorded_run(tmp_path_factory.mktemp("recorded"))


def copied(recorded: RunDir, root: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(recorded.path, root / recorded.run_id)))


@pytest.mark.parametrize("seed", range(CUTS))
def test_a_cut_costs_the_torn_line_of_each_log_and_no_more(
    recorded: RunDir, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    run = copied(recorded, tmp_path)
    whole = {path: EventTail(path).poll() for path in run.event_logs()}
    for path in run.event_logs():
        with path.open("r+b") as file:
            file.truncate(chance.randint(0, path.stat().st_size))
    for path, events in whole.items():
        lines = path.read_bytes().count(b"\n")
        assert EventTail(path).poll() == events[:lines]
    state = read_state(run)
    assert state.skipped_lines == 0
    assert build_report(run).run_id == run.run_id
    replay = Replay(run, lambda _: {})
    replay.read_on(60.0)
    replay.seek(replay.end)
    assert replay.state.steps_finished == state.steps_finished


@pytest.mark.parametrize("how", ["missing", "empty", "zeros", "half", "folder"])
def test_a_damaged_file_is_named_or_done_without(
    recorded: RunDir,
    tmp_path: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = sorted(path.name for path in recorded.path.iterdir() if path.is_file())
    assert set(NEEDED) <= set(names) and len(names) >= 6
    for name in names:
        root = tmp_path / name
        run = copied(recorded, root)
        path = run.path / name
        content = path.read_bytes()
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how != "missing":
            left = {"empty": b"", "zeros": b"\0" * len(content), "half": content[: len(content) // 2]}
            path.write_bytes(left[how])
        monkeypatch.setenv("LLMTOP_RUNS_DIR", str(root))
        capsys.readouterr()
        assert main(["ls"]) == ExitCode.DONE, (name, how)
        codes = {words: main([words, run.run_id]) for words in ("report", "logs")}
        said = capsys.readouterr().err
        assert "Traceback" not in said, (name, how)
        if name == "spec.json":
            assert len(list_runs(root)) <= 1
            assert codes["report"] != ExitCode.DONE and "spec.json" in said or how == "missing"
        elif name not in NEEDED:
            assert codes["report"] == ExitCode.DONE, (name, how, said)
