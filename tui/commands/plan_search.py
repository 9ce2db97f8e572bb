"""`plan --sweep` and `plan --where`: many candidates as one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llmtop.presets.errors import UsageError, nearest
from llmtop.profiler.cost.sweep import Change, Sweep, SweepRow, head_of
from llmtop.profiler.cost.where import ALLOWED, Where, WhereRow
from llmtop.profiler.units import counted, format_bytes, format_seconds
from llmtop.tui.commands.output import WIDTH, table, value_text, wrapped

WHERE_NOTES = (
    "host is what each host must have, which is not checked: a kind of GPU does not tell its host's memory."
    " ≈ fits with hardly anything to spare. Wh/M is an estimate of the watt-hours for a million tokens:"
    " the boards at the power that they are sold with, for the predicted time; hosts and cooling come on top"
)


def sweep_text(sweep: Sweep, most: int, width: int = WIDTH) -> str:
    """Count, table of the best candidates, and what was refused."""
    lines = wrapped(_counts(sweep), "", width)
    shown = sweep.rows[:most]
    if shown:
        keys = [axis.key for axis in sweep.axes]
        heads = [*(head_of(key) for key in keys), "fits", "needs", "host", "step", "tokens/s"]
        rows = [heads, *([*(_value(row.settings[key]) for key in keys), *_figures(row)] for row in shown)]
        lines += ["", *table(rows, right=range(len(keys) + 1, len(heads)))]
    if len(sweep.rows) > len(shown):
        lines.append(f"{len(sweep.rows) - len(shown):,} more; --rows N shows more, --json all")
    if sweep.refused:
        lines += ["", "refused"]
        for one in sweep.refused:
            why = f": {one.why}" if one.why else ""
            lines += wrapped(f"{one.reason}{why}", f"  {one.count:>7,}  ", width)
    return "\n".join(lines)


def _counts(sweep: Sweep) -> str:
    fitting, refused = sweep.fitting, sum(one.count for one in sweep.refused)
    unknown = sum(row.brief.fits is None for row in sweep.rows)
    parts = [f"{sweep.candidates:,} candidates", f"{fitting:,} fit"]
    parts += [f"{unknown:,} without a verdict"] if unknown else []
    parts += [f"{len(sweep.rows) - fitting - unknown:,} do not fit", f"{refused:,} refused"]
    return ", ".join(parts) + "; the fastest first, then the nearest to fitting"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value_text(value)


def _figures(row: SweepRow) -> list[str]:
    brief = row.brief
    rate = brief.tokens_per_second
    return [
        fits_word(row),
        format_bytes(brief.needed_bytes),
        format_bytes(brief.host_bytes),
        format_seconds(brief.step_seconds),
        "n/a" if rate is None else f"{rate:,.0f}",
    ]


def fits_word(row: SweepRow) -> str:
    """`yes`, `tight`, `no` or `n/a`, without colour."""
    brief = row.brief
    if brief.fits is None:
        return "n/a"
    if not brief.fits:
        return "no"
    return "tight" if brief.tight else "yes"


def where_text(found: Where, width: int = WIDTH) -> str:
    """The space that was searched, a row for each GPU, and why others hold nothing."""
    lines = wrapped(searched_words(found), "", width)
    missing = [word for word in ALLOWED if not set(_OPTIONS[word]) & found.space.keys()]
    if missing:
        lines += wrapped(f"not searched without --allow: {', '.join(missing)}", "", width)
    fitting = [row for row in found.rows if row.gpus is not None and row.brief is not None]
    if fitting:
        found_lines = where_lines(fitting, width)
        lines += ["", found_lines.head, *found_lines.rows, *filter(None, [found_lines.same])]
        lines += wrapped(WHERE_NOTES, "", width)
    nowhere = [row for row in found.rows if row.gpus is None]
    if nowhere:
        lines += ["", "fits nowhere"]
        for row in nowhere:
            lines += wrapped(f"{row.gpu}: {nowhere_words(row)}", "  ", width)
    return "\n".join(lines)


def searched_words(found: Where) -> str:
    """The space that was searched."""
    searched = ", ".join(f"{key} {_values(values)}" for key, values in found.space.items())
    return f"searched: {searched or 'nothing'}; all else as asked"


_OPTIONS = {"offload": ("offload_optimizer",), "8bit": ("optimizer",), "liger": ("liger",)}


def _values(values: tuple[Any, ...]) -> str:
    if len(values) > 2 and all(type(value) is int for value in values):
        return f"{values[0]} to {values[-1]}"
    return " or ".join(_value(value) for value in values)


class WhereLines(NamedTuple):
    head: str
    rows: tuple[str, ...]
    same: str
    """Settings that all rows have; empty where there is none."""


def where_lines(rows: Sequence[WhereRow], width: int = WIDTH) -> WhereLines:
    """Kinds of GPU on which it fits, aligned: speed and energy, by which they are chosen, come first.

    Where there is no room the memory of a GPU is left out and heads are cut short; what a host needs stays.
    """
    settings = [key for key in rows[0].settings if key not in _HIDDEN]
    same = [key for key in settings if len({row.settings[key] for row in rows}) == 1]
    keys = [key for key in settings if key not in same]
    cells = [[*_WHERE_HEADS, *map(head_of, keys)], *(_where_cells(row, keys) for row in rows)]
    right = range(1, len(_WHERE_HEADS))
    lines = table(cells, right=right)
    if max(map(len, lines)) > width:
        at = _WHERE_HEADS.index(_LESSER)
        cells = [row[:at] + row[at + 1 :] for row in cells]
        right = right[:-1]
        lines = table(cells, right=right)
    if max(map(len, lines)) > width:
        cells[0] = [_BRIEF_HEADS.get(head, head) for head in cells[0]]
        lines = table(cells, right=right)
    words = ", ".join(f"{head_of(key)} {_value(rows[0].settings[key])}" for key in same)
    return WhereLines(lines[0], tuple(lines[1:]), f"all with {words}" if words else "")


_WHERE_HEADS = ("GPU", "GPUs", "tokens/s", "Wh/M", "needs", "of", "host")
_LESSER = "of"
_BRIEF_HEADS = {
    "tokens/s": "tok/s",
    "recompute": "ckpt",
    "opt on": "opt",
    "params on": "params",
    "optimizer": "optim",
    "precision": "type",
}
_HIDDEN = ("gpus", "checkpointing_every")
"""Settings that have a column of their own, or follow from another."""


def _where_cells(row: WhereRow, keys: Sequence[str]) -> list[str]:
    brief, energy = row.brief, row.kwh_per_million_tokens
    rate = brief.tokens_per_second if brief is not None else None
    return [
        row.gpu,
        str(row.gpus) if row.nodes == 1 else f"{row.nodes} x {row.gpus}",
        "n/a" if rate is None else f"{rate:,.0f}",
        "n/a" if energy is None else _watt_hours(energy * 1000),
        ("≈" if brief is not None and brief.tight else "")
        + format_bytes(brief.needed_bytes if brief is not None else None),
        format_bytes(row.gpu_memory_bytes),
        format_bytes(brief.host_bytes if brief is not None else None),
        *(_value(row.settings[key]) for key in keys),
    ]


def _watt_hours(hours: float) -> str:
    """Three digits, and no exponent of ten where they are many."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def nowhere_words(row: WhereRow, *, brief: bool = False) -> str:
    """What is short and by how much, or why all is refused."""
    if row.short_bytes is None or row.brief is None:
        return row.why
    short = format_bytes(row.short_bytes)
    if brief:
        return f"short by {short} even on {_tried(row)}"
    return (
        f"{row.why}: closest is {_tried(row)} with {_setting_words(row.settings)}, which needs"
        f" {format_bytes(row.brief.needed_bytes)} a GPU of {format_bytes(row.gpu_memory_bytes)},"
        f" short by {short}"
    )


def _tried(row: WhereRow) -> str:
    return counted(row.tried_gpus or 0, "GPU")


def _setting_words(settings: Change) -> str:
    """Each that was searched, by its short name."""
    return ", ".join(
        f"{head_of(key)} {_value(value)}" for key, value in settings.items() if key not in _HIDDEN
    )


def parse_allow(text: str) -> tuple[str, ...]:
    """Words of `--allow`, joined by commas; raises UsageError for another one."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word not in ALLOWED:
            guess = nearest(word, ALLOWED)
            known = f"some of {', '.join(ALLOWED)} joined by commas"
            raise UsageError(
                f"--allow {text[:80]}: '{word}' is none of its words",
                why=f"it takes {known}",
                fix=f"did you mean '{guess}'?" if guess else f"use {known}",
            )
    return words
