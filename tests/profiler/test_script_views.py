"""What is said of a script of which no more than its steps is known, by every view that tells of runs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from llmtop.presets.resolve import Machine
from llmtop.presets.spec import Provenance, ValueSource
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.effects.compare import compare
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.findings.find import findings
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import ModelBuilt, RankStarted, RunEnded, RunStarted, StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.record.scriptevents import FoundModel, RankAttached
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.comparepage import read_compare_page
from llmtop.profiler.report.sections import head
from llmtop.profiler.report.text import render
from llmtop.trainer.script.unseen import unseen_prediction, unseen_spec
from llmtop.tui.commands.compare import render as render_comparison
from llmtop.tui.commands.follow import Narrator
from llmtop.tui.commands.plain import PlainTeller
from llmtop.tui.feeds.runsfeed import run_row
from llmtop.tui.feeds.view import RunView
from llmtop.tui.widgets.headrows import identity
from tests.recorded import make_recorded_run

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
                params=2177,
                trainable_params=2177,
                module_class="Sequential",
                optimizer=optimizer,
                engine_optimizer=optimizer,
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
    assert "ranks rank 0 running, or its end not known after step 40" in words


def test_what_is_not_seen_of_a_script_is_not_compared(tmp_path: Path) -> None:
    one, two = script_run(tmp_path, "a.py"), script_run(tmp_path, "b.py", optimizer="AdamW")
    found = compare(one, two)
    assert found.options == ()
    text = "\n".join(render_comparison(found, 200))
    assert "all alike" not in text and "Options: none is known to differ" in text
    assert "A is a script (python a.py), B is a script (python b.py)" in text
    assert "Sequential, 2.18K parameters on 1 x cpu" in text and "Adam -> AdamW" in text
    assert not any(what in text for what in ("different data", "different sequence", "builtin:english"))
    page = read_compare_page(one, two, Scrubber({}))
    assert "All options are alike" not in page and "A is a script (python a.py)" in page


def test_a_script_beside_a_run_of_llmtop_has_only_unknown_options(tmp_path: Path) -> None:
    own = make_recorded_run(tmp_path, steps=6)
    given = replace(own.spec(), provenance={"seq_len": Provenance(source=ValueSource.COMMAND_LINE)})
    own.spec_path.write_bytes(msgspec.json.encode(given))
    own = RunDir.open(own.path)
    for first, second in ((own, script_run(tmp_path)), (script_run(tmp_path), own)):
        found = compare(first, second)
        known = {row.option: row for row in found.options}
        assert {"seq_len"} <= set(known) <= {"seq_len", "gpu"}
        row = known["seq_len"]
        sides = {first.path: (row.first, row.first_from), second.path: (row.second, row.second_from)}
        assert sides.pop(own.path) == (given.options.seq_len, given.provenance["seq_len"])
        assert list(sides.values()) == [(None, None)]
        assert "not known" in "\n".join(render_comparison(found, 200))
        assert "not known" in read_compare_page(first, second, Scrubber({}))
        assert json.loads(msgspec.json.encode(found))["options"]


@pytest.mark.parametrize("ended", [False, True])
def test_the_model_of_a_script_is_called_by_its_class(tmp_path: Path, ended: bool) -> None:
    run = script_run(tmp_path, ended=ended)
    state = read_state(run)
    report = build_report(run)
    assert report.model == "Sequential, 2.18K parameters" and run_row(run, state).model == "Sequential"
    assert (report.zero, report.precision, report.attention, report.optimizer) == (None, None, None, "Adam")
    text, page = render(report, 200), str(head(report))
    for told in (text, page):
        assert "Sequential, 2.18K parameters on 1 x cpu: Adam" in told
        assert "no training has been seen" not in told and "no configuration" in told
        assert "ZeRO" not in told and "bf16" not in told


def test_of_a_script_that_never_trained_nothing_is_made_up(tmp_path: Path) -> None:
    run = script_run(tmp_path, steps=0, ended=True)
    report = build_report(run)
    assert report.model == run_row(run, read_state(run)).model == "not seen"
    assert report.not_predicted == "no training has been seen in it"


@pytest.mark.parametrize("steps", [0, 40])
def test_the_head_of_the_monitor_names_no_stage_before_an_engine_is_seen(tmp_path: Path, steps: int) -> None:
    run = script_run(tmp_path, steps=steps)
    state, spec, prediction = read_state(run), run.spec(), run.prediction()
    parts = breakdown(state, spec, prediction)
    view = RunView(state=state, spec=spec, prediction=prediction, breakdown=parts)
    told = identity(view, 160).plain
    assert "ZeRO" not in told and "1 x cpu" in told
    assert ("Sequential" in told) is bool(steps)
