"""The parts of the supervisor on their own: countdowns, hangs, locks, compilers, memory, environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.profiler.hardware.kernellog import KernelLog
from llmtop.profiler.record.deviceevents import HostSample
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RankFailed, StageBegan, StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.pdeath import SUPERVISOR_PID
from llmtop.trainer.supervisor import extensions
from llmtop.trainer.supervisor.oom import OomWatch
from llmtop.trainer.supervisor.patience import Graces, Patience
from llmtop.trainer.supervisor.postmortem import Story, name_end
from llmtop.trainer.supervisor.progress import HangWatch, Progress
from llmtop.trainer.supervisor.rankenv import rank_environment, worker_command
from llmtop.trainer.supervisor.ranks import RankExit
from tests.recorded import ManualClock
from tests.recorded_spec import recorded_prediction, recorded_spec


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = recorded_spec("cpu", hang_floor_seconds=10.0, hang_factor=5.0)
    return RunDir.create(tmp_path / "runs", spec, recorded_prediction(spec), {})


# --- patience -------------------------------------------------------------------------------------


def test_countdown_goes_from_terminate_to_kill() -> None:
    clock = ManualClock()
    patience = Patience(2.0, lambda: clock.now)
    assert patience.next_action() is None
    patience.wait(5.0, "did not stop")
    clock.advance(4.9)
    assert patience.next_action() is None
    clock.advance(0.2)
    assert patience.next_action() == "terminate"
    assert patience.next_action() is None
    clock.advance(2.0)
    assert patience.next_action() == "kill"
    patience.wait(0.0, "something else")
    assert patience.next_action() is None
    assert patience.waiting_for == "did not stop"


def test_a_shorter_countdown_replaces_a_longer_one_only() -> None:
    clock = ManualClock()
    patience = Patience(2.0, lambda: clock.now)
    patience.wait(100.0, "long")
    patience.wait(200.0, "longer")
    assert patience.waiting_for == "long"
    patience.wait(1.0, "short")
    assert patience.waiting_for == "short"
    clock.advance(1.0)
    assert patience.next_action() == "terminate"


def test_graces_from_the_environment() -> None:
    assert Graces.from_environment({}) == Graces()
    assert Graces.from_environment({"LLMTOP_GRACES": "peers=0.5,kill=2"}) == Graces(peers=0.5, kill=2.0)
    for wrong in ("peers=x", "friends=1", "peers"):
        with pytest.raises(UsageError, match="LLMTOP_GRACES"):
            Graces.from_environment({"LLMTOP_GRACES": wrong})


# --- progress and hangs ---------------------------------------------------------------------------


def test_progress_passes_over_earlier_attempts(run: RunDir) -> None:
    with EventWriter(run.events_path(0), "rank0") as log:
        log.write(StepFinished(step=40, step_seconds=1.0))
        progress = Progress(run, 2)
        progress.poll()
        assert (progress.last_step, progress.stepped) == (0, False)
        log.write(StepFinished(step=41, step_seconds=1.0))
        progress.poll()
    assert (progress.last_step, progress.stepped, progress.median_step_seconds) == (41, True, 1.0)


@pytest.mark.parametrize("ahead", [-5 * 3600.0, 0.0, 3 * 3600.0])
def test_the_first_of_two_that_failed_is_named_whatever_the_clock_of_the_others_host(
    run: RunDir, ahead: float
) -> None:
    progress = Progress(run, 2, ahead_seconds=lambda rank: ahead * rank)
    stamps = {0: 100.0, 1: 101.0 + ahead}
    for rank, stamp in stamps.items():
        clock = ManualClock(stamp).clock()
        with EventWriter(run.events_path(rank), f"rank{rank}", clock=clock) as log:
            log.write(RankFailed(error_type="ValueError", message="there is no such file"))
    progress.poll()
    assert [progress.failed[rank].t for rank in (0, 1)] == [100.0, 101.0]
    exits = tuple(RankExit(rank=rank, pid=9, exit_code=1, seen_at=102.0 - rank) for rank in (1, 0))
    assert name_end(Story(world_size=2, exits=exits, failed=progress.failed)).rank == 0


def test_hang_threshold_follows_the_steps(run: RunDir) -> None:
    clock = ManualClock(0.0)
    progress = Progress(run, 1, lambda: clock.now)
    hang = HangWatch(run.spec().options, lambda: clock.now)
    with EventWriter(run.events_path(0), "rank0") as log:
        clock.advance(19.0)
        assert hang.check(progress, compiling=False) is None  # start-up is given twice the floor
        log.write(StageBegan(stage="model"))
        progress.poll()
        for number in range(1, 6):
            clock.advance(4.0)
            log.write(StepFinished(step=number, step_seconds=4.0))
            progress.poll()
        clock.advance(19.9)
        assert hang.check(progress, compiling=False) is None
        clock.advance(0.2)
        suspicion = hang.check(progress, compiling=False)
        assert suspicion is not None
        assert (suspicion.last_step, suspicion.threshold_seconds) == (5, 20.0)
        clock.advance(100.0)
        assert hang.check(progress, compiling=False) is None
        log.write(StepFinished(step=6, step_seconds=4.0))
        progress.poll()
        assert hang.check(progress, compiling=False) is None
        clock.advance(21.0)
        assert hang.check(progress, compiling=True) is None
        clock.advance(21.0)
        assert hang.check(progress, compiling=False) is not None


# --- extensions -----------------------------------------------------------------------------------


def test_extensions_are_private_to_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    here = extensions.extensions_dir({"XDG_CACHE_HOME": "/c"})
    assert here.parent == Path("/c/llmtop/torch_extensions")
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert extensions.extensions_dir({"XDG_CACHE_HOME": "/c"}) != here
    assert extensions.extensions_dir({"HOME": "/h"}).is_relative_to("/h/.cache/llmtop")
    assert extensions.extensions_dir({"TORCH_EXTENSIONS_DIR": "/mine", "HOME": "/h"}) == Path("/mine")


def test_only_locks_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    for op in ("held", "stale"):
        (tmp_path / "py311_cpu" / op).mkdir(parents=True)
        (tmp_path / "py311_cpu" / op / "lock").touch()
    held, stale = (tmp_path / "py311_cpu" / op / "lock" for op in ("held", "stale"))
    with held.open():
        assert extensions.remove_stale_locks(tmp_path) == [stale]
        assert held.exists()
        assert not stale.exists()
    assert extensions.remove_stale_locks(tmp_path / "nothing") == []


def test_a_compiler_below_a_process_is_found(tmp_path: Path) -> None:
    (tmp_path / "cc1plus").symlink_to("/bin/sleep")
    with subprocess.Popen([str(tmp_path / "cc1plus"), "60"]) as compiler:
        try:
            while extensions.compiling([os.getpid()]) != "cc1plus":
                assert compiler.poll() is None
            assert extensions.compiling([compiler.pid]) is None
        finally:
            compiler.kill()


# --- memory ---------------------------------------------------------------------------------------


def fake_proc(folder: Path, kills: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vmstat").write_text(f"nr_free_pages 1\noom_kill {kills}\n")
    return folder


def cgroup(proc: Path, kills: int) -> None:
    """A cgroup of version 2 that counts its own kills."""
    group = proc.parent / "group"
    group.mkdir(exist_ok=True)
    (group / "memory.events").write_text(f"oom 1\noom_kill {kills}\n")
    (proc / "self").mkdir(exist_ok=True)
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "self" / "mountinfo").write_text(f"1 2 0:1 / {group} rw - cgroup2 cgroup2 rw\n")


def test_a_kill_in_the_runs_own_cgroup_is_proof_and_one_elsewhere_is_not(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", 3)
    blind = OomWatch(proc)
    assert blind.evidence(None) is None
    cgroup(proc, 1)
    watch = OomWatch(proc)
    fake_proc(proc, 4)
    assert watch.evidence(None) is None, "the kernel counts for this cgroup, and has counted none"
    cgroup(proc, 2)
    found = watch.evidence(None)
    assert found is not None and found.kind == "proof" and "memory cgroup" in found.words
    (proc / "self" / "cgroup").unlink()
    perhaps = blind.evidence(None)
    assert perhaps is not None and perhaps.kind == "possible" and "may have been another" in perhaps.words


KILL = (
    "3,1234,99,-;Out of memory: Killed process {pid} (python) total-vm:99kB, anon-rss:12582912kB,"
    " file-rss:0kB, UID:0\n"
)


@pytest.mark.parametrize(("namespace", "proof"), [("pid:[4026531836]", True), ("pid:[4026532281]", False)])
def test_the_kernels_log_names_whom_it_killed(tmp_path: Path, namespace: str, proof: bool) -> None:
    proc, log = fake_proc(tmp_path / "proc", 0), tmp_path / "kmsg"
    (proc / "self" / "ns").mkdir(parents=True)
    (proc / "self" / "ns" / "pid").symlink_to(namespace)
    log.write_text(KILL.format(pid=7))
    watch = OomWatch(proc, KernelLog(log, proc=proc))
    with log.open("a") as file:
        file.write(KILL.format(pid=8))
    assert watch.evidence(None, [7]) is None, "of an earlier process with that number"
    found = watch.evidence(None, [6, 8])
    assert (found is not None) == proof, "in a container the log's numbers are others"
    if found is not None:
        assert (found.kind, found.words) == ("proof", "its log names process 8 (python), 12.0 GiB resident")


def test_full_memory_is_likely(tmp_path: Path) -> None:
    def words(host: HostSample) -> str:
        found = OomWatch(tmp_path).evidence(host)
        assert found is None or found.kind == "likely"
        return found.words if found is not None else ""

    assert words(HostSample(memory_total_bytes=100, memory_available_bytes=50)) == ""
    assert "98 % of host memory" in words(HostSample(memory_total_bytes=100, memory_available_bytes=2))
    assert "99 % of the memory limit" in words(HostSample(cgroup_limit_bytes=100, cgroup_used_bytes=99))
    assert words(HostSample()) == ""


# --- ranks' environment ---------------------------------------------------------------------------


def test_threads_are_shared_among_the_ranks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(environment: dict[str, str]) -> str:
        return rank_environment(run, 0, port=1, extensions=Path("/e"), environment=environment)[
            "OMP_NUM_THREADS"
        ]

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(9)))
    assert threads({}) == "4"
    assert threads({"OMP_NUM_THREADS": "7"}) == "7"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert threads({}) == "1"


def test_cuda_numbers_devices_as_nvml_does_unless_told(run: RunDir) -> None:
    def order(environment: dict[str, str]) -> str:
        made = rank_environment(run, 0, port=1, extensions=Path("/e"), environment=environment)
        return made["CUDA_DEVICE_ORDER"]

    assert order({}) == "PCI_BUS_ID"
    assert order({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == "FASTEST_FIRST"


def test_the_profiler_writes_nothing_into_the_log_unless_told(run: RunDir) -> None:
    def level(environment: dict[str, str]) -> str:
        made = rank_environment(run, 0, port=1, extensions=Path("/e"), environment=environment)
        return made["KINETO_LOG_LEVEL"]

    assert level({}) == "6"
    assert level({"KINETO_LOG_LEVEL": "0"}) == "0"


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (None, None),
        ("", ""),
        ("8.0;9.0", "8.0;9.0"),
        ("9.0a", "9.0"),
        (" 8.0 9.0a;9.0 10.0f+PTX;", "8.0;9.0;10.0+PTX"),
        ("9.0a+PTX;9.0", "9.0+PTX;9.0"),
        ("Hopper", "9.0"),
    ],
)
def test_ranks_get_an_arch_list_that_deepspeed_can_read(
    given: str | None, made: str | None, run: RunDir
) -> None:
    environment = {} if given is None else {"TORCH_CUDA_ARCH_LIST": given}
    ranks = rank_environment(run, 0, port=1, extensions=Path("/e"), environment=environment)
    assert ranks.get("TORCH_CUDA_ARCH_LIST") == made


def test_worker_is_started_without_the_current_folder_on_its_path(run: RunDir) -> None:
    assert worker_command(run, {}) == [sys.executable, "-P", "-m", "llmtop.trainer.worker", str(run.path)]
    assert worker_command(run, {"LLMTOP_WORKER_COMMAND": "a 'b c'"}) == ["a", "b c", str(run.path)]


# --- requests -------------------------------------------------------------------------------------


def test_requests_are_read_in_the_order_of_asking(run: RunDir) -> None:
    run.write_supervisor_pid()
    ids = [control.request(run, "stop", {"save": bool(n % 2)}) for n in range(5)]
    assert [asked.request_id for asked in control.pending(run)] == ids
    (run.control_dir / "0.json").write_text('{"request_id": "another", "action": "stop"}')
    (run.control_dir / ".aside.json.1.new").write_text("")
    first = control.read_requests(run)[0]
    assert isinstance(first, control.NotARequest) and "not called by the id" in first.why
    assert len(control.read_requests(run)) == 6


def test_a_run_without_supervisor_takes_no_requests(run: RunDir) -> None:
    with pytest.raises(LlmtopError, match="takes no requests"):
        control.stop(run, save=True)
    assert control.wait_for_end(run, 5) is None


def test_a_request_that_cannot_be_written_says_why(run: RunDir) -> None:
    run.write_supervisor_pid()
    run.control_dir.rmdir()
    with pytest.raises(LlmtopError, match="cannot be written"):
        control.stop(run, save=True)


def test_signal_names() -> None:
    from llmtop.trainer.supervisor.ranks import signal_name

    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 3) == f"signal {signal.SIGRTMIN + 3}"


@pytest.mark.parametrize(
    ("parent", "code"), [("ours", 0), ("another", -signal.SIGKILL), ("", 0), (None, 0)], ids=str
)
def test_a_rank_whose_parent_is_not_its_supervisor_leaves_at_once(parent: str | None, code: int) -> None:
    """As after a SIGKILL of the supervisor while the rank's interpreter was starting."""
    given = {"ours": str(os.getpid()), "another": str(os.getpid() + 1), "": ""}
    environment = {k: v for k, v in os.environ.items() if k != SUPERVISOR_PID}
    if parent is not None:
        environment[SUPERVISOR_PID] = given[parent]
    program = "from llmtop.trainer.pdeath import die_with_parent; die_with_parent()"
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == code


def test_ranks_are_told_who_supervises_them(run: RunDir, tmp_path: Path) -> None:
    environment = rank_environment(run, 0, port=1, extensions=tmp_path, environment={SUPERVISOR_PID: "1"})
    assert environment[SUPERVISOR_PID] == str(os.getpid())
