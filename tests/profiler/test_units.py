"""Units are written for people, read back what was written, and never invent a number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets.errors import UsageError
from llmtop.profiler import units

sizes = st.integers(min_value=0, max_value=2**58)


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
    assert units.parse_bytes(units.format_bytes(value)) == pytest.approx(value, rel=0.01)


@given(st.integers(min_value=0, max_value=2**62))
def test_a_plain_number_of_bytes_is_exact(value: int) -> None:
    assert units.parse_bytes(str(value)) == value


@given(sizes, sizes)
def test_larger_bytes_never_read_as_smaller(first: int, second: int) -> None:
    low, high = sorted((first, second))
    assert units.parse_bytes(units.format_bytes(low)) <= units.parse_bytes(units.format_bytes(high))


@given(sizes)
def test_bytes_never_show_more_than_four_digits(value: int) -> None:
    number = units.format_bytes(value).split()[0]
    assert len(number.replace(".", "")) <= 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("80GiB", 80 * 1024**3),
        ("80 g", 80 * 1024**3),
        ("80GB", 80 * 10**9),
        ("1.5KiB", 1536),
        ("2e8", 200_000_000),
        (" 512mib ", 512 * 1024**2),
    ],
)
def test_parse_bytes(text: str, value: int) -> None:
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "80 elephants", "-1GiB", "1..5G", "0x10"])
def test_a_bad_size_says_what_to_write(text: str) -> None:
    with pytest.raises(UsageError, match="not a size") as caught:
        units.parse_bytes(text, where="--limit")
    assert caught.value.what.startswith("--limit")
    assert "80GiB" in caught.value.fix


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
    assert units.parse_seconds(units.format_seconds(value)) == pytest.approx(value, rel=0.045)


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "h", "1h later"])
def test_a_bad_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a time"):
        units.parse_seconds(text)


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
    assert units.format_gib(1.5 * 1024**3, signed=True) == "+1.50"
    assert units.format_gib(None) == "n/a"


def test_one_is_not_many() -> None:
    assert [units.counted(n, "rank") for n in (0, 1, 2, 1000)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "1,000 ranks",
    ]
    assert units.counted(2, "process", "processes") == "2 processes"
