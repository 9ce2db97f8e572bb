"""Scripts as people have them, unmodified, with real DeepSpeed on gloo, real Trainer and plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.memory.result import Component, Moment
from llmtop.profiler.record.events import MemoryClassified, ModelBuilt, RankFinished, RunEnded, StepFinished
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir, list_runs
from llmtop.profiler.record.scriptevents import BatchSeen, RankAttached, RunDescribed
from llmtop.profiler.record.stepevents import BETWEEN
from llmtop.trainer.control import wait_for_end
from tests.script.watching import SCRIPTS, SECONDS, of, output, python, torchrun, watched
from tests.worker.launching import fork_ranks, wait_for_ranks

pytestmark = pytest.mark.slow
Watched = tuple[RunDir, RunEnded, RunState]


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        yield


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watched(tmp_path_factory.mktemp("bare"), torchrun(2, "bare.py", "2"))


def _losses(text: str) -> list[float]:
    line = next(line for line in text.splitlines() if line.startswith("losses "))
    return [float(word) for word in line.removeprefix("losses [").removesuffix("]").split(",")]


def test_every_step_of_a_bare_deepspeed_loop_is_told(bare: Watched) -> None:
    run, end, state = bare
    assert end.state == "completed", (end, output(run))
    assert "exit code 0 after step 6" in end.reason
    assert state.world_size == 2 and set(state.ranks) == {0, 1}
    for rank in (0, 1):
        steps = of(run, rank, StepFinished)
        assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
        assert all(step.grad_accum == 2 and step.micro_batch == 2 for step in steps)
        assert set(steps[0].phase_seconds) == {"data", "forward", "backward", "optimizer"}
        assert steps[0].phase_memory["backward"].peak_bytes
        assert of(run, rank, RankFinished)[0].last_step == 6
    assert {step.tokens for step in of(run, 0, StepFinished)[:5]} == {2 * 2 * 32 * 2}


def test_its_losses_are_those_that_it_saw_itself(bare: Watched) -> None:
    run, _, _ = bare
    said = _losses(output(run))
    told = [step.loss for step in of(run, 0, StepFinished)]
    assert told == pytest.approx([(a + b) / 2 for a, b in zip(said[::2], said[1::2], strict=True)])


def test_watching_changes_no_number_of_the_training(bare: Watched, tmp_path: Path) -> None:
    run, _, _ = bare
    logs = [tmp_path / f"alone-{rank}.log" for rank in (0, 1)]
    codes = wait_for_ranks(fork_ranks([str(SCRIPTS / "bare.py"), "2"], logs))
    assert codes == [0, 0], logs[0].read_text()
    assert _losses(logs[0].read_text()) == _losses(output(run))


def test_an_evaluation_between_two_steps_is_no_step_and_marks_the_times(bare: Watched) -> None:
    run, _, _ = bare
    assert all(step.profiled for step in of(run, 0, StepFinished)[1:])


def test_memory_is_named_by_component(bare: Watched) -> None:
    run, _, state = bare
    params = 256 * 32 * 2 + 2 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    built = state.ranks[0].model
    assert built is not None and built.params == params
    steady = [seen for seen in of(run, 0, MemoryClassified) if seen.moment == Moment.STEADY]
    # Half of the states of AdamW in fp32 lie on each of two ranks, and each step count of 4 bytes.
    state_bytes = steady[-1].components[Component.OPTIMIZER_STATE]
    assert state_bytes == pytest.approx(8 * params / 2, rel=0.02)


def test_the_prediction_follows_from_the_live_engine(bare: Watched) -> None:
    run, _, state = bare
    spec = run.spec(state.changes.setting)
    assert spec.script is not None and spec.script.described
    options = spec.options
    assert (options.zero, options.precision, options.optimizer) == (2, "fp32", "adamw_torch")
    assert (options.gpus, options.micro_batch, options.grad_accum) == (2, 2, 2)
    assert spec.model.num_layers == 2 and spec.model.vocab_size == 256
    assert run.prediction(state.changes.setting).is_known
    assert run.deepspeed_config(state.changes.setting)["zero_optimization"]["stage"] == 2


def test_a_longer_batch_gives_a_new_prediction(bare: Watched) -> None:
    run, _, state = bare
    assert [seen.seq_len for seen in of(run, 0, BatchSeen)] == [32, 48]
    described = [event.setting for event in of(run, SUPERVISOR, RunDescribed)]
    assert described[-1] == state.changes.setting
    assert run.spec(state.changes.setting).options.seq_len == 48


def test_the_trainer_of_transformers_on_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, end, state = watched(tmp_path, torchrun(1, "trainer.py", "ds"))
    assert end.state == "completed", (end, output(run))
    assert of(run, 0, RankAttached)[0].framework == "deepspeed"
    steps = of(run, 0, StepFinished)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert all(BETWEEN in step.phase_seconds for step in steps), "accelerate's loader is one of torch's"
    # Its own log has three decimals of the same mean.
    assert f"'loss': '{steps[0].loss:.4g}'" in output(run)
    assert run.spec(state.changes.setting).options.zero == 3


def test_the_trainer_of_transformers_on_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, end, state = watched(tmp_path, python("trainer.py"))
    assert end.state == "completed", (end, output(run))
    assert of(run, 0, RankAttached)[0].framework == "torch"
    steps = of(run, 0, StepFinished)
    assert [step.step for step in steps] == [2, 3, 4, 5], "the first one is where it is found"
    assert f"'loss': '{steps[0].loss:.4g}'" in output(run)
    spec = run.spec(state.changes.setting)
    assert (spec.options.zero, spec.options.optimizer) == (0, "adamw_torch")


def test_supervised_fine_tuning_by_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, end, state = watched(tmp_path, python("sft.py"))
    assert end.state == "completed", (end, output(run))
    steps = of(run, 0, StepFinished)
    assert [(step.step, step.micro_batch, step.tokens) for step in steps] == [
        (2, 2, 34), (3, 2, 34), (4, 2, 34)
    ]  # fmt: skip
    for step in steps:
        # As its own log has it, with four digits.
        assert step.loss is not None and f"'loss': '{step.loss:.4g}'" in output(run)
    options = run.spec(state.changes.setting).options
    assert (options.zero, options.optimizer, options.gradient_checkpointing) == (0, "adamw_torch", True)


def test_a_loop_that_accelerate_launches(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu")
    plain = (
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    )
    run, end, state = watched(tmp_path, (*launcher, *plain, str(SCRIPTS / "accelerated.py")))
    assert end.state == "completed", (end, output(run))
    steps = of(run, 0, StepFinished)
    assert [(step.step, step.grad_accum, step.tokens) for step in steps] == [
        (2, 2, 64),
        (3, 2, 64),
        (4, 2, 64),
    ]
    assert run.spec(state.changes.setting).options.grad_accum == 2


def test_a_model_without_a_configuration_is_measured_and_not_predicted(tmp_path: Path) -> None:
    run, end, state = watched(tmp_path, python("plain.py"))
    assert end.state == "completed", (end, output(run))
    assert [step.step for step in of(run, 0, StepFinished)] == [2, 3, 4, 5, 6]
    assert state.description is not None and state.description.setting is None
    assert "no Hugging Face configuration" in state.description.problem
    assert [built.module_class for built in of(run, 0, ModelBuilt)] == ["Sequential"]
    assert not run.prediction().is_known


def test_a_script_that_waits_for_its_data_is_told_so(tmp_path: Path) -> None:
    run, end, state = watched(tmp_path, python("slowdata.py"))
    assert end.state == "completed", (end, output(run))
    steps = of(run, 0, StepFinished)
    assert [step.step for step in steps] == list(range(2, 13))
    for step in steps:
        # Two records a batch, each of which takes 0.03 s or more.
        assert (step.phase_seconds["data"] or 0.0) >= 0.06 and (step.phase_seconds[BETWEEN] or 0.0) >= 0.0
        assert sum(taken or 0.0 for taken in step.phase_seconds.values()) <= step.step_seconds + 1e-6
    found = {one.key: one for one in findings(state, run.spec(), run.prediction())}
    assert "loading takes" in found["input_bound"].evidence and "num_workers" in found["input_bound"].change


def test_an_exception_of_the_script_is_named(tmp_path: Path) -> None:
    run, end, _ = watched(tmp_path, torchrun(1, "plain.py", "fail"))
    assert (end.state, end.rank) == ("failed", 0)
    assert "RuntimeError: planted in the script" in end.reason and "after step 6" in end.reason


def test_a_line_of_code_begins_a_run_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        torchrun(2, "callback.py", "ds"),
        env={**os.environ, "LLMTOP_RUNS_DIR": str(tmp_path / "runs")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = list_runs(tmp_path / "runs")
    assert f"llmtop attach {run.run_id}" in done.stderr
    end = wait_for_end(run, SECONDS)
    assert end is not None and end.state == "completed" and "ended by itself after step 4" in end.reason
    for rank in (0, 1):
        assert [step.step for step in of(run, rank, StepFinished)] == [1, 2, 3, 4]
