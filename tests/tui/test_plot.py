"""Plots look as textual-plotext draws them, and painted text takes the rows that Textual gives it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.widget import Widget
from textual_plotext import PlotextPlot

from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.curves import BLUE, RED
from llmtop.tui.widgets.figure import Figure
from llmtop.tui.widgets.painted import rows_of


class _Both(App[None]):
    CSS = "PlotextPlot { height: 8; width: 40; }"

    def compose(self) -> ComposeResult:
        yield PlotextPlot(id="theirs")
        yield Figure()


def _draw(figure: PlotextPlot) -> None:
    steps = [float(step) for step in range(1, 30)]
    figure.plt.plot(steps, [3.0 / step for step in steps], marker="braille", color=BLUE)
    figure.plt.scatter([4.0, 9.0], [1.0, 2.5], marker="x", color=RED)
    figure.plt.xticks([1, 29], ["1", "29"])


def _cells(widget: Widget) -> list[tuple[str, object, object]]:
    """Each character that is shown, and its colours."""
    segments = [segment for row in range(8) for segment in widget.render_line(row)]
    return [
        (letter, segment.style and segment.style.color, segment.style and segment.style.bgcolor)
        for segment in segments
        for letter in segment.text
    ]


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
async def test_a_figure_looks_as_it_does_by_way_of_rich(theme: str) -> None:
    app = _Both()
    async with app.run_test(size=(80, 24)) as pilot:
        app.theme = theme
        theirs, own = app.query_one("#theirs", PlotextPlot), app.query_one(Figure)
        for figure in (theirs, own):
            _draw(figure)
            figure.refresh()
        await pilot.pause()
        assert _cells(own) == _cells(theirs)
        assert len({colour for _, colour, _ in _cells(own)}) >= 3  # the curve's, the marks', the axes'


@given(
    st.lists(st.sampled_from(["a", "bb ", "  ", "\n", "漢", "x y", "é", "\t"]), max_size=12),
    st.integers(1, 14),
)
def test_lines_that_fit_are_rows(pieces: list[str], width: int) -> None:
    content = Content("".join(pieces))
    rows = rows_of(content, width)
    if rows is not None and content:
        assert len(rows) == content.visualize().get_height({}, width)
        assert "\n".join(row.plain for row in rows) == content.plain
    elif rows is None:
        assert "\t" in content.plain or any(line.cell_length > width for line in content.rows())
