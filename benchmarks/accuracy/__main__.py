"""Predicted against measured, all goals: writes `docs/accuracy.md` and its plots.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --print

Needs DeepSpeed installed, whose own estimates are asked for in a subprocess; no GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.doc import Evidence, document
from benchmarks.accuracy.published import cases, left_out, published
from benchmarks.accuracy.rivals import Compared, compared
from benchmarks.accuracy.rows import blind, coverage, sourced
from benchmarks.accuracy.score import Score, scores
from benchmarks.accuracy.split import LISTED, Half, sha256_of
from benchmarks.stats import percentile
from benchmarks.svgplot import Line, Plot, svg

DOCS = Path(__file__).parents[2] / "docs"
_LEAST_PERCENT = 0.001
"""Smaller errors have no place on a logarithmic axis."""
_SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)


def gathered() -> tuple[Evidence, dict[str, Plot]]:
    """The evidence and the plots by file name."""
    found = scores(sourced())
    rivals = compared([score for score in found if not score.earlier])
    pictures = plots(found, rivals)
    evidence = Evidence(
        scores=tuple(found),
        blind=tuple(scores(blind())),
        coverage=coverage(),
        held_out_sha256=sha256_of(LISTED),
        rivals=tuple(rivals),
        published=tuple(published()),
        left_out=tuple(left_out()),
        cases=tuple(cases()),
        pictures=tuple(pictures),
    )
    return evidence, pictures


def plots(found: Sequence[Score], rivals: Sequence[Compared]) -> dict[str, Plot]:
    design = [score for score in found if not score.earlier]
    ours = Line(name="llmtop", points=_quantiles([score.peak_percent for score in design]))
    theirs = [Line(name=each.rival.name, points=_quantiles(each.percents)) for each in rivals]
    halves = [_by_length(half, [s for s in design if s.half == half]) for half in Half]
    return {
        "accuracy-rivals.svg": Plot(
            title="Error of the allocated peak, each on the rows that it answers",
            x_title="percent of rows with at most this error",
            y_title="error, percent",
            y_label="{:.2g}".format,
            lines=tuple(line for line in (ours, *theirs) if line.points),
        ),
        "accuracy-length.svg": Plot(
            title="Mean error of the allocated peak by length",
            x_title="tokens of a sequence",
            y_title="error, percent",
            y_label="{:.2g}".format,
            lines=tuple(line for line in halves if line.points),
        ),
    }


def _quantiles(percents: Sequence[float]) -> tuple[tuple[float, float], ...]:
    sizes = [max(_LEAST_PERCENT, abs(percent)) for percent in percents]
    return tuple((float(share), percentile(sizes, share / 100)) for share in _SHARES) if sizes else ()


def _by_length(half: Half, found: Sequence[Score]) -> Line:
    lengths = sorted({int(score.cell.get("seq_len", 2048)) for score in found})
    points = []
    for length in lengths:
        sizes = [abs(s.peak_percent) for s in found if int(s.cell.get("seq_len", 2048)) == length]
        points.append((float(length), max(_LEAST_PERCENT, statistics.fmean(sizes))))
    return Line(name=str(half), points=tuple(points))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--print", action="store_true", help="only print the document")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder to write to")
    options = parser.parse_args()
    evidence, pictures = gathered()
    text = document(evidence)
    if options.print:
        print(text)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for name, content in {"accuracy.md": text, **{n: svg(p) for n, p in pictures.items()}}.items():
        (options.out / name).write_text(content)
        print(options.out / name)


if __name__ == "__main__":
    main()
