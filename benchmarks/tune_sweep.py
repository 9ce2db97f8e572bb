"""The sweep that a search is judged by: settings in runs of their own, or in few that are changed live."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from benchmarks.rows import read_rows
from benchmarks.tune_bench import CASES, Bench, fixed, unseen
from benchmarks.tune_live import Live, in_runs, sweep_run
from benchmarks.tune_summary import ALONE, LIVE, times_of
from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import changed
from llmtop.trainer.tune.space import Candidate, key_of
from llmtop.trainer.tune.trial import Measured, Start, run_trial, trial_spec

_TRIAL_SECONDS = 120.0
_OVERTIME_SECONDS = 50.0
"""Beyond a call's minutes, for the trial that is under way."""


def sweep(bench: Bench, name: str, root: Path) -> None:
    """Rows of the settings that have none yet, while there is time."""
    live = bench.options.live
    kind = LIVE if live else ALONE
    spec = bench.spec(name)
    candidates = list(swept_settings(bench, name, spec))
    todo = [one for one in candidates if bench.cell(name, kind=kind, choice=one.choice) not in bench.log]
    print(f"{name}: {len(candidates)} settings, {len(todo)} without a row", flush=True)
    if not todo:
        return
    bench.warm_up(spec, root)
    with bench.starts(spec, root) as start:
        how = _live if live else _alone
        came: Iterator[tuple[Candidate, Measured | Live]] = how(bench, name, spec, todo, start, root)
        for number, (one, got) in enumerate(came, 1):
            row = {"predicted_step_seconds": one.brief.step_seconds, "settings": len(candidates)}
            cell = bench.cell(name, kind=kind, choice=one.choice)
            bench.log.add({"cell": cell, **row, **msgspec.to_builtins(got)})
            step = "n/a" if got.step_seconds is None else f"{got.step_seconds:.4f} s"
            words = f"{number}/{len(todo)} {got.outcome} {step} {key_of(one.choice)} {got.reason}"
            print(words[:300], flush=True)


def _alone(
    bench: Bench, name: str, spec: RunSpec, todo: Sequence[Candidate], start: Start, root: Path
) -> Iterator[tuple[Candidate, Measured]]:
    """Each in a run of its own, as a trial is."""
    for number, one in enumerate(todo):
        if bench.left_seconds() < 0:
            _tell_left(todo[number:])
            return
        seconds = min(_TRIAL_SECONDS, bench.left_seconds() + _OVERTIME_SECONDS)
        run = trial_spec(changed(spec, one.change))
        # What is far behind needs no more steps to be told so.
        best = best_so_far(bench, name)
        got = run_trial(run, root / "sweep", seconds, best_step_seconds=best, show=unseen, start=start)
        shutil.rmtree(root / "sweep", ignore_errors=True)
        if got.outcome == "timeout" and seconds < _TRIAL_SECONDS:
            return
        yield one, got


def _live(
    bench: Bench, name: str, spec: RunSpec, todo: Sequence[Candidate], start: Start, root: Path
) -> Iterator[tuple[Candidate, Live]]:
    """Those that one run can be changed to in one run; in another where that one ends."""
    for group in in_runs(todo):
        left = list(group)
        while left:
            with closing(sweep_run(spec, left, start, root / "sweep", best_so_far(bench, name))) as came:
                for one, got in came:
                    yield one, got
                    left.remove(one)
                    if bench.left_seconds() < 0:
                        _tell_left(left)
                        return


def _tell_left(todo: Sequence[Candidate]) -> None:
    print(f"time is up, {len(todo)} settings or more without a row yet: call again", flush=True)


def best_so_far(bench: Bench, name: str) -> float | None:
    rows, cell = read_rows(bench.options.out), bench.cell(name)
    times = [time for kind in (ALONE, LIVE) for time in times_of(rows, cell, kind).values()]
    return min(times, default=None)


def swept_settings(bench: Bench, name: str, spec: RunSpec) -> Iterator[Candidate]:
    """What the search found and began with, then the rest of the sweep, the fastest predicted first."""
    fix = fixed(spec)
    knobs = {word.partition("=")[0] for word in CASES[name].swept}
    usual = bench.space(spec, fix, [])
    kept = [knob.key for knob in usual.knobs if knob.key not in knobs and knob.key not in fix]
    narrowed = bench.space(spec, [*fix, *kept], CASES[name].swept)
    rows = [row for row in read_rows(bench.options.out) if row["cell"].get("kind") == "search"]
    known = {one.key: one for one in (*usual.candidates, *narrowed.candidates)}
    wanted = [
        key_of(choice)
        for row in rows
        if (row["cell"]["case"], row["cell"]["gpus"]) == (name, bench.options.gpus)
        for choice in (row["found"], row["start"])
        if choice
    ]
    keys = dict.fromkeys([*wanted, *(one.key for one in narrowed.candidates)])
    yield from (known[key] for key in keys if key in known)
