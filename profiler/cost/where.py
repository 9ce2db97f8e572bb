"""Where could it run: for each kind of GPU the fewest that a run fits on, and its fastest setting there.

Of the settings there those with room to spare win over faster ones that fit with hardly any.

The search is over a small space, which the answer tells; what the command line fixes is not searched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from msgspec import Struct, field

from llmtop.presets import catalog
from llmtop.presets.errors import LlmtopError
from llmtop.presets.rules import has_bf16, refusals
from llmtop.presets.spec import Precision, RunSpec, ValueSource
from llmtop.profiler.cost.sweep import Change, SweepRow, best_first, changed, judge
from llmtop.profiler.memory.predict import Brief
from llmtop.profiler.units import counted

GPU_COUNTS = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
ALLOWED = ("offload", "8bit", "liger")
"""Words of `--allow`: what is searched only when it is asked for, since it changes more than speed."""
JOULES_PER_KWH = 3.6e6


class WhereRow(Struct, frozen=True, kw_only=True):
    """One kind of GPU."""

    gpu: str
    gpu_memory_bytes: int | None
    gpus: int | None
    """The fewest a node that it fits on; None where it fits on none of those that were tried."""
    settings: Change
    """The fastest that fits there with room to spare, else of those without; where nothing fits, what comes
    closest."""
    brief: Brief | None = field(name="prediction")
    """Of that setting; None where every one is refused."""
    kwh_per_million_tokens: float | None
    """Estimate: the boards at the power that they are sold with, for the predicted time."""
    why: str
    """Where nothing fits: what is short and by how much, or why all is refused."""
    short_bytes: int | None = None
    tried_gpus: int | None = None
    """Where nothing fits: the number a node that comes closest."""
    nodes: int = 1
    """As asked for."""


class Where(Struct, frozen=True, kw_only=True):
    space: dict[str, tuple[Any, ...]]
    """Option to the values that were searched; the others are as asked."""
    rows: tuple[WhereRow, ...]
    """The fastest first, what fits nowhere last."""


def gpu_names() -> tuple[str, ...]:
    """Every preset of a GPU once, without other names of the same."""
    entries = (e for e in catalog.entries("gpus") if not e.error and not e.description.startswith("the same"))
    return tuple(e.name for e in entries if e.name != "cpu")


def where(
    base_of: Callable[[Change], RunSpec], *, gpus: tuple[str, ...], allow: tuple[str, ...] = ()
) -> Where:
    """`base_of` resolves the run that is asked for with some options set, unchecked."""
    bases = [_as_typed(base_of({"gpu": name})) for name in gpus]
    searched: dict[str, tuple[Any, ...]] = {}
    rows = []
    precision_matters = any(_possible_precision(base) != base.options.precision for base in bases)
    for base in bases:
        space = _space(base, allow)
        if precision_matters:
            space["precision"] = (_possible_precision(base),)
        for key, values in space.items():
            searched[key] = tuple(dict.fromkeys((*searched.get(key, ()), *values)))
        rows.append(_row(base, space))
    return Where(space=searched, rows=tuple(sorted(rows, key=_fastest_first)))


def _as_typed(base: RunSpec) -> RunSpec:
    """As many GPUs and nodes as somebody typed, else one: a recipe's are of another kind of GPU."""
    return changed(base, {key: 1 for key in ("gpus", "nodes") if not _is_fixed(base, key)})


def _possible_precision(base: RunSpec) -> Precision:
    """As asked; where nobody typed it and the GPU computes no bf16, fp16."""
    asked = base.options.precision
    return (
        "fp16" if asked == "bf16" and not has_bf16(base.gpu) and not _is_fixed(base, "precision") else asked
    )


def _space(base: RunSpec, allow: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    options = base.options
    space: dict[str, tuple[Any, ...]] = {
        "micro_batch": MICRO_BATCHES,
        "zero": (0, 1, 2, 3),
        "gradient_checkpointing": (False, True),
    }
    if "offload" in allow:
        space |= {"offload_optimizer": ("none", "cpu"), "offload_param": ("none", "cpu")}
    if "8bit" in allow:
        space["optimizer"] = tuple(dict.fromkeys((options.optimizer, "adamw_8bit")))
    if "liger" in allow:
        space["liger"] = (False, True)
    return {key: values for key, values in space.items() if not _is_fixed(base, key)}


def _is_fixed(base: RunSpec, key: str) -> bool:
    given = base.provenance.get(key)
    return given is not None and given.source is ValueSource.COMMAND_LINE


def _changes(space: dict[str, tuple[Any, ...]]) -> Iterator[Change]:
    for values in product(*space.values()):
        change = dict(zip(space, values, strict=True))
        if change.get("gradient_checkpointing") is False:
            change["checkpointing_every"] = 1
        yield change


def _row(base: RunSpec, space: dict[str, tuple[Any, ...]]) -> WhereRow:
    closest: tuple[int, int, SweepRow] | None = None
    refused: _Refused | None = None
    counts = _counts(base)
    for count in counts:
        found: list[SweepRow] = []
        for change in _changes(space):
            judged = _judged(base, {"gpus": count, **change})
            if isinstance(judged, SweepRow):
                found.append(judged)
            elif refused is None or judged.far < refused.far:
                refused = judged
        fitting = [row for row in found if row.brief.fits]
        if fitting:
            return _fits(base, count, min(fitting, key=_safest_first))
        for row in found:
            short = _short(row)
            if short is not None and (closest is None or short < closest[0]):
                closest = short, count, row
    return _fits_nowhere(base, counts[-1], closest, refused)


def _counts(base: RunSpec) -> tuple[int, ...]:
    """GPUs a node: as many as somebody typed, else the few numbers that are usual."""
    return (base.options.gpus,) if _is_fixed(base, "gpus") else GPU_COUNTS


def _safest_first(row: SweepRow) -> tuple[bool, tuple[int, float, int]]:
    return row.brief.tight, best_first(row)


class _Refused(Struct, frozen=True):
    far: tuple[int, int]
    """From what was asked: reasons that refuse it, since a search gets rid of those of its own settings, and
    options that are not as asked."""
    why: str


def _judged(base: RunSpec, change: Change) -> SweepRow | _Refused:
    distance = sum(getattr(base.options, key) != value for key, value in change.items())
    try:
        spec = changed(base, change)
        row = judge(spec, change)
    except LlmtopError as error:
        return _Refused((1, distance), error.what)
    if isinstance(row, SweepRow):
        return row
    found = refusals(spec)
    return _Refused((len(found), distance), f"{found[0].rule}: {found[0].why} ({found[0].fix})")


def _short(row: SweepRow) -> int | None:
    brief = row.brief
    if brief.needed_bytes is None or brief.device_memory_bytes is None:
        return None
    return brief.needed_bytes - brief.device_memory_bytes


def _fits(base: RunSpec, count: int, row: SweepRow) -> WhereRow:
    rate, watts = row.brief.tokens_per_second, base.gpu.board_power_watts
    boards = count * base.options.nodes
    energy = None if not rate or watts is None else watts * boards / rate * 1e6 / JOULES_PER_KWH
    return WhereRow(
        gpu=base.gpu.name,
        gpu_memory_bytes=base.gpu.memory_bytes,
        gpus=count,
        settings=row.settings,
        brief=row.brief,
        kwh_per_million_tokens=energy,
        why="",
        nodes=base.options.nodes,
    )


def _fits_nowhere(
    base: RunSpec,
    most: int,
    closest: tuple[int, int, SweepRow] | None,
    refused: _Refused | None,
) -> WhereRow:
    if closest is not None:
        nodes = base.options.nodes
        over = f"{nodes} nodes of " if nodes > 1 else ""
        upto = "" if _is_fixed(base, "gpus") else "up to "
        why = f"GPU memory is short on {upto}{over}{counted(most, 'GPU')}"
    elif base.gpu.memory_bytes is None:
        why = "the memory of this GPU is not known"
    else:
        why = refused.why if refused is not None else "nothing to try"
    return WhereRow(
        gpu=base.gpu.name,
        gpu_memory_bytes=base.gpu.memory_bytes,
        gpus=None,
        settings=closest[2].settings if closest else {},
        brief=closest[2].brief if closest else None,
        kwh_per_million_tokens=None,
        why=why,
        short_bytes=closest[0] if closest else None,
        tried_gpus=closest[1] if closest else None,
        nodes=base.options.nodes,
    )


def _fastest_first(row: WhereRow) -> tuple[bool, float, float]:
    rate = row.brief.tokens_per_second if row.brief is not None else None
    short = float("inf") if row.short_bytes is None else float(row.short_bytes)
    return row.gpus is None, -(rate or 0.0) if row.gpus is not None else 0.0, short
