"""The supervisor of a command: its end, its output, its requests, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.presets.resolve import Machine
from llmtop.profiler.hardware import nvml
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import (
    ControlAnswered,
    HardwareSampled,
    RankFailed,
    RunEnded,
    TopologySeen,
)
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import HARDWARE, SUPERVISOR, RunDir
from llmtop.profiler.record.scriptevents import (
    BatchSeen,
    DevicesFound,
    FoundModel,
    RankAttached,
    RunDescribed,
)
from llmtop.trainer import control, stacks
from llmtop.trainer.script import start
from llmtop.trainer.script.start import observe, start_script
from llmtop.trainer.script.unseen import unseen_prediction, unseen_spec
from llmtop.trainer.supervisor.rankenv import RUN_ID
from llmtop.tui.cli import main
from llmtop.tui.feeds.monitorfeed import MonitorFeed
from llmtop.tui.feeds.runsfeed import RunsFeed
from llmtop.tui.widgets.headrows import identity
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.script.watching import SECONDS, leave_nothing, of, output, watched
from tests.trainer.fakedriver import shut_until, stand_in_for_the_driver

pytestmark = pytest.mark.slow


def code(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


@pytest.fixture
def going(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunDir]:
    """A command that runs until it is ended, once it says so."""
    run = start_script(code(request.param), root=tmp_path)
    try:
        until(lambda: "ready" in output(run))
        yield run
    finally:
        leave_nothing(run)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def left_of(run: RunDir) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_ID) == run.run_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


WAITS = "import time; print('ready', flush=True); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"
FORKS = f"import os; os.fork(); {WAITS}"


def test_a_command_that_ends_well(tmp_path: Path) -> None:
    run, end, state = watched(tmp_path, code("print('hello')"))
    assert (end.state, state.status) == ("completed", "completed")
    assert "exit code 0 and no training was seen in it" in end.reason
    assert output(run) == "hello\n"


def test_a_command_that_fails_is_named_with_what_it_said_last(tmp_path: Path) -> None:
    run, end, _ = watched(tmp_path, code("raise SystemExit('no such file: data.bin')"))
    assert end.state == "failed"
    assert "exit code 1" in end.reason and "no such file: data.bin" in end.reason
    assert str(run.log_path(0)) in end.fix


def test_a_killed_command_is_named_by_its_signal(tmp_path: Path) -> None:
    _, end, _ = watched(tmp_path, code("import os; os.kill(os.getpid(), 11)"))
    assert end.state == "failed" and "SIGSEGV" in end.reason


@pytest.mark.parametrize("going", [WAITS, FORKS], indirect=True, ids=["one process", "two"])
def test_stop_ends_it_and_leaves_nothing(going: RunDir) -> None:
    asked = control.stop(going, save=False)
    answered = control.wait_until_settled(going, asked, SECONDS)
    assert answered is not None and answered.answer == "done"
    end = control.wait_for_end(going, SECONDS)
    assert end is not None and end.state == "stopped"
    assert end.reason == "stopped on request before any training was seen in it"
    assert not left_of(going)


@pytest.mark.parametrize("going", [DEAF], indirect=True, ids=["deaf"])
def test_one_that_does_not_listen_is_killed(going: RunDir) -> None:
    identity = going.supervisor_identity()
    assert identity is not None
    os.kill(identity.pid, signal.SIGTERM)
    until(lambda: "received SIGTERM" in going.log_path(SUPERVISOR).read_text())
    os.kill(identity.pid, signal.SIGTERM)
    end = control.wait_for_end(going, SECONDS)
    assert end is not None and end.state == "stopped" and "killed" in end.reason
    assert not left_of(going)


def test_what_is_asked_of_a_step_that_came_in_the_same_turn_is_not_refused(tmp_path: Path) -> None:
    """A turn can be long: what was seen is predicted in it, and a driver asked."""
    machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=1 << 36)
    run = RunDir.create(tmp_path, unseen_spec(code(WAITS), tmp_path, machine), unseen_prediction(), {})
    supervisor = (sys.executable, "-m", "tests.script.asked_in_a_turn", str(run.path))
    subprocess.run(supervisor, cwd=Path(__file__).parents[2], check=True, timeout=SECONDS)
    asked, *_ = of(run, SUPERVISOR, ControlAnswered)
    assert (asked.action, asked.answer) == (control.SNAPSHOT, "accepted")


@pytest.mark.parametrize("going", [WAITS], indirect=True, ids=["waits"])
def test_what_it_cannot_do_is_refused_with_the_reason(going: RunDir) -> None:
    saving = control.wait_until_settled(going, control.stop(going, save=True), SECONDS)
    assert saving is not None and saving.answer == "refused" and "Without --save" in saving.reason
    changing = control.request(going, control.SET, {"words": ["micro_batch=2"]})
    answered = control.wait_until_settled(going, changing, SECONDS)
    assert answered is not None and answered.answer == "refused" and "command of your own" in answered.reason
    assert len(of(going, SUPERVISOR, ControlAnswered)) == 2


def test_a_rank_that_tells_its_failure_says_more_than_the_exit_code(tmp_path: Path) -> None:
    run, end, _ = watched(
        tmp_path,
        code(
            "import os, pathlib\n"
            "from llmtop.profiler.record.eventlog import EventWriter\n"
            "from llmtop.profiler.record.events import RankFailed\n"
            "from llmtop.profiler.record.rundir import RunDir\n"
            "run = RunDir.open(pathlib.Path(os.environ['LLMTOP_SCRIPT_RUN']))\n"
            "writer = EventWriter(run.events_path(3), 'rank3')\n"
            "writer.write(RankFailed(error_type='ValueError', message='bad rows', stage='forward', step=7))\n"
            "os._exit(1)"
        ),
    )
    assert (end.state, end.rank) == ("failed", 3)
    assert "rank 3 in forward of step 7: ValueError: bad rows" in end.reason
    assert of(run, 3, RankFailed)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "no Hugging Face configuration"),
        ({"model_type": "no-such-architecture", "hidden_size": 8}, "no-such-architecture"),
    ],
)
def test_why_nothing_is_predicted_is_in_the_record(
    tmp_path: Path, config: dict[str, object] | None, words: str
) -> None:
    run = start_script(code(WAITS), root=tmp_path)
    try:
        writer = EventWriter(run.events_path(0), "rank0")
        attached = RankAttached(pid=os.getpid(), world_size=1, framework="deepspeed", hf_config=config)
        writer.write(replace(attached, found=FoundModel(optimizer="adamw")))
        writer.write(BatchSeen(step=1, micro_batch=1, seq_len=8))
        until(lambda: of(run, SUPERVISOR, RunDescribed))
        told = of(run, SUPERVISOR, RunDescribed)[-1]
        assert told.setting is None and words in told.problem
    finally:
        leave_nothing(run)
    assert isinstance(of(run, SUPERVISOR, RunEnded)[-1], RunEnded)


@pytest.fixture
def opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file; before there is one the driver of the GPUs does not answer, and a launch does not wait long."""
    opens = tmp_path / "opens"
    stand_in_for_the_driver(monkeypatch, tmp_path / "driver", shut_until(opens))

    class Shut(FakeNvml):
        def nvmlInit(self) -> None:
            until(opens.exists)

    monkeypatch.setitem(sys.modules, "pynvml", Shut(FakeGpu()))
    # Whoever waits for it as one who needs an answer waits for ever.
    monkeypatch.setenv("LLMTOP_GRACES", "driver=3600")
    monkeypatch.setattr(nvml, "OPEN_SECONDS", 3600.0)
    monkeypatch.setattr(start, "DRIVER_SECONDS", 0.1)
    yield opens
    opens.touch()


def test_which_gpus_there_are_is_told_once_a_slow_driver_answers(
    tmp_path: Path, opens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path))
    run = start_script(code(WAITS), root=tmp_path)
    feed = MonitorFeed(run)

    def shown() -> tuple[str, ...]:
        """In the table of runs, in the report, and in the head of the monitor."""
        (row,) = (row for rows in RunsFeed(tmp_path).scan() for row in rows if row.run_id == run.run_id)
        assert main(["report", run.run_id]) == ExitCode.DONE
        view = feed.poll()
        assert view is not None
        return row.device, capsys.readouterr().out, identity(view, 120).plain

    try:
        until(lambda: "ready" in output(run))
        assert run.spec().gpu.name == "unknown" and not run.spec().on_cpu
        listed, *told = shown()
        assert listed == "no answer"
        assert all("1 x unknown (the driver has not answered)" in text for text in told)
        opens.touch()
        until(lambda: of(run, SUPERVISOR, DevicesFound))
        listed, *told = shown()
        assert listed == "1xh200" and all("1 x h200" in text for text in told)
        state = read_state(run)
        assert state.description is None and run.spec(state.changes.setting).gpu.name == "h200"
        until(lambda: of(run, SUPERVISOR, TopologySeen))
    finally:
        opens.touch()
        leave_nothing(run)
    assert len(of(run, SUPERVISOR, DevicesFound)) == len(of(run, SUPERVISOR, TopologySeen)) == 1


def test_what_was_seen_while_the_driver_hung_is_predicted_once_it_answers(
    tmp_path: Path, opens: Path
) -> None:
    run = start_script(code(WAITS), root=tmp_path)
    try:
        writer = EventWriter(run.events_path(0), "rank0")
        attached = RankAttached(pid=os.getpid(), world_size=1, framework="deepspeed", hf_config=_LLAMA)
        writer.write(replace(attached, found=FoundModel(optimizer="adamw", precision="bf16")))
        writer.write(BatchSeen(step=1, micro_batch=1, seq_len=8))
        until(lambda: of(run, SUPERVISOR, RunDescribed))
        opens.touch()
        until(lambda: len(of(run, SUPERVISOR, RunDescribed)) > 1)
        waits, told = of(run, SUPERVISOR, RunDescribed)
        assert "does not answer" in waits.problem and told.problem == ""
        assert told.setting is not None and run.spec(told.setting).gpu.name == "h200"
        assert run.prediction(told.setting).is_known
    finally:
        opens.touch()
        leave_nothing(run)


_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), "no command follows"),
        (("no-such-program",), "there is no program"),
        (("{folder}/train.py",), "llmtop run -- python"),
    ],
)
def test_what_cannot_be_started_is_refused_before_there_is_a_run(
    tmp_path: Path, command: tuple[str, ...], words: str
) -> None:
    (tmp_path / "train.py").write_text("print()")
    with pytest.raises(UsageError) as refused:
        start_script(tuple(word.format(folder=tmp_path) for word in command), root=tmp_path / "runs")
    assert words in str(refused.value)
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def foreign() -> Iterator[subprocess.Popen[bytes]]:
    """A process that llmtop has not started."""
    process = subprocess.Popen(code("import time; time.sleep(600)"))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_process_that_runs_already_is_looked_at_and_left_alone(
    tmp_path: Path, foreign: subprocess.Popen[bytes]
) -> None:
    run = observe(foreign.pid, root=tmp_path)
    try:
        until(lambda: of(run, HARDWARE, HardwareSampled)[-1:] and _sampled(run) == [0])
        spec = run.spec()
        assert spec.script is not None and spec.script.command == code("import time; time.sleep(600)")
        asked = control.wait_until_settled(run, control.stop(run, save=False), SECONDS)
        assert asked is not None and asked.answer == "done"
    finally:
        leave_nothing(run)
    end = control.wait_for_end(run, SECONDS)
    assert end is not None and end.state == "stopped" and "its process goes on" in end.reason
    assert foreign.poll() is None


def test_its_end_ends_the_run_and_is_not_made_up(tmp_path: Path, foreign: subprocess.Popen[bytes]) -> None:
    run = observe(foreign.pid, root=tmp_path)
    foreign.kill()
    foreign.wait()
    end = control.wait_for_end(run, SECONDS)
    assert end is not None and end.state == "gone" and "how it ended is not known" in end.reason
    assert read_state(run).status == "gone"


def test_its_stacks_are_taken_and_a_later_process_of_its_number_is_none_of_it(
    tmp_path: Path, foreign: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = observe(foreign.pid, root=tmp_path)
    try:
        until(lambda: read_state(run).ranks)
        assert stacks._is_rank(run, foreign.pid)
        monkeypatch.setattr(run, "created", lambda: 1.0)
        assert not stacks._is_rank(run, foreign.pid)
    finally:
        leave_nothing(run)


def test_a_process_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no process"):
        observe(2**22 + 1, root=tmp_path)


def _sampled(run: RunDir) -> list[int]:
    return [process.rank for process in of(run, HARDWARE, HardwareSampled)[-1].processes]


@pytest.mark.parametrize("going", [WAITS], indirect=True, ids=["waits"])
def test_a_stop_that_is_refused_does_not_wait_for_the_training(
    going: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(going.path.parent))
    assert main(["stop", going.run_id, "--save"]) == ExitCode.JOB_FAILED
    assert "goes on" in capsys.readouterr().err
    assert going.supervisor_alive()
