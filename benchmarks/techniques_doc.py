"""`docs/techniques.md` and its plots, made of measured rows: claims beside what was seen, and the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import bits
from benchmarks import series as asked
from benchmarks.rows import Row
from benchmarks.svgplot import Line, Plot, svg
from llmtop.presets.errors import LlmtopError
from llmtop.profiler.units import format_bytes

_GIB = 2**30
_OUT = "out of memory"
_UNMEASURED = "not measured"
_QUADRATIC, _LINEAR = 1.6, 1.3
"""Growth exponents from which, and up to which, memory is called so; the linear parts pull the first down."""


class Results:
    """Rows by what was asked for; a missing one is an error that names it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {_key(row): row for row in rows}
        self.gpus = sorted({row["cell"]["gpus"] for row in rows})

    def row(self, series: str, name: str, gpus: int, length: int) -> Row:
        found = self._rows.get((series, name, gpus, length))
        if found is None or found["status"] == "refused":
            raise LlmtopError(
                f"no result for {series}: {name}, {gpus} GPUs, {length} tokens",
                why="the document speaks of it" if found is None else str(found["reason"]),
                fix="run python -m benchmarks.techniques again until every cell is done",
            )
        return found

    def ladder(self, name: str, gpus: int, length: int) -> Row | None:
        """A place of the big table, which may wait for its measurement."""
        return self._rows.get(("ladder", name, gpus, length))

    def device(self) -> str:
        return ", ".join(sorted({str(row["device"]) for row in self._rows.values() if row.get("device")}))

    def versions(self) -> str:
        known: list[dict[str, str]] = [r["versions"] for r in self._rows.values() if r.get("versions")]
        return ", ".join(f"{name} {version}" for name, version in (known[0] if known else {}).items())


def _key(row: Row) -> tuple[str, str, int, int]:
    cell = row["cell"]
    return cell["series"], cell["name"], cell["gpus"], cell["seq_len"]


def write_document(rows: Sequence[Row], folder: Path, memory: Sequence[Row] = ()) -> list[Path]:
    """Write the document and its plots; the files. Raises LlmtopError while a result is missing.

    `memory` are rows of the memory design, for the modes of 8 and 4 bits.
    """
    results = Results(rows)
    gpus = results.gpus[0] if results.gpus else 1
    pictures = {f"techniques-{name}.svg": svg(plot) for name, plot in plots(results, gpus).items()}
    text = document(results, gpus, list(pictures), memory)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, content in {"techniques.md": text, **pictures}.items():
        (folder / name).write_text(content)
        written.append(folder / name)
    return written


def document(results: Results, gpus: int, pictures: Sequence[str], memory: Sequence[Row] = ()) -> str:
    """The text, every figure of it from a row."""
    parts = [
        "# What each technique buys",
        f"Measured with `python -m benchmarks.techniques` on {results.device()} ({results.versions()}); made "
        "from `benchmarks/results/techniques.jsonl` by `--document`. One sequence a micro-batch, random "
        "weights, real text. Memory is the largest allocated at any time on one GPU.",
        "## Claims and measurements",
        "| claim | measured here |\n|---|---|",
        "\n".join(f"| {claim} | {seen} |" for claim, seen in claims(results, gpus)),
    ]
    for count in results.gpus:
        parts += [f"## {asked.LADDER_MODEL} on {'one GPU' if count == 1 else f'{count} GPUs'}"]
        if count == 1:
            parts += ["On one GPU ZeRO has nobody to share with: its stages only add buffers."]
        parts += [ladder(results, count)]
    parts += [f"![{name}]({name})" for name in pictures]
    parts += bits.section(memory)
    parts[3:5] = ["\n".join(parts[3:5])]
    return "\n\n".join(parts) + "\n"


def ladder(results: Results, gpus: int) -> str:
    """Techniques down, lengths across."""
    lines = ["| | " + " | ".join(f"{length:,} tokens" for length in asked.LENGTHS) + " |"]
    lines.append("|---" * (len(asked.LENGTHS) + 1) + "|")
    for name in asked.LADDER:
        rows = [results.ladder(name, gpus, length) for length in asked.LENGTHS]
        cells = [_UNMEASURED if row is None else _cell(row) for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def claims(results: Results, gpus: int) -> list[tuple[str, str]]:
    """What is claimed of the techniques, and what these rows say to it."""
    return [
        ("Attention memory grows with the square of the length", _growth(results, gpus, asked.EAGER)),
        ("FlashAttention: memory is linear in the length", _growth(results, gpus, asked.FLASH)),
        ("Liger: 20 % faster, 60 % less memory", _liger(results, gpus)),
        ("ZeRO-3 with offload is slower by several times (7.3 s to 74 s a step)", _offload(results, gpus)),
        ("8B at 16k tokens trains under ZeRO-3", _large(results, gpus)),
    ]


def _growth(results: Results, gpus: int, name: str) -> str:
    points = _above_steady(results, gpus, name)
    if len(points) < 2:
        return "no two lengths fit"
    exponent = slope(points[-2:])
    kind = "quadratic" if exponent >= _QUADRATIC else "linear" if exponent <= _LINEAR else "in between"
    (x1, y1), (x2, y2) = points[-2:]
    missing = [length for length in asked.ATTENTION_LENGTHS if length > points[-1][0]]
    end = f"; {_OUT} at {missing[0]:,}" if missing else ""
    return (
        f"{kind}: {y1:.1f} GiB at {x1:,.0f} tokens, {y2:.1f} GiB at {x2:,.0f} above what lies there between "
        f"steps (exponent {exponent:.2f}){end}"
    )


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The power of x that y grows with, between the first point and the last."""
    (x1, y1), (x2, y2) = points[0], points[-1]
    return math.log(y2 / y1) / math.log(x2 / x1)


def _liger(results: Results, gpus: int) -> str:
    off = results.row("liger", asked.LIGER_OFF, gpus, 2048)
    on = results.row("liger", asked.LIGER_ON, gpus, 2048)
    if not (_done(off) and _done(on)):
        return f"without: {_cell(off)}; with: {_cell(on)}"
    faster = 100 * (on["tokens_per_second"] / off["tokens_per_second"] - 1)
    less = 100 * (1 - on["peak_allocated_bytes"] / off["peak_allocated_bytes"])
    return f"{faster:+.0f} % tokens/s, {less:.0f} % less at the peak ({_model(on)}, 8 sequences of 2,048)"


def _offload(results: Results, gpus: int) -> str:
    rows = [results.row("offload", name, gpus, 4096) for name in (asked.RESIDENT, asked.OFFLOADED)]
    if not all(map(_done, rows)):
        return "; ".join([*(_cell(row) for row in rows), *_optimizer_away(results, gpus)])
    tokens = 4096 * gpus
    resident, offloaded = (tokens / row["tokens_per_second"] for row in rows)
    peaks = " to ".join(format_bytes(row["peak_allocated_bytes"]) for row in rows)
    return (
        f"{resident:.2f} s to {offloaded:.2f} s a step, {offloaded / resident:.1f} times, "
        f"for {peaks} ({_model(rows[0])})"
    )


def _optimizer_away(results: Results, gpus: int) -> list[str]:
    """The shortest length of the ladder with the optimizer on the CPU, against the same without."""
    found = [results.ladder(name, gpus, asked.LENGTHS[0]) for name in (asked.ALL, asked.OPTIMIZER_AWAY)]
    rows = [row for row in found if row is not None and _done(row)]
    if len(rows) < 2:
        return []
    times = rows[0]["tokens_per_second"] / rows[1]["tokens_per_second"]
    where = f"{_model(rows[0])}, {asked.LENGTHS[0]:,} tokens"
    return [f"{times:.1f} times with the optimizer alone on the CPU ({where})"]


def _large(results: Results, gpus: int) -> str:
    row = results.row("large", asked.LARGE, gpus, 16384)
    return f"{_cell(row)} on {gpus} GPU{'s' if gpus > 1 else ''}, {row['cell']['optimizer']}"


def plots(results: Results, gpus: int) -> dict[str, Plot]:
    def of_ladder(value: Callable[[Row], float]) -> tuple[Line, ...]:
        lines = []
        for name in asked.LADDER:
            rows = [results.ladder(name, gpus, length) for length in asked.LENGTHS]
            done = [row for row in rows if row is not None and _done(row)]
            points = tuple((float(row["cell"]["seq_len"]), value(row)) for row in done)
            lines.append(Line(name=name, points=points))
        return tuple(line for line in lines if line.points)

    model = f"{asked.LADDER_MODEL}, {gpus} GPU{'s' if gpus > 1 else ''}"
    return {
        "memory": Plot(
            title=f"Peak memory, {model}",
            x_title="tokens of a sequence",
            y_title="GiB allocated",
            lines=of_ladder(lambda row: row["peak_allocated_bytes"] / _GIB),
            x_label=_thousands,
        ),
        "speed": Plot(
            title=f"Speed, {model}",
            x_title="tokens of a sequence",
            y_title="tokens/s",
            lines=of_ladder(lambda row: float(row["tokens_per_second"])),
            x_label=_thousands,
        ),
        "attention": Plot(
            title=f"Memory above the steady state, {model}, ZeRO-2",
            x_title="tokens of a sequence",
            y_title="GiB",
            lines=tuple(
                Line(name=name, points=tuple(points))
                for name in (asked.EAGER, asked.FLASH)
                if (points := _above_steady(results, gpus, name))
            ),
            x_label=_thousands,
        ),
    }


def _above_steady(results: Results, gpus: int, name: str) -> list[tuple[float, float]]:
    """Length to the GiB that a step needs above what lies there between steps."""
    points: list[tuple[float, float]] = []
    for length in asked.ATTENTION_LENGTHS:
        if name == asked.EAGER and length > asked.LONGEST_EAGER:
            continue
        row = results.row("attention", name, gpus, length)
        if _done(row):
            points.append((float(length), (row["peak_allocated_bytes"] - row["steady_bytes"]) / _GIB))
    return points


def _done(row: Row) -> bool:
    return row["status"] == "completed" and bool(row["tokens_per_second"])


def _cell(row: Row) -> str:
    if row["status"] == "out_of_memory":
        return _OUT
    if not _done(row):
        return f"failed: {row['reason']}"
    return f"{format_bytes(row['peak_allocated_bytes'])}, {row['tokens_per_second']:,.0f} tokens/s"


def _model(row: Row) -> str:
    return str(row["cell"]["model"])


def _thousands(length: float) -> str:
    return f"{length / 1024:g}k"
