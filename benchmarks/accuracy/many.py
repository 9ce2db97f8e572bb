"""What `docs/accuracy.md` says of runs on four and eight GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.accuracy.goals import Judged, judged
from benchmarks.accuracy.rows import Coverage
from benchmarks.accuracy.score import Score
from benchmarks.accuracy.split import LISTED_MANY, sha256_of
from benchmarks.design import MANY_COUNTS


def of_many(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if score.cell.get("gpus", 1) in MANY_COUNTS]


def words_on_many(coverage: Coverage) -> str:
    """How much of the list is measured, and why its figures are a test."""
    measured = f"{coverage.many_measured} of the {coverage.many_cells}"
    if not coverage.many_measured:
        measured = f"None of the {coverage.many_cells}"
    listed = f"`benchmarks/{LISTED_MANY.name}` (SHA-256 `{sha256_of(LISTED_MANY)}`)"
    return (
        f"**{measured} cells on four and eight GPUs are measured.** All of them are held out. They were "
        f"drawn and listed in {listed} before any of them had run. Their rows are among those of the tables "
        "of this page too."
    )


def judged_on_many(blind: Sequence[Score]) -> Iterator[tuple[str, Judged]]:
    """By number of GPUs what the predictions of before the runs were worth; nothing without rows."""
    for gpus in MANY_COUNTS:
        of_count = [score for score in of_many(blind) if score.cell["gpus"] == gpus]
        for line in judged(of_count) if of_count else ():
            yield str(gpus), line
