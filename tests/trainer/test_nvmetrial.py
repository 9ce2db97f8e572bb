"""The drive of an NVMe offload is measured before the ranks start, and what that means is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.disk import DiskSpeed
from llmtop.profiler.record.events import NvmeMeasured
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.dsconfig import deepspeed_config
from llmtop.trainer.supervisor import nvmetrial
from llmtop.trainer.supervisor.nvmetrial import report_nvme
from llmtop.tui.commands.follow import Narrator
from tests.recorded_spec import recorded_prediction, recorded_spec


def make_run(folder: Path, nvme: Path | None, **more: Any) -> RunDir:
    offload: dict[str, Any] = (
        {} if nvme is None else {"offload_optimizer": "nvme", "nvme_path": str(nvme), "zero": 3}
    )
    spec = recorded_spec(**(offload | more))
    return RunDir.create(folder, spec, recorded_prediction(spec), deepspeed_config(spec))


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


def test_of_two_drives_the_slowest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = {"zero_optimization": {"offload_param": {"nvme_path": str(tmp_path / "slow")}}}
    run = make_run(tmp_path / "runs", tmp_path / "fast", offload_param="nvme", deepspeed=second)
    speeds = {"fast": 9e9, "slow": 1e9}

    def measure(folder: Path) -> DiskSpeed:
        if folder.name not in speeds:
            raise OSError("no such drive")
        speed = speeds[folder.name]
        return DiskSpeed(write_bytes_per_second=speed, read_bytes_per_second=speed, direct=True)

    monkeypatch.setattr(nvmetrial, "measure", measure)
    monkeypatch.setattr(nvmetrial, "free_bytes", lambda _path: None)
    told: list[NvmeMeasured] = []
    report_nvme(run, run.spec(), told.append, told_nothing)
    assert [(Path(event.path).name, event.read_bytes_per_second) for event in told] == [("slow", 1e9)]
    del speeds["slow"]
    lines: list[str] = []
    report_nvme(run, run.spec(), told.append, lines.append)
    assert Path(told[-1].path).name == "fast"
    assert len(lines) == 1 and "slow is not known: no such drive" in lines[0]


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
