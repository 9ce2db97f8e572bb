"""The Hjson reader against its definition and against the reader that DeepSpeed uses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.trainer.dsimport.hjson import DuplicateKeyError, HjsonError, loads

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        ('{"a": 1, // one\n "b": 2, # two\n /* three */ "c": 3,}', {"a": 1, "b": 2, "c": 3}),
        ("{a: 1\n b: [1\n 2,]\n}", {"a": 1, "b": [1, 2]}),
        ("{'a': 'x', b: \"it's\"}", {"a": "x", "b": "it's"}),
        ("a: 1\nb: {c: 5e8}", {"a": 1, "b": {"c": 500000000}}),
        ("{a: 1e12, b: 1.5, c: -0.0, d: 1e999}", {"a": 1e12, "b": 1.5, "c": 0, "d": float("inf")}),
        ("{a: True,\n b: none of it, really\n}", {"a": "True,", "b": "none of it, really"}),
        ("{a: null, b: true, c: false}", {"a": None, "b": True, "c": False}),
        ('{a: "\\u00e9\\n\\ud83d\\ude00\\ud83d"}', {"a": "é\n😀\ufffd"}),
        ("{\n  a:\n    '''\n    one\n      two\n    '''\n}", {"a": "one\n  two"}),
        ("{a: '''x'''}", {"a": "x"}),
        ("{a: 123456789012345678901234567890}", {"a": 123456789012345678901234567890.0}),
        ("", {}),
    ],
)
def test_reads(text: str, value: object) -> None:
    assert loads(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1", "{a}", "{a: }", "{a: 1}}", "{a b: 1}", '{"a": "x', '{"a\n": 1}', "{: 1}", "{a: '''x}"),
        *('{"a": "\\x"}', '{"a": "\\u12g4"}', "/* x", "{a: 1, , b: 2}", "[" * 500, "{a: " * 500, '{"a" 1}'),
    ],
)
def test_refuses_with_a_place(text: str) -> None:
    with pytest.raises(HjsonError, match=r"line \d+ column \d+"):
        loads(text)


def test_names_a_key_that_is_given_twice() -> None:
    with pytest.raises(DuplicateKeyError, match="line 2 column 2.*'stage' is given twice") as caught:
        loads('{"stage": 1,\n "stage": 2}')
    assert caught.value.key == "stage"


@given(JSON_VALUES.map(lambda value: {"root": value}))
def test_reads_every_json_document(value: dict[str, Any]) -> None:
    assert loads(json.dumps(value)) == value
    assert loads(json.dumps(value, ensure_ascii=False, indent=2)) == value


@given(st.text(alphabet="{}[]:,'\"ab1.e-+ \n#/*\\tru", max_size=40))
def test_agrees_with_deepspeed_on_any_text_that_both_read(text: str) -> None:
    hjson = pytest.importorskip("hjson")
    try:
        mine = loads(text)
    except HjsonError:
        return
    try:
        theirs = hjson.loads(text)
    except (ValueError, IndexError):
        return  # DeepSpeed is allowed to be stricter; its own refusal is told when the run starts
    if isinstance(theirs, dict) and isinstance(mine, dict):
        assert mine == json.loads(json.dumps(theirs))
