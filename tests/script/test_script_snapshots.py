"""A closer look at scripts of people's own: asked of their ranks while they train, through the hook."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.events import ControlAnswered, StepFinished
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotParams, SnapshotTaken
from llmtop.profiler.snapshots.modules import ModuleTable
from llmtop.profiler.snapshots.tracesummary import TraceSummary
from llmtop.trainer import control
from llmtop.trainer.script.start import start_script
from llmtop.tui.cli import main
from tests.script.watching import SECONDS, leave_nothing, of, output, python, torchrun

pytestmark = pytest.mark.slow
MANY = "100000"
PACED = 20


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        yield


def until(run: RunDir, condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end and run.supervisor_alive(), output(run)[-3000:]
        time.sleep(0.05)


def is_described(run: RunDir) -> bool:
    script = run.spec().script
    return script is not None and script.described


def asked(run: RunDir, **params: object) -> ControlAnswered:
    request = control.snapshot(run, msgspec.convert(params, SnapshotParams))
    answered = control.wait_until_settled(run, request, SECONDS)
    assert answered is not None, output(run)[-3000:]
    return answered


def taken(run: RunDir, rank: int, what: str) -> SnapshotTaken:
    [event] = [event for event in of(run, rank, SnapshotTaken) if event.what == what]
    assert not event.problem, event
    return event


def ended(run: RunDir, file: Path) -> None:
    file.touch()
    end = control.wait_for_end(run, SECONDS)
    assert end is not None and end.state == "completed", (end, output(run)[-3000:])


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two ranks of a DeepSpeed script that were asked for traces and modules, after their end."""
    folder = tmp_path_factory.mktemp("traced")
    file = folder / "over"
    run = start_script(torchrun(2, "endless.py", str(file), MANY, "ds"), root=folder)
    try:
        # From the pace of its steps it is told how far ahead all ranks will have read what is asked of them.
        until(run, lambda: is_described(run) and len(of(run, 1, StepFinished)) >= PACED)
        answered = asked(run, what="trace", ranks=[0, 1], steps=2)
        assert answered.answer == "done", answered
        assert asked(run, what="modules", ranks=[1]).answer == "done"
        refused = asked(run, what="modules", ranks=[2])
        assert refused.answer == "refused" and "there is no rank 2" in refused.reason
        ended(run, file)
    finally:
        leave_nothing(run)
    return run


def test_ranks_of_a_deepspeed_script_trace_the_same_steps(traced: RunDir) -> None:
    run = traced
    first, second = taken(run, 0, "trace"), taken(run, 1, "trace")
    assert (first.step, first.steps) == (second.step, 2)
    marked = {step.step for step in of(run, 0, StepFinished) if step.profiled}
    assert {first.step, first.step + 1, taken(run, 1, "modules").step} <= marked
    summary = msgspec.json.decode((run.path / first.files[0].name).read_bytes(), type=TraceSummary)
    assert summary.collectives and {part.name for part in summary.parts} >= {"attention", "mlp", "optimizer"}
    table = msgspec.json.decode(
        (run.path / taken(run, 1, "modules").files[0].name).read_bytes(), type=ModuleTable
    )
    assert table.rank == 1 and any(row.kind == "LlamaMLP" and row.saved_bytes > 0 for row in table.rows)


def test_the_rate_of_a_step_is_the_one_that_it_was_made_with(traced: RunDir) -> None:
    """A schedule that the engine owns sets the next one inside of `step`."""
    assert "Converting a tensor" not in output(traced), "a loss is read without a warning of torch's"
    line = next(line for line in output(traced).splitlines() if line.startswith("rates "))
    rates = [float(word) for word in line.removeprefix("rates [").removesuffix("]").split(",")]
    assert len(rates) == 8 and len(set(rates)) > 5
    told = [step.learning_rate for step in of(traced, 0, StepFinished)][: len(rates)]
    assert told == pytest.approx(rates)


def test_a_plain_loop_is_looked_at_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path))
    file = tmp_path / "over"
    run = start_script(python("endless.py", str(file), MANY), root=tmp_path)
    try:
        assert main(["snapshot", run.run_id, "--what", "modules"]) == ExitCode.USAGE
        assert "nothing that trains has been seen" in capsys.readouterr().err
        until(run, lambda: is_described(run) and of(run, 0, StepFinished))
        assert main(["snapshot", run.run_id, "--what", "state"]) == ExitCode.USAGE
        assert "on the CPU has no memory snapshot" in capsys.readouterr().err
        assert main(["snapshot", run.run_id, "--what", "trace", "--json"]) == ExitCode.DONE
        answer = json.loads(capsys.readouterr().out)
        assert answer["status"] == "taken" and answer["ranks"][0]["table"]
        ended(run, file)
    finally:
        leave_nothing(run)
    (step,) = [step for step in of(run, 0, StepFinished) if step.step == taken(run, 0, "trace").step]
    assert step.profiled
