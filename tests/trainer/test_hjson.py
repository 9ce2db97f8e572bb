"""What is read of a text in JSON or Hjson, and that it is what DeepSpeed reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtop.presets.errors import UsageError
from llmtop.trainer.dsimport.parse import ParseError, parse
from tests.trainer.real_deepspeed import deepspeed_config_class

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)
HJSON_TEXTS = st.text(alphabet="{}[]:,'\"ab1.e-+ \n#/*\\tru", max_size=40)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, // one\n "b": 2, # two\n /* three */ "c": 3,}', {"a": 1, "b": 2, "c": 3}),
        ("{a: 1\n b: [1\n 2,]\n}", {"a": 1, "b": [1, 2]}),
        ("{'a': 'x', b: \"it's\"}", {"a": "x", "b": "it's"}),
        ("a: 1\nb: {c: 5e8}", {"a": 1, "b": {"c": 500000000}}),
        ("{a: 1e12, b: 1.5, c: -0.0}", {"a": 1e12, "b": 1.5, "c": 0}),
        ("{a: True,\n b: none of it, really\n}", {"a": "True,", "b": "none of it, really"}),
        ("{a: null, b: true, c: false}", {"a": None, "b": True, "c": False}),
        ("{\n  a:\n    '''\n    one\n      two\n    '''\n}", {"a": "one\n  two"}),
        ("{a: 123456789012345678901234567890}", {"a": 123456789012345678901234567890.0}),
        ("", {}),
    ],
)
def test_reads_hjson_and_says_that_it_is_not_json(text: str, value: object) -> None:
    parsed = parse(text)
    assert parsed.value == value
    assert parsed.not_strict


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1", "{a}", "{a: }", "{a: 1}}", "{a b: 1}", '{"a": "x', '{"a\n": 1}', "{: 1}"),
        *('{"a": "\\x"}', '{"a": "\\u12g4"}', "{a: 1, , b: 2}", '{"a" 1}', "{\na: '''x\n}"),
    ],
)
def test_refuses_with_a_place(text: str) -> None:
    with pytest.raises(ParseError, match=r"line \d+ column \d+"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/* x", "not closed"),
        ("{a: '''x}", "not closed"),
        ("{a: '''x'''}", "block begins in line 1"),
        ("[" * 5000, "nested too deeply"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ("{a: " * 5000, "nested too deeply"),
        ("{a: 1e999}", "1e999 is too large"),
        ("{a: '\\u-123'}", "not in range"),
        ("{a: x" + "," * 70_000 + "\n}", "up to 64 KiB"),
    ],
    ids=lambda text: text[:12],
)
def test_what_the_library_stumbles_over_is_refused_too(text: str, why: str) -> None:
    with pytest.raises(ParseError, match=why):
        parse(text)


@pytest.mark.parametrize("text", ['{"stage": 1,\n "x": {"stage": 2},\n "stage": 3}', "stage: 1\n\nstage: 3"])
def test_names_a_key_that_is_given_twice(text: str) -> None:
    with pytest.raises(ParseError, match="'stage' is given twice; it stands in line 1, .*line 3"):
        parse(text)


@pytest.mark.parametrize("text", ['{"a":' * 101 + "1" + "}" * 101, "{a: " * 101 + "1" + "}" * 101])
def test_nesting_that_parses_but_that_no_file_needs(text: str, read: Any) -> None:
    with pytest.raises(UsageError, match="nested too deeply"):
        read(text)


@pytest.mark.parametrize("comment", ["", "// Hjson\n"])
def test_lone_surrogates_are_replaced(comment: str, read: Any) -> None:
    imported = read(comment + '{"tensorboard": {"job_name": "\\ud83d\\ude00\\ud83d"}}')
    assert imported.raw == {"tensorboard": {"job_name": "😀\ufffd"}}


@given(JSON_VALUES.map(lambda value: {"root": value}))
def test_reads_every_json_document(value: dict[str, Any]) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
        assert parse(text).value == value
        assert parse(text).not_strict == ""


@pytest.fixture(scope="module")
def deepspeed_reads() -> Callable[[str], Any]:
    """How DeepSpeed reads a file, but for integers that fit no register."""
    deepspeed_config_class()
    import hjson
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    def whole(digits: str) -> float:
        return int(digits) if len(digits) < 19 else float(digits)

    return lambda text: hjson.loads(
        text, object_pairs_hook=dict_raise_error_on_duplicate_keys, parse_int=whole
    )


@given(text=HJSON_TEXTS)
def test_agrees_with_deepspeed_on_any_text(text: str, deepspeed_reads: Callable[[str], Any]) -> None:
    try:
        theirs = deepspeed_reads(text)
    except OverflowError:
        return  # a number beyond all bounds, which is refused by its key after parsing
    except (ValueError, IndexError):
        with pytest.raises(ParseError):
            parse(text)
    else:
        assert parse(text).value == theirs
