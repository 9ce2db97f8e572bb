"""Units are written for people, say what was meant, and never invent a number."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.profiler import units

sizes = st.integers(min_value=0, max_value=2**58)
WORTH: dict[str, float] = {
    **{unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))},
    **{"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400},
}


def read_back(text: str) -> float:
    """What someone takes a written size or time for."""
    return sum(float(number) * WORTH[unit] for number, unit in re.findall(r"([\d.]+) ?([A-Za-z]+)", text))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (80 * 1024**3, "80.0 GiB"),
        (1023.9 * 1024**3, "1.00 TiB"),
        (-3 * 1024**2, "-3.00 MiB"),
        (None, "n/a"),
        (math.nan, "n/a"),
    ],
)
def test_bytes_are_binary_and_named(value: float | None, text: str) -> None:
    assert units.format_bytes(value) == text


@given(sizes)
def test_written_bytes_read_back_within_rounding(value: int) -> None:
    assert read_back(units.format_bytes(value)) == pytest.approx(value, rel=0.01)


@given(sizes, sizes)
def test_larger_bytes_never_read_as_smaller(first: int, second: int) -> None:
    low, high = sorted((first, second))
    assert read_back(units.format_bytes(low)) <= read_back(units.format_bytes(high))


@given(sizes)
def test_bytes_never_show_more_than_four_digits(value: int) -> None:
    number = units.format_bytes(value).split()[0]
    assert len(number.replace(".", "")) <= 4


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 us"),
        (0.0000123, "12 us"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (1.234, "1.23 s"),
        (59.96, "1m 00s"),
        (75, "1m 15s"),
        (3599.7, "1h 00m"),
        (7500, "2h 05m"),
        (273600, "3d 04h"),
        (-75, "-1m 15s"),
        (None, "n/a"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert units.format_seconds(value) == text


@given(st.floats(min_value=0.001, max_value=1e7))
def test_written_seconds_read_back_within_a_minute_in_the_hour(value: float) -> None:
    assert read_back(units.format_seconds(value)) == pytest.approx(value, rel=0.045)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8_030_261_248, "8.03B"),
        (134_515_008, "135M"),
        (512, "512"),
        (1234.5, "1.23K"),
        (7.25, "7.25"),
        (999_999, "1.00M"),
        (None, "n/a"),
    ],
)
def test_counts(value: float | None, text: str) -> None:
    assert units.format_count(value) == text


def test_rates_and_percentages() -> None:
    assert units.format_rate(323.7 * 1024**3) == "324 GiB/s"
    assert units.format_rate(None) == "n/a"
    assert units.format_tokens_rate(12_345) == "12.3K tok/s"
    assert units.format_tokens_rate(None) == "n/a"
    assert units.format_percent(12.34) == "12.3%"
    assert units.format_percent(0.0, signed=True) == "+0.0%"
    assert units.format_percent(-0.01, signed=True) == "+0.0%"
    assert units.format_percent(None) == "n/a"
    assert units.format_bytes(0, signed=True) == "+0 B"


@pytest.mark.parametrize(
    ("percent", "words"),
    [
        (-50.2, "-50%"),
        (-1.0, "-1%"),
        (-0.47, "-0.5%"),
        (-0.01, "0.0%"),
        (0.0, "0.0%"),
        (0.3, "+0.3%"),
        (7.0, "+7%"),
    ],
)
def test_a_small_fall_does_not_read_as_a_rise(percent: float, words: str) -> None:
    assert units.format_change(percent) == words


def test_one_is_not_many() -> None:
    assert [units.counted(n, "rank") for n in (0, 1, 2, 1000)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "1,000 ranks",
    ]
    assert units.counted(2, "process", "processes") == "2 processes"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (0.00012345, "0.000123"),
        (0.5, "0.5"),
        (99.95, "100"),
        (130.4, "130"),
        (-2345.6, "-2,350"),
        (999_499.0, "999,000"),
        (1.5e9, "1.5e+09"),
    ],
)
def test_three_figures_have_an_exponent_only_where_it_is_needed(value: float, words: str) -> None:
    assert units.figures(value) == words


def test_a_range_is_written_once_where_both_ends_are_alike() -> None:
    assert units.format_range("1.10 s", "1.30 s") == "1.10 s to 1.30 s"
    low, high = (units.format_bytes(size) for size in (38_500_000_000, 38_500_000_001))
    assert units.format_range(low, high) == "35.9 GiB"
