"""Two real runs that differ in one switch: what ran in each, and what the switch changed."""

from __future__ import annotations

from statistics import median

import pytest

from llmtop.profiler.effects.compare import compare
from llmtop.profiler.effects.switches import measure, read_others, switches
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.report.build import build_report
from tests.worker.launching import deepspeed_config, events_of, log_end, run_matrix, tiny_spec

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[RunDir]:
    """The same tiny model with eager attention and with SDPA and recomputation off and on."""
    root = tmp_path_factory.mktemp("runs")
    specs = [
        tiny_spec(attention="eager", steps=STEPS),
        tiny_spec(attention="sdpa", steps=STEPS),
        tiny_spec(attention="sdpa", steps=STEPS, gradient_checkpointing=True),
    ]
    runs = [RunDir.create(root, spec, predict(spec), deepspeed_config(spec)) for spec in specs]
    assert run_matrix(runs) == [0], log_end(runs[0], 0)
    return runs


def test_each_switch_is_seen_and_measured_against_the_run_without_it(pair: list[RunDir]) -> None:
    eager, sdpa, recomputed = pair
    for run, key, other in ((sdpa, "attention", eager), (recomputed, "checkpointing", sdpa)):
        state, prediction = read_state(run), run.prediction()
        own = measure(run.run_id, run.spec(), state, prediction)
        found = switches(own, state.ranks.get(0), read_others(run, state.host))
        switch = next(switch for switch in found if switch.key == key)
        assert (switch.on, switch.compared_run) == (True, other.run_id), switch
        assert switch.step_percent is not None and switch.peak_bytes_change is not None


def test_compare_tells_what_ran_in_each(pair: list[RunDir]) -> None:
    found = compare(pair[0], pair[1])
    assert [option.option for option in found.options] == ["attention"]
    ran = {row.what: (row.first, row.second) for row in found.ran}
    assert ran["attention"] == (
        "softmax between matrix products, with the whole score matrix",
        "torch's flash attention for the CPU (SDPA)",
    )
    assert found.loss_step == STEPS


def test_one_step_is_marked_and_counts_in_no_median(pair: list[RunDir]) -> None:
    run = pair[0]
    steps = events_of(run, 0, StepFinished)
    assert [step.step for step in steps if step.profiled] == [3]
    timed = [step.step_seconds for step in steps if step.step > 2 and not step.profiled]
    assert len(timed) == STEPS - 3
    assert build_report(run).step_seconds == median(timed)


def test_nothing_that_was_asked_for_is_missing(pair: list[RunDir]) -> None:
    for run in pair:
        assert not [f for f in build_report(run).findings if f.key.endswith("_not_on")]
