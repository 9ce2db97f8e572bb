"""Where a replay stands: playing or held, how fast, when in the run, and where findings came up."""

from __future__ import annotations

from itertools import groupby

from textual.app import ComposeResult
from textual.containers import Vertical

from llmtop.tui.feeds.replaying import ReplayPosition
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.headrows import clock_text
from llmtop.tui.widgets.paint import fit, harmless
from llmtop.tui.widgets.painted import Painted

_LEAST_BAR_CELLS = 8


class ReplayBar(Vertical):
    DEFAULT_CSS = "ReplayBar { height: auto; }"

    def __init__(self) -> None:
        super().__init__()
        self._row = Painted()
        self._position: ReplayPosition | None = None

    def compose(self) -> ComposeResult:
        yield self._row

    def on_resize(self) -> None:
        self._paint()

    def show(self, position: ReplayPosition) -> None:
        self._position = position
        self._paint()

    def _paint(self) -> None:
        width = self.content_size.width
        if self._position is not None and width > 0:
            self._row.paint(replay_row(self._position, width), width)


def replay_row(position: ReplayPosition, width: int) -> Content:
    """One row of `width` cells."""
    length, done = position.end - position.begin, position.at - position.begin
    mark, style = ("▶", "$text-success") if position.playing else ("‖", "$text-warning")
    clock = f"{clock_text(done)}/{clock_text(length)}"
    head = Content.assemble(
        (f"{mark} ", f"bold {style}"), ("REPLAY ", "bold"), f"{position.speed}x  ", clock, "  "
    )
    words, words_style = _words(position)
    room = width - head.cell_length
    bar = max(_LEAST_BAR_CELLS, min(room // 2, 40)) if words else room
    if room < _LEAST_BAR_CELLS + 4:
        return head.truncate(width, ellipsis=True)
    return Content.assemble(
        head,
        _bar(position, min(bar, room)),
        (fit(f"  {words}", max(0, room - bar)) if words else "", words_style),
    )


def _words(position: ReplayPosition) -> tuple[str, str]:
    if position.going_to:
        return f"going to {position.going_to}, {position.read_share:.0%} read", "$text-accent"
    if position.note:
        return harmless(position.note), "$text-accent"
    if position.read_share < 1:
        return f"{position.read_share:.0%} read", "$muted"
    return "", ""


def _bar(position: ReplayPosition, width: int) -> Content:
    length = max(position.end - position.begin, 1e-9)
    at = round((position.at - position.begin) / length * width)
    cells = [("━", "$primary") if number < at else ("─", "$faint") for number in range(width)]
    for mark in position.marks:
        place = min(width - 1, max(0, int((mark.t - position.begin) / length * width)))
        cells[place] = ("!", "bold $text-warning")
    runs = groupby(cells, key=lambda cell: cell[1])
    return Content.assemble(*(("".join(cell for cell, _ in run), style) for style, run in runs))
