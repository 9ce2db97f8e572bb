"""G6: what others have published and reported, against what is predicted for it.

The facts stand in `data/published.jsonl` and `data/oom_cases.jsonl`, each with its source; models that have
no preset are in `data/models/`. Nothing here served to write a formula.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from benchmarks.accuracy.differences import EXPANDABLE_SEGMENTS, added_bytes
from benchmarks.accuracy.lengths import MANY_LENGTHS, likely_bytes, likely_error_bytes, reserved_of
from benchmarks.accuracy.score import percent, words
from benchmarks.cells import DEFAULTS, Planned, plan
from benchmarks.rows import Cell, Row, read_rows
from llmtop.presets.errors import LlmtopError
from llmtop.presets.resolve import Layer, Machine, assemble
from llmtop.presets.spec import ValueSource
from llmtop.profiler.memory.predict import predict_closely
from llmtop.profiler.memory.result import Prediction

DATA = Path(__file__).parents[1] / "data"
_GIB = 2**30


class Published(Struct, frozen=True, kw_only=True):
    """One published row beside its prediction."""

    row: Row
    name: str
    percent: float | None
    """Of the measured figure; None for a row that ran out of memory, or that is refused."""
    refused: bool | None
    """For one that ran out of memory: whether the verdict says so; None where another rule refuses it."""
    mended_refused: bool | None = None
    """The same with what the row's own code is known to have kept otherwise."""
    mended_percent: float | None = None
    """Of a measured row with what its own code is known to have kept otherwise."""
    mended_range: tuple[float, float] | None = None
    """Of a row whose samples came in an order that is not known: the same of the least and the most that any
    of the simulated orders held."""
    mended_error: float | None = None
    """The standard error of such a row's `mended_percent`."""


class Case(Struct, frozen=True, kw_only=True):
    """One user's report beside the verdict."""

    row: Row
    name: str
    said: str
    """The verdict in a few words."""
    agrees: bool


class LeftOut(Struct, frozen=True, kw_only=True):
    why: str
    rows: tuple[str, ...]


def published() -> list[Published]:
    return [_published(row) for row in read_rows(DATA / "published.jsonl")]


def differences() -> list[Row]:
    """Name, why and source of what code of other versions keeps otherwise."""
    return read_rows(DATA / "differences.jsonl")


def left_out() -> list[LeftOut]:
    return [
        LeftOut(why=row["why"], rows=tuple(row["rows"]))
        for row in read_rows(DATA / "published_left_out.jsonl")
    ]


def cases() -> list[Case]:
    return [_case(row) for row in read_rows(DATA / "oom_cases.jsonl")]


def predicted(cell: Cell) -> Prediction:
    """Raises LlmtopError for a configuration that is refused."""
    return _planned(cell).prediction


def _planned(cell: Cell, *, own_code: bool = False) -> Planned:
    """With code of its own a row is held against none of the rules of the versions that we launch."""
    model = str(cell["model"])
    located = str(DATA / model) if model.startswith("models/") else model
    machine = Machine(gpu=cell["gpu"], gpus=cell.get("gpus", 1), host_memory_bytes=None)
    cell = {**cell, "model": located}
    if not own_code:
        return plan(cell, machine, name="published")
    layer = Layer(source=ValueSource.COMMAND_LINE, detail="cell", values={**DEFAULTS, **cell})
    spec = assemble([layer], name="published", machine=machine)
    return Planned(cell=cell, spec=spec, prediction=predict_closely(spec))


def figure(prediction: Prediction, metric: str, *, grows_in_place: bool = False) -> int | None:
    """What the prediction says of a metric: allocated, reserved (as far as likely) or the whole device.

    With segments that grow in place what is reserved is what is allocated.
    """
    allocated, device = prediction.peak_allocated_bytes, prediction.peak_device_bytes
    if metric == "allocated":
        return allocated
    if device is None or prediction.needed_bytes is None:
        return device
    outside = prediction.needed_bytes - prediction.peak_allocated_upper_bytes
    reserved = allocated if grows_in_place else device - outside
    return reserved + outside if metric == "device" else reserved


def too_large(prediction: Prediction, memory_gib: float | None, added_bytes: int = 0) -> bool:
    """Whether the upper bound, with what is added to it, is more than the limit or the GPU's memory."""
    limit = prediction.device_memory_bytes if memory_gib is None else round(memory_gib * _GIB)
    if limit is None or prediction.needed_bytes is None:
        return prediction.fits is False
    return prediction.needed_bytes + added_bytes > limit


def _name(cell: Cell) -> str:
    return words({**cell, "model": str(cell["model"]).removeprefix("models/").removesuffix(".json")})


def _published(row: Row) -> Published:
    cell, differs = row["cell"], row["differs"]
    own = _planned(cell, own_code=True)
    added = added_bytes(differs, own.spec, own.prediction)
    if row["outcome"] == "oom":
        limit = row.get("memory_gib")
        return Published(
            row=row,
            name=_name(cell),
            percent=None,
            refused=_refused(cell, limit),
            mended_refused=too_large(own.prediction, limit, added),
        )
    if MANY_LENGTHS in differs:
        return _of_many_lengths(row)
    said = figure(own.prediction, row["metric"])
    mended = figure(own.prediction, row["metric"], grows_in_place=EXPANDABLE_SEGMENTS in differs)
    if said is None or mended is None:
        return Published(row=row, name=_name(cell), percent=None, refused=None)
    return Published(
        row=row,
        name=_name(cell),
        percent=percent(said, row["measured_bytes"]),
        mended_percent=percent(mended + added, row["measured_bytes"]),
        refused=None,
    )


def _of_many_lengths(row: Row) -> Published:
    """By today's formulas of its limit alone, and what was simulated of its samples."""
    said = figure(_planned(row["cell"]).prediction, row["metric"])
    likely, held = likely_bytes(row["id"]), reserved_of(row["id"])
    error, measured = likely_error_bytes(row["id"]), row["measured_bytes"]
    return Published(
        row=row,
        name=_name(row["cell"]),
        percent=None if said is None else percent(said, measured),
        mended_percent=None if likely is None else percent(likely, measured),
        mended_range=(percent(held[0], measured), percent(held[-1], measured)) if held else None,
        mended_error=None if error is None else 100.0 * error / measured,
        refused=None,
    )


def _refused(cell: Cell, limit: float | None) -> bool | None:
    """By today's formulas and rules; None where a rule refuses it for another reason than its size."""
    try:
        return too_large(_planned(cell).prediction, limit)
    except LlmtopError:
        return None


def _case(row: Row) -> Case:
    cell = row["cell"]
    try:
        prediction = predicted(cell)
    except LlmtopError as error:
        return Case(row=row, name=_name(cell), said=f"refused: {error}", agrees=row["happened"] != "ok")
    host_gb = row.get("host_gb")
    device = too_large(prediction, row.get("memory_gib"))
    host = host_gb is not None and prediction.host_bytes > host_gb * 1e9
    said = {"oom": device, "host-oom": host, "ok": not device and not host}
    return Case(row=row, name=_name(cell), said=_verdict(prediction, row), agrees=said[row["happened"]])


def _verdict(prediction: Prediction, row: Row) -> str:
    limit = row.get("memory_gib") or (prediction.device_memory_bytes or 0) / _GIB
    parts = [f"needs {(prediction.needed_bytes or 0) / _GIB:.1f} of {limit:.1f} GiB"]
    if row.get("host_gb"):
        parts.append(f"host {prediction.host_bytes / 1e9:.0f} of {row['host_gb']:.0f} GB")
    return ", ".join(parts)
