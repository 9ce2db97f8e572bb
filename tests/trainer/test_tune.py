"""The pure part of the search: its space, its corrected ranking, its journal and the edge."""

from __future__ import annotations

import math
import random
import sys
import time
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.catalog import load_recipe
from llmtop.presets.errors import UsageError
from llmtop.presets.resolve import Layer, Machine, recipe_layers, resolve
from llmtop.presets.rules import refusals
from llmtop.presets.spec import RunOptions, RunSpec, ValueSource
from llmtop.profiler.cost.sweep import changed
from llmtop.profiler.effects.switches import WITHOUT_EFFECT
from llmtop.profiler.memory.predict import predict
from llmtop.profiler.record.rundir import find_run, list_runs
from llmtop.trainer.tune import edge as edges
from llmtop.trainer.tune.journal import Asked, Line, TuneDir, find_tune
from llmtop.trainer.tune.outcome import found, recipe_text
from llmtop.trainer.tune.pool import doubtful, fastest, pooled
from llmtop.trainer.tune.rank import Tried, next_candidate, suspicion, untried
from llmtop.trainer.tune.search import Search
from llmtop.trainer.tune.space import Candidate, Space, choice_of, key_of, space_of
from llmtop.trainer.tune.trial import Measured, Show, trial_spec, why_over
from llmtop.trainer.tune.words import knobs_of
from tests.worker.failing_worker import FAILS_ON_THREADS

FAILING_WORKER = Path(__file__).parents[1] / "worker" / "failing_worker.py"
MACHINE = Machine(gpu="h200", gpus=1, host_memory_bytes=None)


def spec_of(**values: object) -> RunSpec:
    given = {"model": "qwen2.5-1.5b", "gpu": "h200", "micro_batch": 1, "grad_accum": 16, **values}
    return resolve([Layer(ValueSource.MACHINE, "test", given)], name="test", machine=MACHINE)


def small_space(spec: RunSpec, *fix: str) -> Space:
    return space_of(spec, knobs_of(spec, fix or ("offload_param", "offload_optimizer", "zero"), ()))


@pytest.mark.parametrize("gpu", ["h200", "rtx-4090"])
def test_what_fits_is_kept_and_what_is_refused_or_too_large_is_not(gpu: str) -> None:
    spec = spec_of(gpu=gpu, gpus=2)
    space = space_of(spec, knobs_of(spec, ("attention", "liger", "buckets"), ()))
    kept = {one.key for one in space.candidates}
    assert space.too_large + len(kept) + sum(r.count for r in space.refused) == space.size
    everything = space_of(replace(spec, gpu=replace(spec.gpu, memory_bytes=1 << 50)), space.knobs)
    assert everything.too_large == 0
    for one in everything.candidates:
        run = changed(spec, one.change)
        assert not refusals(run) and run.global_batch == spec.global_batch
        assert (one.key in kept) == (predict(run).fits is not False)


@given(st.integers(1, 64), st.integers(1, 12))
def test_every_candidate_keeps_the_global_batch(micro: int, accum: int) -> None:
    spec = spec_of(micro_batch=micro, grad_accum=accum)
    for one in small_space(
        spec, "zero", "offload_param", "offload_optimizer", "attention", "liger"
    ).candidates:
        assert one.change["micro_batch"] * one.change["grad_accum"] == micro * accum


def test_words_that_make_no_sense_are_refused_with_what_would() -> None:
    spec = spec_of()
    for words, told in (
        (("zerro=2",), "did you mean 'zero'"),
        (("micro_batch=3",), "1, 2, 4, 8, 16"),
        (("grad_accum=5",), "1, 2, 4, 8, 16"),
        (("checkpointing=often",), "checkpointing=none"),
        (("seq_len=8",), "--seq-len"),
    ):
        with pytest.raises(UsageError) as error:
            knobs_of(spec, words, ())
        assert told.split("=")[0] in str(error.value)
    for word, told in (
        ("learning_rate=1e-4,1e-5", "speed, which does not hang on it"),
        ("save_at_end=on,off", "--save-at-end"),
        ("total_gpus=1,2", "--total-gpus"),
    ):
        with pytest.raises(UsageError, match=told):
            knobs_of(spec, (), (word,))
        key = word.partition("=")[0]
        begun = knobs_of(spec, (), (word,), anew=False)
        assert any(knob.key == key and len(knob.values) == 2 for knob in begun), "it goes on as it began"
        assert any(knob.key == key for knob in knobs_of(spec, (key,), ())), "what is fixed does not vary"
    fixed = {knob.key: knob.values for knob in knobs_of(spec, ("grad_accum=4", "zero"), ("liger=on",))}
    assert (fixed["micro_batch"], fixed["zero"], fixed["liger"]) == ((4,), (2,), (True,))


def test_what_no_trial_tells_anything_of_is_not_varied() -> None:
    refused = set()
    for key in RunOptions.__struct_fields__:
        try:
            knobs_of(spec_of(), (), (f"{key}=x",))
        except UsageError as error:
            refused |= {key} if "is the same in every trial" in error.what else set()
    alike = {"gpus", "nodes", "total_gpus", "inter_node_gbps", "seq_len"}
    assert refused == WITHOUT_EFFECT | alike | {"max_grad_norm", "heal"}


def test_a_surface_that_is_off_by_factors_is_solved_in_twelve_trials() -> None:
    spec = spec_of(model="qwen2.5-0.5b")
    space = small_space(spec, "offload_param", "offload_optimizer")
    solved = 0
    for seed in range(12):
        chance = random.Random(seed)
        factors = {(k.key, v): chance.gauss(0, 0.12) for k in space.knobs for v in k.values}

        def truth(one: Candidate, factors: dict[tuple[str, object], float] = factors) -> float:
            return one.cost_seconds * math.exp(sum(factors[pair] for pair in one.choice.items()))

        trials: list[Tried] = []
        for _ in range(12):
            one = next_candidate(space.candidates, trials)
            assert one is not None and one.key not in {t.candidate.key for t in trials}
            noisy = truth(one) * math.exp(chance.gauss(0, 0.003))
            trials.append(Tried(candidate=one, outcome="measured", step_seconds=noisy))
        best = min(map(truth, space.candidates))
        solved += best / min(truth(t.candidate) for t in trials) >= 0.98
    assert solved >= 10


def test_out_of_memory_rules_out_its_like_that_need_as_much_and_nothing_that_needs_less() -> None:
    space = small_space(spec_of())
    failed = max(space.candidates, key=lambda one: one.brief.needed_bytes or 0)
    left = {one.key for one in untried(space.candidates, [Tried(candidate=failed, outcome="out_of_memory")])}

    def kind(one: Candidate) -> str:
        return key_of({k: v for k, v in one.choice.items() if k != "micro_batch"})

    for one in space.candidates:
        alike = kind(one) == kind(failed)
        if one.key not in left:
            assert alike and (one.brief.needed_bytes or 0) > 0.97 * (failed.brief.needed_bytes or 0)
        if alike and one.choice["micro_batch"] >= failed.choice["micro_batch"]:
            assert one.key not in left


def test_offload_is_tried_only_where_the_setting_without_it_does_not_do() -> None:
    space = small_space(spec_of(), "attention", "liger", "checkpointing")
    offloads = ("offload_optimizer", "offload_param")

    def moves(one: Candidate) -> bool:
        return any(one.choice[key] != "none" for key in offloads)

    resident = [one for one in space.candidates if not moves(one)]
    assert any(map(moves, space.candidates)) and not any(map(moves, untried(space.candidates, [])))
    measured = [Tried(candidate=one, outcome="measured", step_seconds=1.0) for one in resident]
    assert not untried(space.candidates, measured), "nothing is left that could be faster"
    for outcome in ("out_of_memory", "failed"):
        failed = [Tried(candidate=one, outcome=outcome) for one in resident]
        left = untried(space.candidates, failed)
        assert left and all(map(moves, left))
        assert not any(all(one.choice[key] != "none" for key in offloads) for one in left), "one at a time"


def test_a_value_that_never_worked_is_avoided_and_one_that_did_is_not() -> None:
    space = small_space(spec_of())
    bad = next(one for one in space.candidates if one.choice["attention"] == "sdpa")
    good = next(
        one
        for one in space.candidates
        if {**one.choice, "attention": "sdpa"} == bad.choice and one is not bad
    )
    trials = [
        Tried(candidate=bad, outcome="failed"),
        Tried(candidate=good, outcome="measured", step_seconds=1.0),
    ]
    assert suspicion(trials) == {("attention", "sdpa"): 1}
    chosen = next_candidate(space.candidates, trials)
    assert chosen is not None and chosen.choice["attention"] != "sdpa"


class _Quiet:
    def began(self, line: Line) -> None: ...

    def show(self, line: Line) -> Show:
        return lambda state, left: None

    def ended(self, line: Line) -> None: ...


def test_a_search_survives_bad_trials_and_interrupts_and_repeats_nothing(tmp_path: Path) -> None:
    spec = spec_of()
    space = small_space(spec)
    asked: list[str] = []

    def carry(run: RunSpec, seconds: float, best: float | None, show: Show) -> Measured:
        asked.append(key_of(choice_of(run, space.knobs)))
        if len(asked) == 3:
            raise KeyboardInterrupt
        if len(asked) in (1, 4):
            return Measured(outcome="out_of_memory" if len(asked) == 4 else "failed", reason="planted")
        return Measured(
            outcome="measured", step_seconds=float(len(asked)), spread_seconds=0.1, steps_measured=4
        )

    tune = TuneDir.create(tmp_path, Asked(spec=spec))
    with pytest.raises(KeyboardInterrupt):
        Search(tune, spec, space, _Quiet(), carry).run(6, 5)
    assert len(tune.ended()) == 2
    with (tune.path / "journal.jsonl").open("a") as journal:
        journal.write('{"event":"be')  # the machine went away inside a line
    again = find_tune(tmp_path, "latest")
    assert again.asked().spec == spec
    Search(again, spec, space, _Quiet(), carry).run(6, 5)
    ended = again.ended()
    assert len(ended) == len({key_of(line.choice) for line in ended}) == 6
    # The one that was interrupted told nothing, and is the only one that may be begun twice.
    assert len(asked) - len(set(asked)) <= 1
    result = found(again, spec, choice_of(spec, space.knobs), "done")
    assert result.best is not None and result.best.step_seconds == 2.0 and result.lost == 2
    assert result.recipe is not None
    recipe = load_recipe(result.recipe)
    won = resolve(recipe_layers(recipe), name="won", machine=MACHINE)
    assert won.options == changed(spec, result.best.change).options


def test_one_trial_compares_nothing(tmp_path: Path) -> None:
    spec = spec_of()
    space = small_space(spec)
    tune = TuneDir.create(tmp_path, Asked(spec=spec))

    def carry(run: RunSpec, seconds: float, best: float | None, show: Show) -> Measured:
        return Measured(outcome="measured", step_seconds=1.0, spread_seconds=0.1, steps_measured=4)

    for trials, words in (
        (1, "only the starting setting was tried"),
        (2, "no setting that was tried is faster"),
    ):
        Search(tune, spec, space, _Quiet(), carry).run(trials, 5)
        why = found(tune, spec, choice_of(spec, space.knobs), "done").why
        assert [words in one for one in why].count(True) == 1, why


def test_a_recipe_keeps_raw_keys_of_any_depth() -> None:
    raw = {"zero_optimization": {"reduce_bucket_size": 7_000_000, "x y": [1, "a\nb"]}, "flag": True}
    text = recipe_text(replace(spec_of(), options=replace(spec_of().options, deepspeed=raw)), 'a "word"')
    assert tomllib.loads(text)["deepspeed"] == raw


def test_a_trial_saves_nothing_and_is_the_same_training_step() -> None:
    run, spec = trial_spec(spec_of(save_at_end=True, heal=True)), spec_of()
    assert (
        not run.options.save_at_end and not run.options.heal and run.tokens_per_step == spec.tokens_per_step
    )


@pytest.mark.parametrize(
    ("found", "best", "early", "why"),
    [
        ([1.0, 1.0], None, True, None),
        ([1.0, 1.0, 1.0], None, True, "measured"),
        ([1.0, 1.02, 1.04], None, True, None),
        ([1.0, 1.02, 1.04], 0.9, True, "measured"),
        ([1.0, 1.02, 1.04], 1.0, True, None),
        ([1.0, 1.02, 1.04], 1.1, True, None),
        ([1.6, 1.6], 1.0, True, "slow"),
        ([1.6, 1.4], 1.0, True, None),
        ([1.6, 1.6, 1.6], 1.0, False, None),
    ],
)
def test_a_trial_goes_on_as_long_as_it_may_be_the_best(
    found: list[float], best: float | None, early: bool, why: str | None
) -> None:
    assert why_over(found, time.monotonic() + 1000, best, early=early) == why
    assert why_over(found, time.monotonic() - 1, best, early=early) == (why or "timeout")


def _line(micro: int, seconds: float | None, error: float = 0.01, number: int = 1, steps: int = 4) -> Line:
    return Line(
        event="ended",
        number=number,
        choice={"micro_batch": micro},
        change={"micro_batch": micro},
        at=0.0,
        outcome="measured" if seconds else "failed",
        step_seconds=seconds,
        spread_seconds=2 * error,
        error_seconds=error,
        steps_measured=steps,
        tokens_per_second=100 / seconds if seconds else None,
    )


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.integers(2, 6)), min_size=1, max_size=3))
def test_runs_of_one_setting_are_pooled_and_their_scatter_is_in_its_error(
    runs: list[tuple[float, int]],
) -> None:
    (one,) = pooled(_line(1, seconds, steps=steps) for seconds, steps in runs)
    means = [seconds for seconds, _ in runs]
    assert one.runs == len(runs) and one.steps_measured == sum(steps for _, steps in runs)
    assert min(means) - 1e-9 <= (one.step_seconds or 0) <= max(means) + 1e-9
    assert (one.tokens_per_second or 0) == pytest.approx(100 / (one.step_seconds or 1))
    half = (max(means) - min(means)) / 2
    assert (one.error_seconds or 0) >= (half / math.sqrt(len(runs)) if len(runs) > 1 else 0.01) - 1e-9


def test_two_that_are_too_close_are_tried_again_and_a_failure_counts() -> None:
    close = [_line(1, 1.0), _line(2, 1.01, error=0.02)]
    assert doubtful(close) == close[1], "the less sure one"
    assert doubtful([*close, _line(2, 1.01)]) == close[0], "the one with fewer runs"
    assert doubtful([_line(1, 1.0), _line(2, 1.1)]) is None
    assert doubtful([_line(micro, 1.0) for micro in (1, 2) for _ in range(3)]) is None
    assert fastest(pooled([*close, _line(1, None)])) == [close[1]]


def test_the_last_trials_tell_the_two_fastest_apart(tmp_path: Path) -> None:
    spec = spec_of()
    space = small_space(spec, *(knob.key for knob in small_space(spec).knobs if knob.key != "micro_batch"))
    times = {2: iter((1.00, 1.02, 1.02)), 4: iter((1.01, 0.98, 0.98))}

    def carry(run: RunSpec, seconds: float, best: float | None, show: Show) -> Measured:
        step = next(times.get(run.options.micro_batch, iter((2.0,))))
        return Measured(
            outcome="measured", step_seconds=step, error_seconds=0.01, spread_seconds=0.02, steps_measured=4
        )

    tune = TuneDir.create(tmp_path, Asked(spec=spec))
    settings = len(space.candidates)
    Search(tune, spec, space, _Quiet(), carry).run(settings + 2, 5)
    assert len(tune.ended()) == settings + 2 and len(pooled(tune.ended())) == settings >= 4
    again = [line for line in tune.lines() if line.event == "began" and line.reason]
    assert {line.choice["micro_batch"] for line in again} <= {2, 4} and len(again) == 2


@pytest.mark.parametrize("ids", [("20260101-000000-a-aaaa", "20260102-000000-b-bbbb"), ("x-1", "x-1-x")])
@pytest.mark.parametrize("ref", ["latest", "2026", "bbbb", "aaaa", "x", "x-1", "zzz", "", "x-1-x"])
def test_a_search_and_a_run_are_meant_by_the_same_words(
    ids: tuple[str, str], ref: str, tmp_path: Path
) -> None:
    for one in ids:
        for root, file in (("runs", "spec.json"), ("tunes", "tune.json")):
            path = tmp_path / root / one
            path.mkdir(parents=True)
            (path / file).write_bytes(msgspec.json.encode(spec_of() if file == "spec.json" else {}))
    found = []
    for root in ("runs", "tunes"):
        try:
            path = tmp_path / root
            one = find_run(path, ref).run_id if root == "runs" else find_tune(path, ref).tune_id
        except UsageError as error:
            one = error.what.replace("searches", "runs").replace("search", "run")
        found.append(one)
    assert found[0] == found[1]


@given(st.floats(0.85, 1.15), st.sampled_from(["micro_batch", "seq_len"]))
def test_three_trials_find_the_edge_to_a_step(off: float, quantity: edges.Quantity) -> None:
    spec = spec_of(model="llama-3.2-3b", gradient_checkpointing=True, grad_accum=1)
    need, memory = edges.need_of(spec, quantity), spec.gpu.memory_bytes or 0

    def probe(size: int) -> edges.Probe:
        own = need(size)
        if own is None:
            return edges.Probe(size=size, fitted=False)
        # Neither proportional to the prediction nor a constant more.
        peak_bytes = round(own.peak_bytes * off + 5e8)
        fitted = peak_bytes + own.outside_bytes <= memory
        return edges.Probe(size=size, fitted=fitted, peak_bytes=peak_bytes)

    found_edge = edges.edge_of(need, memory, quantity, probe)
    true = edges.largest(lambda size: need(size) is not None and probe(size).fitted, edges.grain_of(quantity))
    assert len(found_edge.probes) <= edges.TRIALS
    assert probe(found_edge.largest).fitted
    if off < 1.0:
        assert true - found_edge.largest <= found_edge.step


@pytest.mark.slow
def test_a_real_search_goes_on_past_a_setting_that_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))
    layers = [
        *recipe_layers(load_recipe("cpu-demo")),
        Layer(ValueSource.MACHINE, "", {"gpus": 1, "seq_len": 32}),
    ]
    machine = Machine(gpu="cpu", gpus=1, host_memory_bytes=1 << 36)
    spec = resolve(layers, name="tune", machine=machine)
    monkeypatch.setenv("LLMTOP_WORKER_COMMAND", f"{sys.executable} {FAILING_WORKER}")
    allow = (f"threads_per_rank=1,{FAILS_ON_THREADS}",)
    fix = ("zero", "micro_batch", "checkpointing", "attention")
    space = space_of(spec, knobs_of(spec, fix, allow))
    bad = next(one for one in space.candidates if one.choice["threads_per_rank"] == FAILS_ON_THREADS)
    good = next(one for one in space.candidates if one is not bad)
    tune = TuneDir.create(tmp_path / "tunes", Asked(spec=spec))
    ordered = replace(space, candidates=(replace(bad, cost_seconds=good.cost_seconds / 2), good))
    Search(tune, spec, ordered, _Quiet()).run(2, 5)
    crashed, measured = tune.ended()
    assert (crashed.outcome, crashed.step_seconds) == ("failed", None) and crashed.reason
    assert measured.outcome == "measured" and measured.steps_measured >= 2
    assert not any(run.supervisor_alive() for run in list_runs(tune.trials_root))
