"""Disks that are full, read-only or stand still: the training goes on, it is told, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from llmtop.presets.errors import ExitCode, LlmtopError
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.events import HardwareSampled, RankStarted, RunEnded, StepFinished, WritingResumed
from llmtop.profiler.record.eventtail import EventTail
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.patientlog import PatientWriter
from llmtop.profiler.record.rundir import HARDWARE
from llmtop.trainer import control
from llmtop.trainer.supervisor.hardwarewatch import HardwareWatch
from llmtop.trainer.supervisor.journal import Journal
from llmtop.tui.cli import main
from llmtop.tui.commands.follow import Narrator
from tests.faults.conftest import Start
from tests.faults.disks import MIB, Disk, ext4_disk, memory_disk
from tests.recorded import make_recorded_run
from tests.trainer.supervised import Supervised


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with memory_disk(tmp_path / "disk", 4 * MIB) as made:
        yield made


def step_numbers(path: Path) -> list[int]:
    return [event.step for event in EventTail(path).poll() if isinstance(event, StepFinished)]


# --- the log of a rank -----------------------------------------------------------------------------------


def test_what_has_no_room_waits_and_is_written_in_its_order(disk: Disk) -> None:
    path = disk.path / "rank-0.jsonl"
    with PatientWriter(path, "rank0") as log:
        log.write(StepFinished(step=1))
        disk.fill()
        for step in range(2, 3000):
            log.write(StepFinished(step=step)) if step % 7 else log.hold(partial(StepFinished, step=step))
        assert log.waits and not log.settle(0.0)
        # What was in the page that the file had already is there; a line may be torn.
        assert step_numbers(path) == list(range(1, len(step_numbers(path)) + 1))
        disk.make_room()
        assert log.settle(60.0)
        log.write(StepFinished(step=3000))
    assert step_numbers(path) == list(range(1, 3001))
    (told,) = [event for event in EventTail(path).poll() if isinstance(event, WritingResumed)]
    assert told.lost == 0 and told.seconds > 0


def test_more_than_can_wait_is_counted(disk: Disk) -> None:
    path = disk.path / "rank-0.jsonl"
    with PatientWriter(path, "rank0", most_waiting_bytes=20_000) as log:
        disk.fill()
        for step in range(1, 2000):
            log.write(StepFinished(step=step))
        disk.make_room()
        assert log.settle(60.0)
    (told,) = [event for event in EventTail(path).poll() if isinstance(event, WritingResumed)]
    there = step_numbers(path)
    assert told.lost == 1999 - len(there) > 1000
    assert there[-1] == 1999 and there == sorted(set(there))


def test_the_log_of_a_supervisor_waits_within_the_same_bound(disk: Disk) -> None:
    said: list[str] = []
    path = disk.path / "supervisor.jsonl"
    with Journal(path, "supervisor", log=said.append, most_waiting_bytes=20_000) as log:
        disk.fill()
        for rank in range(1, 2000):
            log.write(RankStarted(rank=rank, pid=1))
        disk.make_room()
        log.write_last(RunEnded(state="stopped", reason="it was asked to"))
    found = EventTail(path).poll()
    started = [event.rank for event in found if isinstance(event, RankStarted)]
    (told,) = [event for event in found if isinstance(event, WritingResumed)]
    assert told.lost == 1999 - len(started) > 1000 and started[-1] == 1999
    assert isinstance(found[-1], RunEnded), "nothing follows the end"
    assert "events wait: [Errno 28]" in said[0] and "is written again after" in said[1] and len(said) == 2


def test_an_end_that_waits_is_the_last_line(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("llmtop.trainer.supervisor.journal.SETTLE_SECONDS", 0.0)
    path = disk.path / "supervisor.jsonl"
    with Journal(path, "supervisor", log=said.append) as log:
        log.write(RankStarted(rank=0, pid=1))
        disk.fill()
        while not log.waits:
            log.write(RankStarted(rank=1, pid=1))
        log.write_last(RunEnded(state="stopped", reason="it was asked to"))
        assert "the end could not be written" in said[-1]
        disk.make_room()
        log.flush()
    assert isinstance(EventTail(path).poll()[-1], RunEnded)


def test_samples_of_the_hardware_wait_too(disk: Disk) -> None:
    run, said = make_recorded_run(disk.path), list[str]()
    watch = HardwareWatch(run, lambda event: None, said.append)
    watch.every_seconds = 0.0
    disk.fill()
    times = []
    for _ in range(20):
        watch.sample({})
        assert watch.newest is not None
        times.append(watch.newest.t)
    disk.make_room()
    watch.finish()
    found = [e.t for e in EventTail(run.events_path(HARDWARE)).poll() if isinstance(e, HardwareSampled)]
    assert found[-20:] == times and "events wait" in said[0]


def test_what_a_rank_prints_is_left_out_and_raises_nothing(disk: Disk) -> None:
    code = (
        "import sys; from llmtop.trainer.worker.streams import forgive_full_disk\n"
        "forgive_full_disk()\n"
        "for n in range(20000): print('a line that a library prints', n)\n"
        "print('an error', file=sys.stderr)\n"
        "open(sys.argv[1], 'w').write('went on')\n"
    )
    told = disk.path.parent / "told"
    log = disk.path / "rank-0.log"
    disk.fill()
    with log.open("ab") as file:
        done = subprocess.run([sys.executable, "-c", code, str(told)], stdout=file, stderr=file, timeout=120)
    assert done.returncode == 0 and told.read_text() == "went on"
    assert log.stat().st_size == 0


# --- a run -----------------------------------------------------------------------------------------------


def seen(run: Supervised) -> RunState:
    return read_state(run.run)


def test_a_run_goes_on_while_its_disk_is_full(disk: Disk, start: Start) -> None:
    run = start("trains", disk.path / "runs")
    run.wait_for_step(3)
    disk.fill()
    run.wait_for(lambda: bool(seen(run).unwritable))
    assert seen(run).unwritable == "its disk is full"
    narrator = Narrator(run.run.spec())
    assert any("nothing is recorded: its disk is full" in line for line in narrator.lines(seen(run), 0.0))
    found = findings(seen(run), run.run.spec(), run.run.prediction())
    assert ("unwritable", "critical") in [(finding.key, finding.severity) for finding in found]
    before = len(run.events("hardware"))
    with pytest.raises(LlmtopError, match="takes no requests|cannot be written"):
        control.stop(run.run, save=True)
    disk.make_room()
    run.wait_for(lambda: len(run.events("hardware")) > before + 2)
    assert any("there is room again" in line for line in narrator.lines(seen(run), 1.0))
    control.stop(run.run, save=True)
    assert run.end().state == "stopped"
    for rank in (0, 1):
        numbers = step_numbers(run.run.events_path(rank))
        assert numbers == list(range(1, len(numbers) + 1))
    # One torn line for each log at most: the one that met the full disk.
    assert seen(run).skipped_lines <= len(run.run.event_logs())
    assert "Traceback" not in run.log()


def test_an_export_without_room_says_so_and_leaves_nothing(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))
    run = make_recorded_run(tmp_path / "runs")
    archive = disk.path / "run.zip"
    assert main(["export", run.run_id, "--out", str(archive)]) == ExitCode.DONE
    good = archive.read_bytes()
    disk.fill()
    capsys.readouterr()
    assert main(["export", run.run_id, "--out", str(archive), "--force"]) != ExitCode.DONE
    said = capsys.readouterr().err
    assert "No space left on device" in said and "free some space" in said and "Traceback" not in said
    assert archive.read_bytes() == good, "the archive that was there is whole"
    assert {path.name for path in disk.path.iterdir()} == {"ballast", "run.zip"}
    disk.make_room()
    assert main(["export", run.run_id, "--out", str(archive), "--force"]) == ExitCode.DONE


def test_a_run_on_a_read_only_disk_is_seen_and_not_started(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(disk.path / "runs"))
    run = make_recorded_run(disk.path / "runs")
    disk.forbid()
    try:
        for words in (["ls"], ["report", run.run_id], ["logs", run.run_id], ["stop", run.run_id]):
            assert main(words) == ExitCode.DONE, words
        capsys.readouterr()
        assert main(["run", "cpu-demo", "--detach"]) != ExitCode.DONE
        said = capsys.readouterr().err
        assert "Read-only file system" in said and "Traceback" not in said
    finally:
        disk.allow()


def test_writing_goes_on_when_a_disk_stood_still(tmp_path: Path, start: Start) -> None:
    with ext4_disk(tmp_path / "ext4", 32 * MIB) as disk:
        run = start("trains", disk.path / "runs")
        run.wait_for_step(3)
        ranks = [psutil.Process(event.pid) for event in run.of(RankStarted)]
        disk.freeze()
        try:
            run.wait_for(lambda: all(rank.status() == psutil.STATUS_DISK_SLEEP for rank in ranks))
            # Whoever looks does not wait with those who write.
            assert seen(run).status == "running"
        finally:
            disk.thaw()
        run.wait_for_step(step_numbers(run.run.events_path(0))[-1] + 5)
        control.stop(run.run, save=False)
        assert run.end().state == "stopped"
        numbers = step_numbers(run.run.events_path(0))
        assert numbers == list(range(1, len(numbers) + 1))
        samples = [event for event in run.events("hardware") if isinstance(event, HardwareSampled)]
        assert samples
