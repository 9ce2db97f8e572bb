"""What rows of searches and sweeps come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.rows import Cell, Row
from benchmarks.tune_peer import peer_text
from llmtop.trainer.tune.space import key_of

GOAL_FOUND, GOAL_START, GOAL_TRIALS, GOAL_MINUTES = 0.98, 1.22, 12, 5.0


ALONE, LIVE = "setting", "setting_live"
"""Rows of a sweep: measured in a run of its own, as a trial is, or in a run that was changed to it."""
SOLVED = "solved"
"""A time that follows from the recorded mean and spread, of which one interval was known to be near zero."""
TIMED = ("measured", SOLVED)


def swept_rows(rows: Sequence[Row], cell: Cell, kind: str = ALONE) -> list[Row]:
    """The rows of the settings that were swept in one way for a cell's case."""
    same = ("case", "gpus", "gpu")
    of_settings = (row for row in rows if row["cell"].get("kind") == kind)
    return [row for row in of_settings if all(row["cell"][key] == cell[key] for key in same)]


def times_of(rows: Sequence[Row], cell: Cell, kind: str = ALONE) -> dict[str, float]:
    """Seconds of a step of each of them that was measured to its end, and not cut for being far behind."""
    measured = (row for row in swept_rows(rows, cell, kind) if row["outcome"] in TIMED)
    return {key_of(row["cell"]["choice"]): row["step_seconds"] for row in measured}


def judged(rows: Sequence[Row]) -> Iterator[Row]:
    """Each search beside what the larger sweep of its case measured, both by the same kind of rows."""
    for row in rows:
        cell = row["cell"]
        if cell.get("kind") != "search":
            continue
        kind = max((ALONE, LIVE), key=lambda one: len(swept_rows(rows, cell, one)))
        times = times_of(rows, cell, kind)
        best = min(times.values(), default=None)
        own = times.get(key_of(row["found"])) if row["found"] else None
        start = times.get(key_of(row["start"])) if row["start"] else None
        yield {
            **cell,
            "found_over_best": ratio(best, own),
            "found_over_start": ratio(start, own) or row["found_over_start"],
            "swept": len(swept_rows(rows, cell, kind)),
            "live": kind == LIVE,
            "live_over_alone": live_over_alone(rows, cell),
            **{key: row[key] for key in ("runs", "minutes", "lost", "out_of_memory", "found")},
        }


def live_over_alone(rows: Sequence[Row], cell: Cell) -> list[float]:
    """Of the settings that were measured in both ways, in ascending order."""
    alone, live = (times_of(rows, cell, kind) for kind in (ALONE, LIVE))
    return sorted(round(live[key] / alone[key], 4) for key in alone.keys() & live.keys())


def ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 4) if above and below else None


def summary(rows: Sequence[Row]) -> str:
    lines = [peer_text(row) for row in rows if row["cell"].get("kind") == "peer"]
    for one in judged(rows):
        how = ", imports in each trial" if one.get("fresh") else ""
        lines.append(f"{one['case']} on {one['gpus']} {one['gpu']}{how}")
        swept = f"{one['swept']} swept live" if one["live"] else f"{one['swept']} swept"
        lines.append(
            f"  {_times(one['found_over_best'])} of the best of {swept} (goal {GOAL_FOUND}),"
            f" {_times(one['found_over_start'])} of the start (goal {GOAL_START} somewhere)"
        )
        if both := one["live_over_alone"]:
            lines.append(
                f"  a step in a run changed live took {both[0]:.3f}x to {both[-1]:.3f}x"
                f" of one in a run of its own, over {len(both)} settings"
            )
        lines.append(
            f"  {one['runs']} trials (goal {GOAL_TRIALS}), {one['minutes']} minutes (goal {GOAL_MINUTES:g}),"
            f" {one['lost']} lost, {one['out_of_memory']} to memory (goal 0)"
        )
    return "\n".join(lines) or "no searches"


def _times(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{ratio:.3f}x"
