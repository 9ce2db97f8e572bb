"""After a stop nothing of a run is left and its GPUs have their memory back, whatever is ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.ending import memory_words
from llmtop.profiler.record.endevents import MemoryReturned
from llmtop.profiler.record.events import HardwareSampled
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import write_atomic
from llmtop.trainer.supervisor.memoryreturn import WAIT_SECONDS
from llmtop.trainer.supervisor.patience import Graces
from llmtop.tui.cli import main
from llmtop.tui.commands import stop
from tests.fake_nvml import GIB
from tests.hosts.lab import wait_for
from tests.recorded_spec import recorded_prediction, recorded_spec
from tests.trainer.fakedriver import stand_in_for_the_driver
from tests.trainer.supervised import SHORT_GRACES, Supervised, cleaned_up, fake_ranks

HELD = """
from llmtop.profiler.record.processidentity import process_identity

class HeldGpu(FakeGpu):
    idle = 1 << 30

    @property
    def used(self):
        run = Path(sys.orig_argv[-1])
        pids = [pid for file in run.glob("holds-*") for pid in file.read_text().split()]
        alive = [pid for pid in pids if process_identity(int(pid)) is not None]
        keeps = int((run / "keeps").read_text()) if (run / "keeps").exists() else 0
        return self.idle + 20 * (1 << 30) * len(alive) + keeps

    @used.setter
    def used(self, value):
        pass

gpus = [HeldGpu(uuid=f"GPU-{number}") for number in range(2)]
"""

Start = Callable[[str], Supervised]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))

    def begin(scenario: str) -> Supervised:
        stand_in_for_the_driver(monkeypatch, tmp_path / "driver", HELD)
        fake_ranks(monkeypatch, scenario, SHORT_GRACES)
        supervised = Supervised(tmp_path / "runs")
        spec = recorded_spec("cuda", ranks=2, sample_seconds=0.1)
        supervised.run = RunDir.create(tmp_path / "runs", spec, recorded_prediction(spec), {})
        started.append(supervised)
        supervised.start()
        return supervised

    with cleaned_up() as started:
        yield begin


def take_memory(run: Supervised) -> list[int]:
    """Let the ranks and what they started take their memory, once the record has seen the GPUs without."""
    run.wait_for(lambda: len(run.events("hardware")) > 0)
    (run.run.path / "take").touch()
    run.wait_for_files("holds")
    run.wait_for(lambda: _used(run) > 100 * GIB)
    return [int(pid) for rank in (0, 1) for pid in (run.run.path / f"holds-{rank}").read_text().split()]


def _used(run: Supervised) -> int:
    sample = run.events("hardware")[-1]
    assert isinstance(sample, HardwareSampled)
    return sample.devices[0].memory_used_bytes or 0


def test_the_time_that_a_stop_is_given_is_below_ten_seconds() -> None:
    graces = Graces()
    assert graces.stop + graces.stop_kill + WAIT_SECONDS < 10


def test_stop_ends_what_ignores_signals_and_shows_the_memory_back(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start("holds")
    pids = take_memory(run)
    assert len(pids) == 6
    assert main(["stop", "latest"]) == ExitCode.DONE
    assert all(process_identity(pid) is None for pid in pids)
    said = capsys.readouterr().out
    assert "ranks 0, 1 did not stop in time and were killed" in said
    assert "no process is left" in said
    assert "memory of GPU 0, 1 is back: 1.00 GiB in use, 121 GiB at the most while it ran" in said
    (returned,) = run.of(MemoryReturned)
    assert [device.is_back for device in returned.devices] == [True, True]
    # The panels of the monitor show the newest sample.
    state = read_state(run.run)
    assert state.hardware is not None and state.ended is not None
    assert [device.memory_used_bytes for device in state.hardware.devices] == [GIB, GIB]
    assert state.hardware.t <= state.ended.t
    assert not [f for f in findings(state, run.run.spec(), run.run.prediction()) if f.key == "memory_kept"]


def test_memory_that_does_not_come_back_is_told(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    run = start("holds")
    take_memory(run)
    write_atomic(run.run.path / "keeps", str(3 * GIB).encode())
    assert main(["stop", "latest"]) == ExitCode.DONE
    assert "GPU 0 has 3.00 GiB more in use than before the run" in capsys.readouterr().out
    state = read_state(run.run)
    assert "GPU 1 has 3.00 GiB more in use than before the run" in memory_words(state)
    (finding,) = [f for f in findings(state, run.run.spec(), run.run.prediction()) if f.key == "memory_kept"]
    assert finding.title == "GPU 0, 1 did not get its memory back"


@pytest.mark.parametrize("looked", ["before", "after"])
def test_a_killed_supervisor_leaves_orphans_that_stop_ends(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, looked: str
) -> None:
    run = start("holds")
    pids = take_memory(run)
    seen = [read_state(run.run)] if looked == "before" else []
    os.kill(run.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not run.run.supervisor_alive())
    monkeypatch.setattr(stop, "read_state", lambda found: seen.pop() if seen else read_state(found))
    assert main(["stop", "latest"]) == ExitCode.DONE
    assert all(process_identity(pid) is None for pid in pids)
    assert "no process is left" in capsys.readouterr().out
