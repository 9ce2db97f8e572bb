"""Runs forked from a process that has their libraries loaded, against those that are started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llmtop.presets.catalog import load_recipe
from llmtop.presets.resolve import Layer, Machine, recipe_layers, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.tune.nest import Nest
from llmtop.trainer.tune.trial import end_run, start_trial, trial_spec

TIMEOUT_SECONDS = 120.0


def small(**options: Any) -> RunSpec:
    values = {"gpus": 2, "seq_len": 32, "micro_batch": 2, "threads_per_rank": 1, **options}
    layers = [*recipe_layers(load_recipe("cpu-demo")), Layer(ValueSource.MACHINE, "", values)]
    spec = resolve(layers, name="nest", machine=Machine(gpu="cpu", gpus=1, host_memory_bytes=1 << 36))
    return trial_spec(spec, 4)


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory, said: list[str]) -> Iterator[Nest]:
    with Nest(small(), tmp_path_factory.mktemp("nest") / "nest.log", said.append) as made:
        made.wait_ready()
        yield made


def ended(run: RunDir) -> RunState:
    control.wait_for_end(run, TIMEOUT_SECONDS)
    assert not run.supervisor_alive()
    return read_state(run)


def losses(run: RunDir) -> list[float | None]:
    return [event.loss for event in EventTail(run.events_path(0)).poll() if isinstance(event, StepFinished)]


@pytest.mark.slow
def test_a_forked_run_trains_as_one_that_was_started(nest: Nest, said: list[str], tmp_path: Path) -> None:
    forked = nest.start(small(), tmp_path)
    state = ended(forked)
    assert state.status == "completed", (state.ended, forked.log_path(0).read_text())
    assert "libraries loaded once" in said[0] and len(said) == 1
    started = start_trial(small(), tmp_path)
    assert ended(started).status == "completed"
    assert losses(forked) == losses(started) and len(losses(forked)) == 4
    assert "step 4/4" in forked.log_path(0).read_text(), "what a rank writes is in its own log"
    assert [stage.stage for stage in state.ranks[1].stages][0] == "import"


@pytest.mark.slow
def test_another_setting_with_other_threads_and_ranks_is_as_asked(nest: Nest, tmp_path: Path) -> None:
    run = nest.start(small(gpus=1, zero=0, gradient_checkpointing=True), tmp_path)
    state = ended(run)
    assert state.status == "completed" and len(state.ranks) == 1


@pytest.mark.slow
def test_runs_go_on_without_the_nest_and_ranks_not_without_their_supervisor(tmp_path: Path) -> None:
    said: list[str] = []
    with Nest(small(), tmp_path / "nest.log", said.append) as nest:
        nest.wait_ready()
        spec = small()
        run = nest.start(replace(spec, options=replace(spec.options, steps=10**6)), tmp_path)
        _wait_for_a_step(run)
    assert run.supervisor_alive(), "the nest is closed, the run is not"
    pids = [rank.pid for rank in read_state(run).ranks.values() if rank.pid is not None]
    supervisor = run.supervisor_identity()
    assert supervisor is not None and len(pids) == 2
    ranks = [process_identity(pid) for pid in pids]
    os.kill(supervisor.pid, signal.SIGKILL)
    _wait(lambda: all(process_identity(one.pid) != one for one in ranks if one is not None))


def test_a_nest_that_cannot_be_used_says_so_and_runs_start_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    said: list[str] = []
    with Nest(small(), tmp_path / "nest.log", said.append) as nest:
        nest.wait_ready()
        monkeypatch.undo()
        assert len(said) == 1 and "each trial loads its libraries itself" in said[0]
        monkeypatch.setenv("LLMTOP_WORKER_COMMAND", "/bin/true")
        run = nest.start(small(), tmp_path)
    end_run(run)
    assert not run.supervisor_alive() and read_state(run).ended is not None


def _wait_for_a_step(run: RunDir) -> None:
    _wait(lambda: read_state(run).steps_finished > 0)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
