"""The quick reader of presets says what Python's own says, or that it leaves the text to that."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets.plain_toml import plain_toml
from llmtop.presets.presetfiles import BUILT_IN

_PRESETS = sorted(BUILT_IN.glob("*/*.toml"))


def _typed(value: Any) -> Any:
    """With the types told: 1, 1.0 and true are equal else."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    return type(value).__name__, repr(value)


@pytest.mark.parametrize("path", _PRESETS, ids=lambda path: path.stem)
def test_presets_read_alike(path: Any) -> None:
    text = path.read_text(encoding="utf-8")
    found = plain_toml(text)
    assert found is None or _typed(found) == _typed(tomllib.loads(text))


def test_nearly_all_presets_are_plain() -> None:
    """Else the quick reader is worth nothing."""
    plain = [path for path in _PRESETS if plain_toml(path.read_text(encoding="utf-8")) is not None]
    assert len(plain) > 0.8 * len(_PRESETS)


@pytest.mark.parametrize(
    "text",
    [
        'a = "1" # and more',
        "a = 1\n[a]",
        "a = 1\na = 2",
        "[a.b]\n[a]",
        "[a]\nb = 1\n[a.b]",
        "[[a]]",
        "[a]x",
        "[",
        "a = [1]",
        "a = null",
        "a = 1_000",
        "a = 1979-05-27",
        'a = "\\t"',
        'a = "\x7f"',
        "a = 1\r",
        "# a\rb",
        "a = 12345678901234567890",
        "a = nan",
        "a = 01",
        "a.b = 1",
        '"a" = 1',
        "a=1",
        "a = ",
        " = 1",
        'a = """x"""',
        "a = 1, 2",
    ],
)
def test_what_is_more_than_plain_is_left_to_python(text: str) -> None:
    assert plain_toml(text) is None


_WORDS = st.sampled_from(
    ["a", "b", "a.b", "[a]", "[a.b]", "[b]", " = ", "=", "1", "-1", "0", "1.5", "1e3", "-0.0", ".5", "5."]
    + [
        "# ",
        "true",
        "false",
        "null",
        '"x"',
        '"',
        "'x'",
        "\\",
        "#",
        "\n",
        "\n",
        "\r\n",
        " ",
        "\t",
        "é",
        "\x00",
        "{}",
    ]
)


@given(st.lists(_WORDS, max_size=12).map("".join))
def test_any_text_reads_alike_or_is_left(text: str) -> None:
    found = plain_toml(text)
    if found is not None:
        assert _typed(found) == _typed(tomllib.loads(text))
