"""Painted primitives keep their width and let no foreign text act on the terminal."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.paint import (
    Segment,
    fit,
    fit_right,
    gauge,
    harmless,
    sparkline,
    stacked,
    two_sided,
    used_of,
    wrapped,
    wrapped_rows,
)

WIDTHS = st.integers(min_value=0, max_value=120)
FRACTIONS = st.floats(min_value=-1, max_value=3, allow_nan=False)


@given(st.text(), WIDTHS)
def test_fit_is_exactly_as_wide_as_asked(text: str, width: int) -> None:
    shown = harmless(text)
    assert cell_len(fit(shown, width)) == width
    assert cell_len(fit_right(shown, width)) == width


@given(st.text())
def test_harmless_text_holds_no_control(text: str) -> None:
    shown = harmless(text)
    assert not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 for letter in shown)
    assert harmless(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07left", "left"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("10%\r20%\r\n", "20%"),
        ("a\tb", "a   b"),
        ("\x1bP1$r\x1b\\x\x1b(B", "x"),
        ("[bold]kept[/bold]", "[bold]kept[/bold]"),
        ("right\u202eleft", "rightleft"),
        ("the sea \U0001f3d6\ufe0f", "the sea \U0001f3d6"),
    ],
)
def test_harmless_examples(text: str, shown: str) -> None:
    assert harmless(text) == shown


@given(st.none() | FRACTIONS, WIDTHS, FRACTIONS, st.none() | FRACTIONS)
def test_gauge_is_exactly_as_wide_as_asked(
    fraction: float | None, width: int, others: float, mark: float | None
) -> None:
    assert gauge(fraction, width, others=others, mark=mark).cell_length == width


def test_gauge_says_by_shape_who_uses_what() -> None:
    assert gauge(0.5, 10, others=0.2).plain == "━━━━━╍╍───"
    assert gauge(0.5, 10, mark=0.75).plain == "━━━━━──┼──"
    assert gauge(0.001, 10).plain.startswith("╸")
    assert gauge(None, 4).plain == "····"


@given(
    st.lists(st.floats(min_value=0, max_value=1e13, allow_nan=False), max_size=13),
    st.floats(min_value=1, max_value=1e13, allow_nan=False),
    WIDTHS,
)
def test_stacked_bar_is_exactly_as_wide_as_asked(values: list[float], scale: float, width: int) -> None:
    segments = [Segment("P", "#ffffff", value) for value in values]
    assert stacked(segments, scale, width, limit=scale / 2).cell_length == width


def test_stacked_bar_begins_each_part_with_its_letter() -> None:
    segments = [Segment("P", "#111111", 2), Segment("G", "#222222", 3)]
    assert stacked(segments, 10, 10).plain == "P G  ·····"
    assert stacked(segments, 5, 10, limit=4).plain == "P   G   ┃ "


@given(st.lists(st.none() | st.floats(min_value=-1e9, max_value=1e9), max_size=300), WIDTHS)
def test_sparkline_never_is_too_wide(values: list[float | None], width: int) -> None:
    assert cell_len(sparkline(values, width)) <= width


def test_sparkline_shape() -> None:
    assert sparkline([1, 2, 3, None, 8], 5, floor=0) == "▁▂▃ █"
    assert sparkline([5, 5], 5) == "▄▄"
    assert sparkline([], 5) == ""


@given(st.text(max_size=60), st.text(max_size=10), st.integers(min_value=30, max_value=100))
def test_two_sided_keeps_the_right_end(left: str, right: str, width: int) -> None:
    row = two_sided(Content(harmless(left)), Content(harmless(right)), width)
    assert row.cell_length <= width
    assert row.plain.endswith(harmless(right))


def test_used_of_says_the_unit_once() -> None:
    assert used_of(9 * 1024**3, 24 * 1024**3) == "9.00/24.0 GiB"
    assert used_of(900 * 1024**2, 24 * 1024**3) == "900 MiB/24.0 GiB"
    assert used_of(None, None) == "n/a/n/a"


@given(st.text(), st.integers(2, 60))
@example("\u06e7", 2)
@example("a\u0301\u0301 " + 40 * "\u4e2d\u0301", 7)
def test_wrapped_rows_fit_and_lose_nothing(text: str, width: int) -> None:
    shown = harmless(text)
    rows = wrapped(shown, width)
    assert all(cell_len(row) <= width for row in rows)
    assert "".join(rows).replace(" ", "") == shown.replace(" ", "")


def test_spaces_at_a_break_are_in_no_row() -> None:
    assert wrapped("0123456789 ", 10) == ["0123456789"]
    assert wrapped("0123456789   abc", 10) == ["0123456789", "abc"]
    assert wrapped("  a b", 10) == ["  a b"] and wrapped("", 10) == [""]


def test_wrapped_rows_are_indented() -> None:
    assert wrapped("one two three", 9, "  ") == ["  one two", "  three"]


@given(st.text(), st.integers(min_value=1, max_value=120))
def test_rows_of_styled_text_are_those_of_the_text_with_its_styles(text: str, width: int) -> None:
    shown = harmless(text)
    half = len(shown) // 2
    content = Content.assemble((shown[:half], "bold"), shown[half:])
    rows = wrapped_rows(content, width)
    assert [row.plain for row in rows] == wrapped(shown, width)
    bold = "".join(row.plain[begin:end] for row in rows for begin, end, _ in row.spans)
    assert bold.replace(" ", "") == shown[:half].replace(" ", "")


def test_rows_of_styled_text() -> None:
    content = Content.assemble(("fix: ", "bold"), "lower the batch\nor not")
    told = [(row.plain, row.spans) for row in wrapped_rows(content, 10)]
    assert told == [("fix: lower", ((0, 5, "bold"),)), ("the batch", ()), ("or not", ())]
