"""Tokens a second: our worker against Hugging Face's Trainer, and the best setting for a large model.

    python -m benchmarks.throughput --gpus 1 --minutes 8
    python -m benchmarks.throughput --gpus 8 --limit 1 --minutes 8
    python -m benchmarks.throughput --best --gpus 2 --minutes 8
    python -m benchmarks.throughput --summary benchmarks/results/throughput.jsonl

Both sides get the same model and kernels, DeepSpeed JSON, data order and processes, in runs of their own that
take turns (ours, theirs, theirs, ours). The rate is that of the steady part of each run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.cells import Planned, Runner, plan
from benchmarks.forkserver import ForkServerError
from benchmarks.rows import Cell, Row, RowLog, read_rows
from benchmarks.session import (
    RESULTS,
    add_options,
    machine_of,
    of_part,
    run_all,
    run_main,
    runner,
    time_left,
)
from benchmarks.stats import Interval, bootstrap
from benchmarks.stepclock import processor_seconds
from benchmarks.timeleft import TimeLeft
from benchmarks.window import tokens_per_second
from benchmarks.zygote import WORKER
from llmtop.presets.errors import LlmtopError
from llmtop.presets.resolve import Machine
from llmtop.profiler.cost.flops import utilisation
from llmtop.profiler.record.feed import read_state

OURS, THEIRS = "llmtop", "transformers.Trainer"
ENTRIES = {OURS: "benchmarks.stepclock:worker", THEIRS: "benchmarks.stepclock:trainer"}
_PROCESSOR = "processor_seconds_per_step"
ORDER = (OURS, THEIRS, THEIRS, OURS)
ROUNDS = 3
"""Times each side runs twice."""
GOAL_RATIO = 1.0
GOAL_MFU = 0.5
AS_SHIPPED: Cell = {"classify_every": 100, "kernel_profile_step": 3}
"""What our worker does besides training, at its defaults."""
_LLAMA: Cell = {"attention": "flash_attention_2", "liger": True}
_LARGE: Cell = {
    "model": "llama-3.1-8b",
    "zero": 3,
    "micro_batch": 2,
    "seq_len": 4096,
    "steps": 12,
    "gradient_checkpointing": True,
    **_LLAMA,
}
_SMALL: Cell = {"model": "smollm2-135m", "zero": 1, "micro_batch": 1, "seq_len": 512, "steps": 90}
COMPARED: dict[int, tuple[Cell, ...]] = {
    1: (
        {"model": "smollm2-135m", "zero": 1, "micro_batch": 1, "seq_len": 512, "steps": 90},
        {"model": "llama-3.2-1b", "zero": 2, "micro_batch": 4, "seq_len": 2048, "steps": 30},
        {"model": "smollm2-135m", "zero": 3, "micro_batch": 1, "seq_len": 512, "steps": 60},
        {"model": "llama-3.2-3b", "zero": 2, "micro_batch": 2, "seq_len": 4096, "steps": 18, **_LLAMA},
        {"model": "smollm2-135m", "zero": 2, "micro_batch": 1, "grad_accum": 4, "seq_len": 512, "steps": 45},
    ),
    2: (
        {"model": "llama-3.2-1b", "zero": 2, "micro_batch": 4, "seq_len": 2048, "steps": 30},
        _LARGE,
        _SMALL,
    ),
    # The large one first, and without shards of its weights as well: for this a box of many GPUs is rented.
    4: (_LARGE, {**_LARGE, "zero": 2}, _SMALL),
    8: (_LARGE, {**_LARGE, "zero": 2}, _SMALL),
}
"""A small model that the host is the limit of, a middle one, and a large one."""
COMPARED_ON_CPU: tuple[Cell, ...] = (
    {
        "model": "tiny-llama-cpu",
        "zero": 2,
        "micro_batch": 2,
        "seq_len": 64,
        "steps": 30,
        "threads_per_rank": 1,
    },
    {
        "model": "tiny-llama-cpu",
        "zero": 3,
        "micro_batch": 1,
        "seq_len": 32,
        "steps": 30,
        "threads_per_rank": 1,
    },
)


# --- against Trainer ------------------------------------------------------------------------------


def compare(cell: Cell, run: Runner, log: RowLog, left: TimeLeft, rounds: int = ROUNDS) -> None:
    """Runs of both sides in turns, a row each; what the log has already is not run again."""
    for number, side in enumerate(ORDER * rounds):
        key: Cell = {**cell, "side": side, "turn": number}
        seconds = left.seconds_for_a_run()
        if key in log or seconds is None:
            continue
        row = _timed(cell, seconds, ENTRIES[side], run)
        if left.cut(row):
            return
        log.add({**row, "cell": key})
        rate = row.get("tokens_per_second")
        print(f"{side:<22}{_rate(rate)}  {json.dumps(cell)}  {row.get('reason') or ''}"[:300], flush=True)


def _timed(cell: Cell, seconds: float, entry: str, run: Runner) -> Row:
    """One run from its start to its rate."""
    try:
        planned = run.plan({**AS_SHIPPED, **cell}, name="throughput")
        carried = run.forked(planned, seconds, entry=entry)
    except ForkServerError:
        raise
    except LlmtopError as error:
        return {"cell": cell, "status": "refused", "reason": str(error)}
    state = read_state(carried.run)
    rate = tokens_per_second(carried.run)
    share = utilisation(planned.spec, rate)
    return {
        "cell": cell,
        "status": state.status,
        "reason": state.ended.reason if state.ended and state.status != "completed" else "",
        "cut_after_seconds": carried.cut_after_seconds,
        "tokens_per_second": rate,
        _PROCESSOR: processor_seconds(carried.run),
        "device": planned.spec.gpu.name,
        "predicted_tokens_per_second": planned.prediction.tokens_per_second,
        "peak_allocated_bytes": [
            rank.finished.peak_allocated_bytes for rank in state.ranks.values() if rank.finished
        ],
        "mfu": share.mfu if share else None,
        "mfu_needed": share.needed if share else None,
    }


# --- the best setting -----------------------------------------------------------------------------


def candidates(gpus: int, machine: Machine, seq_len: int = 4096) -> list[Planned]:
    """Settings for a full fine-tune of Llama-3.1-8B that fit, the fastest predicted first."""
    recompute: tuple[Cell, ...] = (
        {},
        *({"gradient_checkpointing": True, "checkpointing_every": every} for every in (4, 3, 2, 1)),
    )
    found: list[Planned] = []
    for stage, kept, micro, optimizer in itertools.product(
        (1, 2, 3), recompute, (1, 2, 3, 4, 6, 8), ("adamw", "adamw_8bit")
    ):
        cell: Cell = {
            "model": "llama-3.1-8b",
            "gpus": gpus,
            "zero": stage,
            "seq_len": seq_len,
            "micro_batch": micro,
            "optimizer": optimizer,
            "steps": 10,
            **_LLAMA,
            **kept,
        }
        try:
            planned = plan(cell, machine, name="best")
        except LlmtopError:
            continue
        if planned.prediction.fits is not False:
            found.append(planned)
    return sorted(found, key=lambda planned: -(planned.prediction.tokens_per_second or 0.0))


def best_rows(options: argparse.Namespace) -> None:
    """Each candidate for ten steps, most promising first."""
    cells = [planned.cell for planned in candidates(options.gpus, machine_of(options))]
    with runner(options) as run:
        run_all(cells, options, partial(_timed, entry=WORKER, run=run))
    print(best_summary(read_rows(options.out)))


def best_summary(rows: Sequence[Row], shown: int = 12) -> str:
    rated = [row for row in rows if row.get("tokens_per_second")]
    rated.sort(key=lambda row: -float(row["tokens_per_second"]))
    lines = [f"{'tokens/s':>10} {'MFU':>7} {'needed':>7}  goal {GOAL_MFU:.0%} of dense peak"]
    for row in rated[:shown]:
        shares = "".join(f" {_share(row.get(name))}" for name in ("mfu", "mfu_needed"))
        lines.append(f"{row['tokens_per_second']:>10.0f}{shares}  {json.dumps(row['cell'])}")
    return "\n".join(lines)


# --- summary --------------------------------------------------------------------------------------


def comparison(rows: Iterable[Row]) -> str:
    """Our rate over theirs by configuration, with its interval."""
    return "\n".join(_comparison(list(rows)))


def _comparison(rows: list[Row]) -> Iterator[str]:
    by_cell: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        cell = {key: value for key, value in row["cell"].items() if key not in ("side", "turn")}
        if row.get("tokens_per_second") and "side" in row["cell"]:
            sides = by_cell.setdefault(json.dumps(cell), {OURS: [], THEIRS: []})
            sides[row["cell"]["side"]].append(row)
    for name, sides in by_cell.items():
        pairs = list(zip(sides[OURS], sides[THEIRS], strict=False))
        if not pairs:
            continue
        ratio = _ratio(pairs, "tokens_per_second")
        met = "met" if ratio.value >= GOAL_RATIO else "missed"
        ours, theirs = (
            statistics.median(row["tokens_per_second"] for row in sides[side]) for side in (OURS, THEIRS)
        )
        yield (
            f"{ratio} x of Trainer (goal {GOAL_RATIO} {met}), {_rate(ours)} against {_rate(theirs)}, "
            f"{len(pairs)} pairs: {name}"
        )
        clocked = [pair for pair in pairs if all(row.get(_PROCESSOR) for row in pair)]
        if clocked:
            yield f"  {_ratio(clocked, _PROCESSOR)} x of Trainer's processor time a step"


def _ratio(pairs: Sequence[tuple[Row, Row]], figure: str) -> Interval:
    """Ours over theirs."""
    return bootstrap([ours[figure] / theirs[figure] for ours, theirs in pairs])


def _rate(rate: float | None) -> str:
    return "n/a" if rate is None else f"{rate:,.0f} tokens/s"


def _share(share: float | None) -> str:
    return f"{'n/a':>7}" if share is None else f"{share:>7.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, choices=tuple(COMPARED), default=1)
    parser.add_argument("--best", action="store_true", help="settings for Llama-3.1-8B instead")
    parser.add_argument("--summary", type=Path, help="only say what a file of rows holds")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="times each side runs twice")
    add_options(parser, RESULTS / "throughput.jsonl")
    options = parser.parse_args()
    if options.summary is not None:
        rows = read_rows(options.summary)
        print(comparison(rows) or best_summary(rows))
        return
    if options.best:
        best_rows(options)
        return
    cells = COMPARED_ON_CPU if options.cpu else COMPARED[options.gpus]
    left = time_left(options)
    log = RowLog(options.out)
    with runner(options) as run:
        for cell in of_part(cells, options)[: options.limit]:
            compare({"gpus": options.gpus, **cell}, run, log, left, options.rounds)
    print(comparison(read_rows(options.out)))


if __name__ == "__main__":
    run_main(main)
