"""Searches that the app begins: processes of their own, read from their folder and ended by a signal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtop.presets.catalog import load_recipe
from llmtop.presets.resolve import Layer, Machine, recipe_layers, resolve
from llmtop.presets.spec import RunSpec, ValueSource
from llmtop.profiler.record.rundir import list_runs
from llmtop.trainer.tune.state import SearchState, TuneReader
from llmtop.tui.feeds import searching
from tests.trainer.supervised import GRACES, TIMEOUT_SECONDS
from tests.trainer.trial_rank import HOLDS, worker_command


def small() -> RunSpec:
    layers = recipe_layers(load_recipe("cpu-demo"))
    layers.append(Layer(ValueSource.COMMAND_LINE, "", {"gpus": 1, "micro_batch": 1}))
    return resolve(layers, name="small", machine=Machine(gpu="cpu", gpus=1, host_memory_bytes=1 << 36))


def seen(reader: TuneReader, condition: Callable[[SearchState], object]) -> SearchState:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition(state := reader.poll()):
        assert time.monotonic() < end, state
        time.sleep(0.02)
    return state


def test_a_search_is_begun_seen_ended_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORKER_COMMAND", worker_command()), ("GRACES", GRACES)):
        monkeypatch.setenv(f"LLMTOP_{name}", value)
    monkeypatch.setenv(HOLDS, "2")
    spec = small()
    assert searching.search_for(spec, tmp_path) is None
    tune = searching.begin(spec, tmp_path)
    try:
        reader = TuneReader(tune)
        state = seen(reader, lambda state: state.run is not None and state.run.steps_finished == 2)
        assert state.going and state.running is not None and state.running.number == 1 and not state.ended
        found = searching.search_for(spec, tmp_path)
        assert found is not None and found.path == tune.path
        assert searching.interrupt(tune)
        state = seen(reader, lambda state: not state.going)
        assert state.running is None and not state.ended and state.run is None
        assert not any(run.supervisor_alive() for run in list_runs(tune.trials_root))
        assert not searching.interrupt(tune), "nobody is at it"
        # Its last words come after it has let go of the search.
        seen(reader, lambda _: searching.last_words(tune) == "interrupted")
        monkeypatch.setenv(HOLDS, "0")
        searching.go_on(tune)
        state = seen(reader, lambda state: state.ended)
        assert state.best is not None and state.best.step_seconds == pytest.approx(1.0)
    finally:
        if searching.interrupt(tune):
            seen(TuneReader(tune), lambda state: not state.going)
