"""The grid of a sweep, micro-batch by ZeRO stage, as values and as painted rows. No widget, no state."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from llmtop.presets.spec import RunSpec
from llmtop.profiler.cost.sweep import Change, SweepRow, changed, judge
from llmtop.profiler.units import format_bytes, format_seconds, format_tokens_rate
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import SPARKS, fit, fit_right, wrapped

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
STAGES = (0, 1, 2, 3)
_LABEL_CELLS, _WIDE_CELLS, _NARROW_CELLS = 7, 17, 10
_GIB = 1 << 30
_SLOW, _FAST = 0.5, 0.85
"""Of the fastest that fits."""

Place = tuple[int, int]
"""Row and column."""


class Cell(Struct, frozen=True, kw_only=True):
    """One combination: a prediction, or why it is refused."""

    change: Change
    row: SweepRow | None
    why: str = ""


class Grid(Struct, frozen=True, kw_only=True):
    micro_batches: tuple[int, ...]
    cells: dict[Place, Cell]
    own: Place
    """The plan's own cell."""

    @property
    def fastest(self) -> float:
        """Tokens a second of the fastest that fits; 0 where none does or no speed is known."""
        rows = (cell.row for cell in self.cells.values() if cell.row is not None and cell.row.brief.fits)
        return max((row.brief.tokens_per_second or 0.0 for row in rows), default=0.0)


def grid_of(spec: RunSpec) -> Grid:
    """Every cell predicted; a run's own micro-batch has a row of its own where it is none of the usual."""
    own = spec.options.micro_batch
    micro_batches = tuple(sorted({*MICRO_BATCHES, own}))
    cells: dict[Place, Cell] = {}
    for at, micro_batch in enumerate(micro_batches):
        for stage in STAGES:
            change = {"micro_batch": micro_batch, "zero": stage}
            judged = judge(changed(spec, change), change)
            row = judged if isinstance(judged, SweepRow) else None
            why = "" if isinstance(judged, SweepRow) else f"{judged[0]}: {judged[1]}"
            cells[at, stage] = Cell(change=change, row=row, why=why)
    return Grid(micro_batches=micro_batches, cells=cells, own=(micro_batches.index(own), spec.options.zero))


def mark_of(cell: Cell) -> tuple[str, str]:
    """A mark that says it without colour, and the colour."""
    if cell.row is None:
        return "–", "$muted"
    if cell.row.brief.fits is None:
        return "?", "$text-warning"
    if cell.row.brief.tight:
        return "≈", "$text-warning"
    return ("✓", "$text-success") if cell.row.brief.fits else ("✗", "$text-error")


def grid_rows(grid: Grid, cursor: Place, width: int) -> list[Content]:
    """Head, a row for each micro-batch, and what the marks mean."""
    wide = _is_wide(width)
    cells = _WIDE_CELLS if wide else _NARROW_CELLS
    head = fit("micro", _LABEL_CELLS) + "".join(fit(f"  ZeRO-{stage}", cells) for stage in STAGES)
    rows = [Content.styled(head.rstrip(), "$muted")]
    for at, micro_batch in enumerate(grid.micro_batches):
        parts: list[Content] = [Content(fit(str(micro_batch), _LABEL_CELLS))]
        for stage in STAGES:
            place = (at, stage)
            style = _cell_style(grid, place, cursor)
            text = _cell_text(grid, place, is_wide=wide)
            own = "*" if place == grid.own else " "
            parts.append(Content.styled(fit(own + text, cells - 1), style) + Content(" "))
        rows.append(Content("").join(parts))
    return rows


def place_at(grid: Grid, x: int, y: int, width: int) -> Place | None:
    """Which cell is drawn there; None outside of the cells."""
    cells = _WIDE_CELLS if _is_wide(width) else _NARROW_CELLS
    row, stage = y - 1, (x - _LABEL_CELLS) // cells
    inside = 0 <= row < len(grid.micro_batches) and x >= _LABEL_CELLS and stage < len(STAGES)
    return (row, stage) if inside else None


def _is_wide(width: int) -> bool:
    return _LABEL_CELLS + _WIDE_CELLS * len(STAGES) <= width


def _cell_style(grid: Grid, place: Place, cursor: Place) -> str:
    """The colour of the verdict, the stronger the faster."""
    cell = grid.cells[place]
    style = mark_of(cell)[1]
    rate = cell.row.brief.tokens_per_second if cell.row is not None else None
    if cell.row is not None and cell.row.brief.fits and rate and grid.fastest:
        share = rate / grid.fastest
        colour = style.replace("$text-", "$")
        style = f"{colour} 60%" if share < _SLOW else f"{colour} 80%" if share < _FAST else style
        style = f"bold {style}" if rate == grid.fastest else style
    return f"reverse {style}" if place == cursor else style


def _cell_text(grid: Grid, place: Place, *, is_wide: bool) -> str:
    cell = grid.cells[place]
    mark = mark_of(cell)[0]
    if cell.row is None:
        return f"{mark} refused"
    brief = cell.row.brief
    bar = _bar(brief.tokens_per_second, grid.fastest)
    if not is_wide:
        return f"{mark}{bar}{fit_right(_rate(brief.tokens_per_second, most=99_999), 6)}"
    need = brief.needed_bytes if brief.needed_bytes is not None else brief.peak_allocated_bytes
    gib = need / _GIB
    return (
        f"{mark}{bar}{fit_right(_rate(brief.tokens_per_second, most=999_999), 7)}"
        f"{fit_right(f'{gib:,.1f}' if gib < 1000 else f'{gib:,.0f}', 6)}"
    )


def _rate(rate: float | None, *, most: int) -> str:
    if rate is None:
        return "n/a"
    return f"{rate:,.0f}" if rate <= most else f"{rate / 1e3:,.0f}K"


def _bar(rate: float | None, fastest: float) -> str:
    """How fast, against the fastest that fits."""
    if not rate or not fastest:
        return " "
    return SPARKS[min(len(SPARKS) - 1, round(rate / fastest * (len(SPARKS) - 1)))]


def legend() -> str:
    return (
        "✓ fits  ≈ tight  ✗ does not fit  – refused  * the plan's own  ▁ to █ speed; then tokens a second"
        " and the GiB that a GPU needs"
    )


def detail_rows(grid: Grid, cursor: Place, width: int) -> Iterator[Content]:
    """The cell under the cursor in words."""
    cell = grid.cells[cursor]
    micro_batch, stage = grid.micro_batches[cursor[0]], cursor[1]
    mark, style = mark_of(cell)
    yield Content.assemble((f"{mark} ", style), (f"micro-batch {micro_batch}, ZeRO-{stage}", "bold"))
    if cell.row is None:
        for line in wrapped(f"refused: {cell.why}", width):
            yield Content(line)
        return
    brief = cell.row.brief
    words = {None: "not known whether it fits", True: "fits", False: "does not fit"}[brief.fits]
    tight = ", but tight" if cell.row.brief.tight else ""
    for line in wrapped(
        f"{words}{tight}: needs up to {format_bytes(brief.needed_bytes)} of"
        f" {format_bytes(brief.device_memory_bytes)}, host {format_bytes(brief.host_bytes)};"
        f" a step {format_seconds(brief.step_seconds)}, {format_tokens_rate(brief.tokens_per_second)}",
        width,
    ):
        yield Content(line)
