"""Other work on the processors, and a limit on them: read from the kernel, and named with its evidence."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llmtop.profiler.findings.find import Finding, findings
from llmtop.profiler.findings.processors import NEWEST_SAMPLES
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.hardware.counters import GroupCounter
from llmtop.profiler.hardware.cpulimit import CpuLimit, CpuLimitReader
from llmtop.profiler.hardware.others import OthersCounter
from llmtop.profiler.hardware.processes import Running, all_running, thread_waits
from llmtop.profiler.record.changeevents import ChangeApplied, ChangeAsked
from llmtop.profiler.record.deviceevents import HostSample, OtherWork, ProcessSample
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import AnyEvent, HardwareSampled, RunEnded, StepFinished
from llmtop.profiler.record.rundir import HARDWARE, SUPERVISOR, RunDir
from llmtop.profiler.report.build import build_report
from tests.profiler.test_host import V2_MOUNT, FakeCgroups
from tests.recorded_spec import GIB, Kind, recorded_prediction, recorded_spec

STEPS = 40
FFMPEG = OtherWork(name="ffmpeg", processes=3, cpu_percent=0.0, pids=(81, 80), users=("alice",))


def told(
    load: list[float],
    *,
    wait: float | None = 0.0,
    seconds: list[float] | None = None,
    kind: Kind = "cpu",
    ended: bool = False,
    **host: Any,
) -> dict[str, Finding]:
    """What is found of a run with a sample a second: `load` is what others take, in percent of 8 processors;
    `wait` of a rank's threads that use one processor, in percent of that."""
    events: list[AnyEvent] = []
    for at, others in enumerate(load):
        took = seconds[at] if seconds else 1.0
        events.append(StepFinished(step=at + 1, t=float(at), src="rank0", loss=2.0, step_seconds=took))
        sample = HostSample(
            cpu_count=8,
            cpu_percent=others + 100 / 8,
            other_work=(replace(FFMPEG, cpu_percent=others * 8),) if others else (),
            **host,
        )
        process = ProcessSample(rank=0, rss_bytes=GIB, cpu_percent=100.0, cpu_wait_percent=wait)
        events.append(HardwareSampled(t=at + 0.5, src="hardware", host=sample, processes=(process,)))
    if ended:
        events.append(RunEnded(t=float(len(load)), state="completed", reason="done"))
    spec = recorded_spec(kind, ranks=1)
    state = fold(RunState(run_id="a-run"), events)
    return {found.key: found for found in findings(state, spec, recorded_prediction(spec))}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_others_that_the_ranks_wait_for_are_named_with_what_they_take(kind: Kind) -> None:
    found = told([75.0] * STEPS, wait=50.0, kind=kind)["other_work"]
    assert found.severity == "warning"
    assert "they take 6.0 of 8 processors (ffmpeg x3 6.0, pid 81 80 ... of alice)" in found.evidence
    assert "wait 33% of their time for one" in found.evidence and found.change.endswith("renice 19 -p 81 80")


def test_of_a_run_that_has_ended_no_pid_is_named_and_what_lasted_is_told() -> None:
    """Others that ended a minute before the run did held it back all the same."""
    load = [75.0] * (2 * NEWEST_SAMPLES) + [0.0] * NEWEST_SAMPLES
    assert "other_work" not in told(load, wait=50.0)
    found = told(load, wait=50.0, ended=True)["other_work"]
    assert "81" not in found.evidence and "renice" not in found.change


def test_a_few_others_are_worth_a_word_and_none_are_not() -> None:
    assert told([20.0] * STEPS, wait=20.0)["other_work"].severity == "info"
    assert "other_work" not in told([5.0] * STEPS, wait=50.0)  # its own threads are too many


def test_work_of_low_priority_slows_nobody() -> None:
    """The machine is full of it, and no thread of the ranks waits."""
    assert "other_work" not in told([87.0] * STEPS, wait=2.0)


def test_a_record_without_the_kernels_count_needs_a_full_machine() -> None:
    assert "other_work" in told([85.0] * STEPS, wait=None)
    assert "other_work" not in told([60.0] * STEPS, wait=None)
    assert "other_work" not in told([85.0] * STEPS, wait=None, kind="cuda")


def test_steps_with_and_without_the_others_are_compared() -> None:
    half = STEPS // 2
    load = [0.0] * half + [60.0] * STEPS
    found = told(load, wait=40.0, seconds=[0.5] * half + [0.9] * STEPS)["other_work"]
    assert "a step takes 900 ms beside them, 500 ms without" in found.evidence
    same = told(load, wait=40.0, seconds=[0.5] * len(load))["other_work"]
    assert "beside them" not in same.evidence


def test_too_few_samples_say_nothing() -> None:
    assert not {"other_work", "processor_limit"} & told([75.0] * 8, cpu_throttled_percent=90.0).keys()


@pytest.mark.parametrize(("percent", "severity"), [(60.0, "warning"), (15.0, "info"), (4.0, None)])
def test_a_limit_that_is_used_up_is_named(percent: float, severity: str | None) -> None:
    found = told([0.0] * STEPS, cpu_limit_cores=1.5, cpu_throttled_percent=percent).get("processor_limit")
    assert (found.severity if found is not None else None) == severity
    if found is not None:
        assert "1.5 processors of the machine's 8" in found.evidence
        assert f"{percent:.0f}% of the periods" in found.evidence and "--cpus" in found.change


def counts(throttled: int, periods: int) -> str:
    return f"usage_usec 5\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 9\n"


def test_version_2_gives_the_tightest_limit_and_how_often_it_held(tmp_path: Path) -> None:
    groups = FakeCgroups(tmp_path, "0::/slice/job\n", V2_MOUNT)
    groups.group("slice", cpu__max="150000 100000", cpu__stat=counts(10, 100))
    groups.group("slice/job", cpu__max="max 100000", cpu__stat=counts(0, 0))
    reader = CpuLimitReader(proc=groups.proc)
    assert reader.read() == CpuLimit(cores=1.5)
    groups.group("slice", cpu__stat=counts(40, 150))
    assert reader.read() == CpuLimit(cores=1.5, throttled_percent=60.0)
    assert reader.read() == CpuLimit(cores=1.5)  # no period since
    groups.group("slice", cpu__max="max 100000")
    assert reader.read() == CpuLimit()


def test_version_1_has_a_file_for_each_number(tmp_path: Path) -> None:
    mount = "32 31 0:29 / MOUNT rw - cgroup cgroup rw,cpu,cpuacct\n"
    groups = FakeCgroups(tmp_path, "4:cpu,cpuacct:/pod\n", mount)
    groups.group("pod", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000", cpu__stat=counts(1, 2))
    groups.group("", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert CpuLimitReader(proc=groups.proc).read() == CpuLimit(cores=2.0)


def test_no_limit_and_no_cgroups_are_unknown(tmp_path: Path) -> None:
    assert CpuLimitReader(proc=tmp_path).read() == CpuLimit()


def test_who_else_works_is_told_by_name_without_the_runs_own() -> None:
    counter = OthersCounter(owner=lambda pid: {2: "alice"}.get(pid, ""))

    def walk(**seconds: float) -> dict[int, Running]:
        pids = {"rank": 1, "cc1plus": 2, "backup": 3, "idle": 4}
        return {pids[name]: Running(0, name, 7, took) for name, took in seconds.items()}

    assert counter.advance(walk(rank=5.0, cc1plus=100.0, idle=3.0), {1}, 0.0) == ()
    # `backup` began meanwhile: all its time is of these ten seconds.
    found = counter.advance(walk(rank=15.0, cc1plus=108.0, backup=2.0, idle=3.1), {1}, 10.0)
    assert [(work.name, work.processes, round(work.cpu_percent)) for work in found] == [
        ("cc1plus", 1, 80),
        ("backup", 1, 20),
    ]
    assert [(work.pids, work.users) for work in found] == [((2,), ("alice",)), ((3,), ())]


def test_of_a_program_with_many_processes_the_busiest_are_named_with_their_user() -> None:
    counter = OthersCounter()
    before = {pid: Running(0, "python", 7, 0.0) for pid in (5, 6, 7, 8, os.getpid())}
    after = {pid: Running(0, "python", 7, float(at)) for at, pid in enumerate(before, start=1)}
    counter.advance(before, (), 0.0)
    (work,) = counter.advance(after, (), 10.0)
    assert work.processes == 5 and work.pids == (os.getpid(), 8, 7)
    assert work.users[0] == pwd.getpwuid(os.getuid()).pw_name


def test_this_process_is_walked_by_its_name_and_its_threads_have_waited() -> None:
    mine = all_running()[os.getpid()]
    assert mine.parent == os.getppid() and mine.cpu_seconds > 0 and mine.started > 0
    assert mine.name == Path("/proc/self/comm").read_text().strip()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert thread_waits([gone.pid]) == {}


_TWO_FOR_ONE = """
import hashlib, os, threading
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
def work():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
threading.Thread(target=work).start()
work()
"""
"""Two threads that run without a lock between them, on one processor."""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count it")
def test_threads_of_which_one_must_wait_have_waited() -> None:
    busy = subprocess.Popen([sys.executable, "-c", _TWO_FOR_ONE])
    try:
        while len(waits := thread_waits([busy.pid])) < 2 or min(waits.values()) < 0.05:
            assert busy.poll() is None
            time.sleep(0.01)
        assert {pid for pid, _ in waits} == {busy.pid} and (busy.pid, busy.pid) in waits
    finally:
        busy.kill()
        busy.wait()


def test_a_thread_that_ends_takes_no_others_waiting_along(tmp_path: Path) -> None:
    counter = GroupCounter()

    def read(now: float, **seconds: float) -> float | None:
        for name, waited in seconds.items():
            thread = tmp_path / "7" / "task" / name.removeprefix("t")
            thread.mkdir(parents=True, exist_ok=True)
            (thread / "schedstat").unlink(missing_ok=True)
            if waited:  # else it ends between the list and its reading
                (thread / "schedstat").write_text(f"5 {int(waited * 1e9)} 3\n")
        return counter.advance(thread_waits([7, 8], proc=tmp_path), now)

    assert read(0.0, t7=200.0, t8=100.0, t9=300.0) is None
    assert read(5.0, t7=201.0, t8=0.0, t9=300.0) == pytest.approx(0.2)
    # What comes back, or has its number, brings nothing from before.
    assert read(10.0, t7=201.0, t8=100.0, t9=302.0) == pytest.approx(0.4)
    assert read(15.0, t7=202.0, t8=102.0, t9=1.0) == pytest.approx(0.6)
    assert read(20.0, t7=0.0, t8=0.0, t9=0.0) is None


def test_what_others_call_their_programs_moves_no_cursor() -> None:
    counter = OthersCounter()
    name = "\x1b]0;x\x07\n[/b"
    for seconds in (0.0, 1.0):
        work = counter.advance({7: Running(1, name, 5, seconds)}, (), seconds)
    assert [one.name for one in work] == ["?]0;x??[/b"]


def test_what_stood_out_before_a_late_change_is_in_the_report_with_when(tmp_path: Path) -> None:
    """A learning rate that was changed six steps before the end hides nothing."""
    specs = [recorded_spec("cpu", ranks=1), recorded_spec("cpu", ranks=1, learning_rate=1e-5)]
    run = RunDir.create(tmp_path, specs[0], recorded_prediction(specs[0]), {})
    run.add_setting(specs[1], recorded_prediction(specs[1]), {})
    work = (replace(FFMPEG, cpu_percent=480.0),)
    host = HostSample(cpu_count=8, cpu_percent=87.0, other_work=work)
    process = ProcessSample(rank=0, rss_bytes=GIB, cpu_percent=100.0, cpu_wait_percent=50.0)
    with (
        EventWriter(run.events_path(SUPERVISOR), SUPERVISOR) as supervisor,
        EventWriter(run.events_path(HARDWARE), HARDWARE) as hardware,
        EventWriter(run.events_path(0), "rank0") as rank,
    ):
        supervisor.write(ChangeAsked(t=1.0, setting=1, changes=()))
        for at in range(STEPS + 6):
            if at == STEPS:
                rank.write(ChangeApplied(t=float(at), setting=1, step=at + 1))
            hardware.write(HardwareSampled(t=at + 0.5, host=host, processes=(process,)))
            rank.write(StepFinished(t=at + 1.0, step=at + 1, loss=2.0, step_seconds=1.0))
        supervisor.write(RunEnded(t=STEPS + 7.0, state="completed", reason="done"))
    told = {found.key: found for found in build_report(run).findings}["other_work"]
    assert (
        told.evidence.startswith(f"in steps 1 to {STEPS}: they take 6.0 of 8 processors") and not told.command
    )
