"""The benchmark of the search: what it sweeps, and how a search is judged by its sweep."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import tune, tune_bench, tune_summary, tune_sweep
from benchmarks.rows import Row, RowLog, read_rows
from llmtop.presets.resolve import Machine
from llmtop.trainer.tune.space import choice_of, key_of

H200 = Machine(gpu="h200", gpus=1, host_memory_bytes=1 << 40)


ON_MANY = "llama-8b"
"""The case that one GPU does not hold."""


def on_eight(bench: tune_bench.Bench) -> None:
    bench.options.gpus = 8
    bench.machine = replace(H200, gpus=8)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tune_bench.Bench:
    monkeypatch.setattr(tune_bench, "machine_of", lambda options: H200)
    monkeypatch.setattr(tune_bench, "host_memory_bytes", lambda: H200.host_memory_bytes)
    monkeypatch.setattr(tune_bench, "lacking", lambda: lambda run: "")
    out = tmp_path / "rows.jsonl"
    return tune_bench.Bench(argparse.Namespace(out=out, minutes=1.0, gpus=1, fresh=False, built=False))


@pytest.mark.parametrize("name", [name for name in tune_bench.CASES if name != "cpu"])
def test_a_sweep_begins_with_what_was_found_and_holds_no_setting_twice(
    name: str, bench: tune_bench.Bench
) -> None:
    if name == ON_MANY:
        on_eight(bench)
    spec = bench.spec(name)
    plain = list(tune_sweep.swept_settings(bench, name, spec))
    assert len(plain) >= 32 and len({one.key for one in plain}) == len(plain)
    costs = [one.cost_seconds for one in plain]
    assert costs == sorted(costs)
    usual = bench.space(spec, [], [])
    found = next(one for one in reversed(usual.candidates) if one.key not in {p.key for p in plain})
    row: Row = {
        "cell": bench.cell(name, kind="search"),
        "found": found.choice,
        "start": choice_of(spec, usual.knobs),
    }
    RowLog(bench.options.out).add(row)
    again = list(tune_sweep.swept_settings(bench, name, spec))
    assert again[0].key == found.key and len(again) >= len(plain) + 1
    assert again[1].key == key_of(row["start"])


def test_a_search_is_judged_by_what_the_sweep_measured_of_both() -> None:
    cell = {"case": "x", "gpus": 1, "gpu": "h200"}
    search: Row = {
        "cell": {**cell, "kind": "search"}, "found": {"a": 1}, "start": {"a": 2}, "found_over_start": 9.0,
        "runs": 12, "minutes": 4.0, "lost": 1, "out_of_memory": 0,
    }  # fmt: skip
    times = {1: 1.0, 2: 1.5, 3: 0.99, 4: None}
    settings: list[Row] = [
        {
            "cell": {**cell, "kind": "setting", "choice": {"a": a}},
            "step_seconds": seconds,
            "outcome": "measured" if seconds else "failed",
        }
        for a, seconds in times.items()
    ]
    elsewhere = {**cell, "gpus": 2, "kind": "setting", "choice": {"a": 5}}
    other: Row = {"cell": elsewhere, "step_seconds": 0.1, "outcome": "measured"}
    (one,) = tune_summary.judged([search, *settings, other])
    assert (one["found_over_best"], one["found_over_start"], one["swept"]) == (0.99, 1.5, 4)
    (alone,) = tune_summary.judged([search])
    assert (alone["found_over_best"], alone["found_over_start"], alone["swept"]) == (None, 9.0, 0)
    assert "n/a of the best of 0 swept" in tune_summary.summary([search])


def test_the_larger_sweep_judges_alone_and_both_ways_are_set_beside_each_other() -> None:
    cell = {"case": "x", "gpus": 1, "gpu": "h200"}
    search: Row = {
        "cell": {**cell, "kind": "search"}, "found": {"a": 1}, "start": {"a": 2}, "found_over_start": 9.0,
        "runs": 12, "minutes": 4.0, "lost": 0, "out_of_memory": 0,
    }  # fmt: skip
    alone, live = {1: 1.0, 2: 1.6}, {1: 1.02, 2: 1.5, 3: 1.0}
    rows: list[Row] = [
        {"cell": {**cell, "kind": kind, "choice": {"a": a}}, "step_seconds": seconds, "outcome": "measured"}
        for kind, times in ((tune_summary.ALONE, alone), (tune_summary.LIVE, live))
        for a, seconds in times.items()
    ]
    (one,) = tune_summary.judged([search, *rows])
    assert (one["swept"], one["live"]) == (3, True)
    assert one["found_over_best"] == 0.9804 and one["found_over_start"] == 1.4706
    assert one["live_over_alone"] == [0.9375, 1.02]
    assert "0.980x of the best of 3 swept live" in tune_summary.summary([search, *rows])


def test_a_search_that_is_cut_off_keeps_what_it_measured_and_stays_open(
    bench: tune_bench.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_eight(bench)
    bench.options.trials, bench.options.search_minutes = 3, 0.0

    class CutOff:
        def __init__(self, *_: object, **__: object) -> None: ...

        def run(self, *_: object, **__: object) -> str:
            raise KeyboardInterrupt

    @contextmanager
    def starts(_spec: object, _root: object) -> Iterator[None]:
        yield None

    monkeypatch.setattr(tune, "Search", CutOff)
    monkeypatch.setattr(bench, "warm_up", lambda spec, root: None)
    monkeypatch.setattr(bench, "starts", starts)
    monkeypatch.setattr(bench, "left_seconds", lambda: 600.0)
    with pytest.raises(KeyboardInterrupt):
        tune.search(bench, ON_MANY, tmp_path)
    (row,) = read_rows(bench.options.out)
    assert row["cell"]["kind"] == "cut off" and row["cell"]["gpus"] == 8 and row["trials"] == []
    assert bench.cell(ON_MANY, kind="search", fresh=False) not in bench.log
