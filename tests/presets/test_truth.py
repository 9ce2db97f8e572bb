"""Switches among the raw keys, in every spelling: as pydantic reads them, by itself and by every rule."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets.truth import asks, is_false, is_off, is_true, truth
from tests.presets.rule_cases import CASES, refused_by, with_model

TRUE = ("true", "t", "yes", "y", "on", "1")
FALSE = ("false", "f", "no", "n", "off", "0")
NEITHER = ("", "auto", "none", "null", "2", "-1", "0.0", "1.0", "tru", "ye", "oui", "\uff54rue")
OTHERS: tuple[Any, ...] = (True, False, 0, 1, 0.0, 1.0, 2, -1, 0.5, None, [], {}, [True], {"enabled": True})


def cases(word: str) -> set[str]:
    """A word with each of its letters small and large."""
    return {"".join(letters) for letters in product(*((letter.lower(), letter.upper()) for letter in word))}


def test_a_switch_is_read_as_pydantic_does() -> None:
    pydantic = pytest.importorskip("pydantic")
    reader = pydantic.TypeAdapter(bool)
    words = {one for word in (*TRUE, *FALSE, *NEITHER) for one in cases(word)}
    for value in (*sorted(words), *OTHERS):
        try:
            read = reader.validate_python(value)
        except pydantic.ValidationError:
            read = None
        assert truth(value) is read, value
        assert (is_true(value), is_false(value)) == (read is True, read is False)
        assert is_off(value) == (read is False or value in (None, "auto"))


@pytest.mark.parametrize(
    ("value", "does"),
    [({}, False), ([], False), ({"a": 0}, True), ([0], True), ("z1", True), (4, True), ("No", False)],
)
def test_a_table_or_a_list_asks_by_what_is_in_it(value: object, does: bool) -> None:
    assert asks(value) is does


def spelled(raw: Any, true: object, false: object) -> Any:
    """Raw keys with other values in their switches."""
    if isinstance(raw, dict):
        return {key: spelled(value, true, false) for key, value in raw.items()}
    return (true if raw else false) if isinstance(raw, bool) else raw


@pytest.mark.parametrize("name", [name for name, (bad, _) in CASES.items() if "deepspeed" in bad])
@pytest.mark.parametrize(("true", "false"), [("Yes", "No"), ("t", "f"), ("ON", "OFF"), ("True", "False")])
def test_a_rule_reads_switches_in_any_spelling(name: str, true: str, false: str, tmp_path: Path) -> None:
    bad = {**with_model(CASES[name][0], tmp_path)}
    raw = bad.pop("deepspeed")
    for plain in (raw, spelled(raw, False, True)):
        odd = spelled(plain, true, false)
        assert refused_by(**bad, deepspeed=odd) == refused_by(**bad, deepspeed=plain)
