"""Rows, admission, statistics, summaries: what the benchmarks are put together from."""

from __future__ import annotations

import re
import sys
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from benchmarks import overhead, stepclock, throughput
from benchmarks.admission import Gate, Room, need_of
from benchmarks.cells import Runner, newest_events, plan
from benchmarks.overhead import in_turns, probe_costs, trimmed_mean
from benchmarks.rows import RowLog, read_rows
from benchmarks.stats import BlockTime, bootstrap, percentile
from benchmarks.summary import STRATA, summary
from benchmarks.svgplot import Line, Plot, powers, svg
from benchmarks.timeleft import LONGEST_SECONDS, TOO_LATE, TimeLeft
from benchmarks.window import first_and_last, tokens_per_second
from llmtop.presets.resolve import Machine
from llmtop.profiler.record.eventlog import Clock, EventWriter
from llmtop.profiler.record.events import BaselineMeasured, MemoryClassified, StageBegan, StepFinished
from tests.recorded import ManualClock
from tests.worker.launching import make_run, tiny_spec

RESULTS = Path(overhead.__file__).with_name("results")
H200 = Machine(gpu="h200", gpus=1, host_memory_bytes=None)


def test_a_log_knows_its_cells_and_mends_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.jsonl"
    RowLog(path).add({"cell": {"zero": 1, "gpus": 2}, "status": "completed"})
    with path.open("a") as file:
        file.write('{"cell": {"zero": 2')
    log = RowLog(path)
    assert {"gpus": 2, "zero": 1} in log and {"zero": 2} not in log
    log.add({"cell": {"zero": 3}})
    assert [row["cell"] for row in read_rows(path)] == [{"zero": 1, "gpus": 2}, {"zero": 3}]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_no_row_says_where_a_machine_keeps_its_files(path: Path) -> None:
    assert re.findall(r"(?<![\w.>~-])/(?:home|mnt|root|tmp|var|work)/[^\s\"]*", path.read_text()) == []


def test_runs_share_a_device_only_while_their_bounds_fit() -> None:
    gate = Gate(Room(device_bytes=100, host_bytes=None))
    small, large = Room(device_bytes=40, host_bytes=0), Room(device_bytes=90, host_bytes=0)
    entered, leave = threading.Event(), threading.Event()

    def third() -> None:
        with gate.enter(large) as stay:
            entered.set()
            assert stay.alone
            leave.wait(60)

    with gate.enter(small) as first:
        assert first.alone
        with gate.enter(small) as second:
            assert not any(stay.alone for stay in (first, second))
            waiting = threading.Thread(target=third)
            waiting.start()
            assert not entered.is_set()
        assert not entered.is_set(), "40 and 90 are more than 100"
    assert entered.wait(60)
    leave.set()
    waiting.join(60)


def test_a_run_larger_than_the_device_goes_in_alone() -> None:
    with Gate(Room(device_bytes=10, host_bytes=10)).enter(Room(device_bytes=99, host_bytes=99)) as stay:
        assert stay.alone


def test_a_need_holds_the_allocators_pool() -> None:
    prediction = plan({"model": "llama-3.2-1b", "gpu": "h200"}, H200, name="test").prediction
    need = need_of(prediction)
    assert need.device_bytes is not None and need.device_bytes >= prediction.peak_reserved_bytes[1]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_an_interval_holds_its_value(values: list[float]) -> None:
    found = bootstrap(values, trimmed_mean, rounds=200)
    assert min(values) - 1e-6 <= found.low <= found.high <= max(values) + 1e-6
    assert percentile(values, 1.0) == max(values)
    assert percentile(values, 0.0) == min(values)


class Worked(Struct, frozen=True, kw_only=True):
    """As `blocks.Inside`, which needs torch."""

    work: float
    beside: float
    running: float | None
    parts: dict[str, float]
    running_parts: dict[str, float] | None


def test_costs_come_from_differences_within_a_round() -> None:
    """A step of 100 ms that drifts, probes of 0.05 ms, a classification of 30 ms in each block of 10."""
    rounds = []
    for number in range(30):
        bare = 0.1 + 0.001 * number
        times = {"bare": bare, "watched": bare + 5e-5, "classified": bare + 5e-5 + 0.03 / 10}
        rounds.append({name: BlockTime(wall=wall, cpu=wall / 2) for name, wall in times.items()})
    plain, classified = probe_costs(rounds, 10)[:2]
    assert plain.milliseconds.value == pytest.approx(0.05)
    assert plain.verdict == "within"
    assert classified.milliseconds.value == pytest.approx(0.05 + 30 / overhead.CLASSIFY_EVERY)
    assert classified.verdict == "beyond"


def test_arms_take_turns_in_an_order_that_the_seed_decides() -> None:
    calls: list[str] = []

    def arm(name: str) -> overhead.Block:
        def block() -> BlockTime:
            calls.append(name)
            return BlockTime(wall=1.0, cpu=1.0)

        return block

    rounds = in_turns({"a": arm("a"), "b": arm("b")}, 0.0, at_least=20)
    assert len(rounds) == 20 and all(set(times) == {"a", "b"} for times in rounds)
    firsts = calls[::2]
    assert {"a", "b"} == set(firsts)


class TimedBench:
    """Blocks that take what they are told to, on a clock by hand."""

    def __init__(self, clock: ManualClock, block_seconds: float, on_cuda: bool = False) -> None:
        self.clock, self.block_seconds, self.blocks = clock, block_seconds, 0
        self.running = 4e-5 if on_cuda else None

    def bare(self) -> str:
        return "bare"

    def watched(self, *, classify_every: int) -> str:
        return f"watched {classify_every}"

    def step_seconds(self, arm: str, steps: int) -> BlockTime:
        return BlockTime(wall=0.1, cpu=0.1)

    def nothing_seconds(self, steps: int) -> dict[str, float]:
        return {"step": 1e-6}

    def inside_seconds(self, arm: str, steps: int, nothing: dict[str, float]) -> Worked:
        assert nothing == {"step": 1e-6}
        self.clock.advance(self.block_seconds)
        self.blocks += 1
        by_call = None if self.running is None else {"step": self.running}
        return Worked(
            work=5e-5, beside=1e-5, running=self.running, parts={"step": 5e-5}, running_parts=by_call
        )


@pytest.mark.parametrize(("block_seconds", "blocks"), [(1.0, 6), (15.0, 3), (500.0, 2)])
def test_what_is_inside_the_calls_is_measured_within_its_time_and_says_each_block(
    block_seconds: float, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, said, kept = ManualClock(), list[str](), list[dict[str, Any]]()
    tell = overhead.Tell(ready=lambda step: said.append(f"{step} s"), say=said.append, keep=kept.append)
    monkeypatch.setattr(overhead, "time", SimpleNamespace(monotonic=lambda: clock.now))
    bench = TimedBench(clock, block_seconds)
    overhead.measure(bench, 60.0, 0.0, tell)  # type: ignore[arg-type]
    (row,) = kept
    assert row["series"] == "inside" and len(row["inside_milliseconds"]) == blocks == bench.blocks - 1
    assert said[0] == "0.1 s", "before the series its limit is set"
    assert sum(words.startswith("block ") for words in said) == blocks
    assert "running_milliseconds" in row and not row["running_milliseconds"], "nothing to wait for"


def test_on_a_gpu_the_cost_is_told_with_an_idle_device_and_as_the_training_runs() -> None:
    kept = list[dict[str, Any]]()
    tell = overhead.Tell(ready=lambda step: None, say=lambda words: None, keep=kept.append)
    overhead.measure(TimedBench(ManualClock(), 1.0, on_cuda=True), 0.0, 0.0, tell)  # type: ignore[arg-type]
    (row,) = kept
    assert row["parts_milliseconds"] == {"step": pytest.approx(0.05)}
    assert row["running_parts_milliseconds"] == {"step": pytest.approx(0.04)}
    assert any("as it runs" in words and "0.0400" in words for words in row["text"])
    assert any("calls as it runs" in words and "within the goal" in words for words in row["text"])


def test_a_summary_covers_every_stratum_of_the_recorded_matrix() -> None:
    rows = read_rows(Path(__file__).parents[2] / "benchmarks" / "results" / "memory_matrix.jsonl")
    text = summary([*rows, {"cell": {"model": "x"}, "status": "out_of_memory", "reason": "CUDA"}])
    assert text.startswith(f"{len(rows) + 1} cells: {len(rows)} completed, 1 out_of_memory")
    assert all(f"allocated peak by {name}" in text for name in STRATA)
    assert "out_of_memory: model=x: CUDA" in text


def test_rows_keep_the_newest_event_of_each_kind_and_moment() -> None:
    def classified(step: int, moment: str) -> MemoryClassified:
        return MemoryClassified(step=step, moment=moment, components={"parameters": step})

    stage, baseline = StageBegan(stage="data"), BaselineMeasured(rss_bytes=7)
    kept = newest_events([stage, baseline, classified(1, "init"), classified(2, "init")])
    assert set(kept) == {"baseline_measured", "memory_classified.init"}
    assert kept["memory_classified.init"]["components"] == {"parameters": 2}
    assert kept["baseline_measured"] == {"rss_bytes": 7}


def test_a_window_leaves_warm_up_and_the_last_step_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_spec(steps=12))
    assert tokens_per_second(run) is None
    now = [0.0]
    with EventWriter(run.events_path(0), "rank0", clock=Clock(monotonic=lambda: now[0])) as events:
        for step in range(1, 13):
            now[0] += 5.0 if step <= 4 else 0.5
            events.write(StepFinished(step=step, tokens=100))
    assert first_and_last(12) == (4, 11)
    assert tokens_per_second(run) == pytest.approx(200.0)


def test_candidates_fit_and_come_fastest_first() -> None:
    found = throughput.candidates(2, Machine(gpu="h200", gpus=2, host_memory_bytes=None))
    rates = [planned.prediction.tokens_per_second or 0.0 for planned in found]
    assert len(found) >= 10 and rates == sorted(rates, reverse=True)
    assert all(planned.prediction.fits for planned in found)


def test_a_comparison_pairs_the_sides_by_configuration() -> None:
    rows: list[dict[str, Any]] = []
    for turn, (side, rate) in enumerate(zip(throughput.ORDER, (110.0, 100.0, 100.0, 110.0), strict=True)):
        cell = {"model": "m", "side": side, "turn": turn}
        rows.append({"cell": cell, "status": "completed", "tokens_per_second": rate})
    (line,) = throughput.comparison(rows).splitlines()
    assert line.startswith("1.1 [1.1, 1.1] x of Trainer (goal 1.0 met)")
    assert "110 tokens/s against 100 tokens/s, 2 pairs" in line


def test_processor_time_is_compared_where_both_sides_have_it() -> None:
    rows: list[dict[str, Any]] = [
        {
            "cell": {"model": "m", "side": side, "turn": turn},
            "tokens_per_second": 100.0,
            "processor_seconds_per_step": 0.04 if side == throughput.OURS else 0.05,
        }
        for turn, side in enumerate(throughput.ORDER)
    ]
    _, line = throughput.comparison(rows).splitlines()
    assert line.strip().startswith("0.8 [0.8, 0.8] x of Trainer's processor time a step")


def test_a_step_s_processor_time_is_that_between_the_ends_of_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        """Each call spends a second; a step is made of two."""

        calls = 0

        def is_gradient_accumulation_boundary(self) -> bool:
            return self.calls % 2 == 1

        def step(self) -> None:
            self.calls += 1

    engine = Engine()
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", SimpleNamespace(DeepSpeedEngine=Engine))
    monkeypatch.setattr("time.process_time", lambda: float(engine.calls))
    run = make_run(tmp_path / "run", tiny_spec(steps=12))
    stepclock._watch(run)
    assert stepclock.processor_seconds(run) is None
    for _ in range(2 * 12):
        engine.step()
    assert stepclock.processor_seconds(run) == 2.0


@given(st.floats(1e-3, 1e9), st.floats(1e-3, 1e9))
def test_ticks_hold_all_values(one: float, other: float) -> None:
    ticks = powers(min(one, other), max(one, other))
    assert ticks[0] <= min(one, other) and max(one, other) <= ticks[-1] and len(ticks) >= 2


def test_a_plot_is_well_formed_and_has_its_names() -> None:
    lines = tuple(Line(name=f"a < b {n}", points=((1024.0, 2.0 + n), (4096.0, 9.0))) for n in range(3))
    text = svg(Plot(title="t & u", x_title="x", y_title="y", lines=lines))
    root = ElementTree.fromstring(text)
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 3
    assert "a < b 2" in [element.text for element in root.iter()]
    with pytest.raises(ValueError, match="no points"):
        svg(Plot(title="empty", x_title="", y_title="", lines=()))


def test_the_clock_cuts_late_runs_and_forgets_them() -> None:
    late = {"cut_after_seconds": 57.25}
    assert TimeLeft(-0.01).seconds_for_a_run() is None
    short = TimeLeft(0.1).seconds_for_a_run()
    assert short is not None and 0 < short < 60 and TimeLeft(0.1).cut(late)
    assert TimeLeft(99).seconds_for_a_run() == LONGEST_SECONDS
    assert TimeLeft(99, longest_seconds=30).seconds_for_a_run() == 30
    assert not TimeLeft(99, longest_seconds=57.25).cut(late), "too slow by itself is a result"
    assert not TimeLeft(0.1).cut({"cut_after_seconds": None})
    assert TimeLeft(99).cut({"status": TOO_LATE})
    assert TimeLeft(8, began=-1e6).seconds_for_a_run() is None, "loading took all the time"


def test_a_run_that_waited_too_long_is_not_begun(tmp_path: Path) -> None:
    room = Gate(Room(device_bytes=None, host_bytes=None))
    run = Runner(tmp_path, H200, room, None, TimeLeft(8, began=-1e6))
    row = run.row({"model": "llama-3.2-1b", "gpu": "h200"}, 120)
    assert row["status"] == TOO_LATE and TimeLeft(8).cut(row)
    assert not list(tmp_path.iterdir())
