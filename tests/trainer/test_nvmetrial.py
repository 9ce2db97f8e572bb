"""The drive of an NVMe offload is measured before the ranks start, and what that means is told."""

from __future__ import annotations

from pathlib import Path

from llmtop.profiler.events import NvmeMeasured
from llmtop.profiler.rundir import RunDir
from llmtop.profiler.runstate import RunState, fold
from llmtop.trainer.supervisor.nvmetrial import report_nvme
from llmtop.tui.commands.follow import Narrator
from tests.recorded_spec import recorded_prediction, recorded_spec


def make_run(folder: Path, nvme: Path | None) -> RunDir:
    offload = {} if nvme is None else {"offload_optimizer": "nvme", "nvme_path": str(nvme), "zero": 3}
    spec = recorded_spec(**offload)  # type: ignore[arg-type]
    return RunDir.create(folder, spec, recorded_prediction(spec), {})


def test_the_drive_is_measured_and_the_estimate_recorded(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    run = make_run(tmp_path / "runs", tmp_path / "drive")
    told: list[NvmeMeasured] = []
    report_nvme(run, run.spec(), told.append, told_nothing)
    (measured,) = told
    assert measured.step_seconds is not None and measured.step_seconds > 0
    assert measured.step_read_bytes > 0 and measured.file_system
    assert list((tmp_path / "drive").iterdir()) == []
    (line,) = Narrator(run.spec()).lines(fold(RunState(), [measured]), 0.0)
    assert str(tmp_path / "drive") in line and "which takes about" in line


def test_a_run_without_a_drive_measures_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, None)
    report_nvme(run, run.spec(), lambda event: told_nothing(str(event)), told_nothing)


def test_a_trial_that_fails_is_told_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = make_run(tmp_path, tmp_path / "file" / "drive")
    lines: list[str] = []
    report_nvme(run, run.spec(), lambda event: told_nothing(str(event)), lines.append)
    assert len(lines) == 1 and "is not known" in lines[0]


def told_nothing(line: str) -> None:
    raise AssertionError(line)
