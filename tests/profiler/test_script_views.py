"""What is said of a script of which no more than its steps is known, by every view that tells of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.presets.resolve import Machine
from llmtop.profiler.findings.find import findings
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import ModelBuilt, RankStarted, RunEnded, RunStarted, StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.record.scriptevents import FoundModel, RankAttached
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.text import render
from llmtop.trainer.script.unseen import unseen_prediction, unseen_spec
from llmtop.tui.commands.follow import Narrator
from llmtop.tui.commands.plain import PlainTeller

MACHINE = Machine(gpu="cpu", gpus=1, host_memory_bytes=64 << 30)


def script_run(
    root: Path, name: str = "train.py", *, optimizer: str = "Adam", steps: int = 40, ended: bool = False
) -> RunDir:
    """A plain loop over a model without a configuration, as the hook and the supervisor record it."""
    spec = unseen_spec(("python", name), root, MACHINE)
    run = RunDir.create(root, spec, unseen_prediction(), {})
    with EventWriter(run.events_path(SUPERVISOR), SUPERVISOR) as writer:
        writer.write(
            RunStarted(run_id=run.run_id, name=spec.name, pid=1, host="h", world_size=1, llmtop_version="1")
        )
        writer.write(RankStarted(rank=0, pid=2))
        if ended:
            writer.write(RunEnded(state="completed", reason=f"{name} ended with exit code 0"))
    with EventWriter(run.events_path(0), "rank0") as writer:
        if steps:
            found = FoundModel(precision="fp32", optimizer="adamw_torch")
            writer.write(RankAttached(pid=2, world_size=1, framework="torch", found=found))
            built = ModelBuilt(
                params=2177, trainable_params=2177, optimizer=optimizer, engine_optimizer=optimizer
            )
            writer.write(built)
        for step in range(2, steps + 1):
            phases: dict[str, float | None] = {
                "data": 0.01,
                "forward": 0.03,
                "backward": 0.05,
                "optimizer": 0.01,
            }
            writer.write(StepFinished(step=step, loss=1.5, step_seconds=0.1, phase_seconds=phases))
    return run


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
def test_nobody_asked_a_script_for_an_optimizer_or_a_switch(tmp_path: Path, optimizer: str) -> None:
    run = script_run(tmp_path, optimizer=optimizer)
    keys = {one.key for one in findings(read_state(run), run.spec(), run.prediction())}
    assert not [key for key in keys if key.endswith("_not_on")]
    assert build_report(run).switches == ()


def test_a_figure_that_a_script_never_has_is_not_told_without_its_name(tmp_path: Path) -> None:
    run = script_run(tmp_path)
    state = read_state(run)
    (line, *_) = PlainTeller(run).lines(state, 0.0)
    assert "step 40  loss 1.5000  memory " in line
    (line,) = Narrator(run.spec()).lines(state, 0.0)
    assert line == "step 40  loss 1.5000  100 ms a step"


def test_the_only_rank_is_called_one(tmp_path: Path) -> None:
    words = " ".join(render(build_report(script_run(tmp_path)), 200).split())
    assert "ranks rank 0 running or not known to have ended after step 40" in words
