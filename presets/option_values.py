"""Checks, parses and merges the values of run options, whatever layer they come from.

Every problem is an error that names the file or option, the key, the value and the nearest valid one.
"""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from llmtop.presets.errors import UsageError, bad_value, unknown_key
from llmtop.presets.liger import check_kernels
from llmtop.presets.spec import RunOptions

MAX_INTEGER = 10**12
"""Above this a count is a slip of the hand, and products of counts would leave 64 bits."""
_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_PATHS = ("model", "nvme_path", "data", "tokenizer", "deepspeed_config")
_NOTHING = ("none", "null")
_THOUSANDS = r"(\d{1,6})\s*([kmKM])"
_LISTED = "llmtop plan --help lists the options; a key of DeepSpeed goes below deepspeed, as deepspeed.KEY"
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def field_types() -> Mapping[str, Any]:
    """Option name to its annotated type."""
    return RunOptions.__annotations__


def is_switch(key: str) -> bool:
    """Whether the option is true or false."""
    return field_types()[key] is bool


def defaults() -> dict[str, Any]:
    """What options are where nobody has said it; `deepspeed`, a table that each run has anew, left out."""
    values = RunOptions.__struct_defaults__
    found = dict(zip(RunOptions.__struct_fields__[-len(values) :], values, strict=True))
    del found["deepspeed"]
    return found


def check(key: str, value: Any, where: str, *, extra_keys: Iterable[str] = ()) -> Any:
    """The value as the option's type has it; raises UsageError for an unknown key or a wrong value."""
    wanted = field_types().get(key)
    if wanted is None:
        raise unknown_key(where, key, [*field_types(), *extra_keys], otherwise=_LISTED)
    if key == "deepspeed":
        return check_raw(value, where)
    if key == "liger_kernels" and isinstance(value, list) and all(isinstance(word, str) for word in value):
        # What TOML has for several words; kept as it is written on a command line.
        value = ",".join(value)
    try:
        converted = msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        fix = spelt_out(value) if _base_type(wanted)[0] is int else ""
        raise bad_value(where, key, value, expected(wanted), _choices(wanted), fix) from error
    too_big = type(converted) is int and converted > MAX_INTEGER
    if too_big or (isinstance(converted, float) and not math.isfinite(converted)):
        raise bad_value(where, key, value, f"{expected(wanted)}, within reason")
    if key in _PATHS and isinstance(converted, str) and not _can_be_path(converted):
        raise bad_value(where, key, value, "a path of names of at most 255 bytes, 4,095 in all")
    return check_kernels(converted, where) if key == "liger_kernels" else converted


def _can_be_path(text: str) -> bool:
    """Whether the system may be asked about it: of others it says nothing that can be shown."""
    path = os.fsencode(text)
    return b"\0" not in path and len(path) <= 4095 and all(len(name) <= 255 for name in path.split(b"/"))


def parse(key: str, text: str, where: str) -> Any:
    """The value that a text from a command line means for an option."""
    wanted = field_types().get(key)
    if wanted is None:
        raise unknown_key(where, key, field_types(), otherwise=_LISTED)
    base, optional = _base_type(wanted)
    if optional and text.lower() in _NOTHING:
        return None
    if base is bool:
        return check(key, _SWITCH.get(text.lower(), text), where)
    if base is int or base is float:
        return check(key, _number(text, whole=base is int), where)
    return check(key, text, where)


def expected(wanted: Any) -> str:
    """What an option takes, in words: `a whole number from 0 to 3`."""
    base, optional = _base_type(wanted)
    suffix = " or none" if optional else ""
    choices = _choices(wanted)
    if choices:
        return f"one of {', '.join(choices)}{suffix}"
    if base is int or base is float:
        return ("a whole number" if base is int else "a number") + _bounds(wanted) + suffix
    return {bool: "true or false", str: "a text"}.get(base, "a table") + suffix


def _bounds(wanted: Any) -> str:
    metas = [meta for arm in (wanted, *get_args(wanted)) for meta in getattr(arm, "__metadata__", ())]
    words = ""
    for meta in metas:
        low = meta.gt if meta.ge is None else meta.ge
        high = meta.lt if meta.le is None else meta.le
        if low is not None and high is not None:
            words = f" from {low} to {high}" if meta.lt is None else f" from {low} to below {high}"
        elif low is not None:
            words = f" of {low} or more" if meta.gt is None else f" above {low}"
    return words


def _base_type(wanted: Any) -> tuple[Any, bool]:
    """The plain type under Annotated and `| None`, and whether None is allowed."""
    optional = False
    if get_origin(wanted) in (Union, types.UnionType):
        arms = [arm for arm in get_args(wanted) if arm is not type(None)]
        optional, wanted = True, arms[0]
    if get_origin(wanted) is Annotated:
        wanted = get_args(wanted)[0]
    return wanted, optional


def _choices(wanted: Any) -> list[str]:
    base, _ = _base_type(wanted)
    return [str(choice) for choice in get_args(base)] if get_origin(base) is Literal else []


def _number(text: str, *, whole: bool) -> Any:
    """The number that a text spells, 2e8 being a whole one; the text itself when it spells none."""
    if text.isascii() and text.isdigit() and len(text) <= 30:  # most of them: no pattern need be compiled
        return int(text) if whole else float(text)
    if not re.fullmatch(_NUMBER, text) or len(text) > 30:
        return text
    value = float(text)
    if whole:
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        return int(value) if math.isfinite(value) and value.is_integer() else text
    return value


def spelt_out(value: Any) -> str:
    """What to write for 4k; empty for what is no such number."""
    match = re.fullmatch(_THOUSANDS, value) if isinstance(value, str) else None
    if match is None:
        return ""
    count, power = int(match.group(1)), 1 if match.group(2).lower() == "k" else 2
    return f"write it out: {count * 1024**power} or {count * 1000**power}"


def raw_value(text: str) -> Any:
    """The value that a text means as a raw DeepSpeed key: JSON where it is JSON, else the text itself."""
    if text != text.strip():
        return text
    import json  # seldom needed

    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "." not in text:
        # 2e8 counts elements: DeepSpeed's own examples write whole numbers so.
        return int(value)
    return value


def raw_text(value: Any) -> str:
    """The text that `raw_value` reads back as the value."""
    if isinstance(value, str) and raw_value(value) == value and type(raw_value(value)) is str:
        return value
    import json

    return json.dumps(value)


def _refuse_constant(word: str) -> Any:
    raise ValueError(word)


def check_raw(value: Any, where: str, path: str = "deepspeed", depth: int = 0) -> Any:
    """Raw DeepSpeed keys: a table of what JSON can hold."""
    if depth == 0 and not isinstance(value, dict):
        raise bad_value(where, path, value, "a table of DeepSpeed keys")
    if depth > 12:
        raise UsageError(f"{where}: {path[:80]} is nested too deeply for a DeepSpeed configuration")
    if isinstance(value, dict):
        strange = next((key for key in map(str, value) if not _is_text(key)), None)
        if strange is not None:
            raise bad_value(where, path, ascii(strange), "keys of whole characters")
        return {str(key): check_raw(item, where, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [check_raw(item, where, path, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise bad_value(where, path, value, "a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise bad_value(where, path, value, "a number of at most 64 bits")
    if isinstance(value, str) and not _is_text(value):
        raise bad_value(where, path, ascii(value), "a text of whole characters")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise bad_value(where, path, str(value), "a number, a text, true, false, a list or a table")


def _is_text(text: str) -> bool:
    """Whether it can be written: JSON can spell half of a pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def merge(weaker: dict[str, Any], stronger: dict[str, Any]) -> dict[str, Any]:
    """Both, the stronger winning key by key, tables merged to any depth."""
    merged = dict(weaker)
    for key, value in stronger.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged
