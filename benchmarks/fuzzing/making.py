"""Bad input from a seed: values that no reader expects, of a known form and of none.

`Maker` is given a `random.Random`, so that a case is known by its number; Hypothesis can give it one too
(`st.randoms(use_true_random=False)`), and then shrinks what it draws.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e308", "-1e308", "5e-324", "-0.0", "0", "-1", "1"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616"),
    *("2147483648", "4294967296", "1000000000000", "0.5", "1e18", "1" + "0" * 400, "1" * 5000, "007", "0x10"),
)
TEXTS = (
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\x1b[31mred",
        "\x1b]0;title\x07",
        "\x9b2J",
        "\u202eevil",
        "\u2028",
        "\ufeff",
        "é",
    ),
    *(
        "none",
        "null",
        "auto",
        "true",
        "True",
        "nan",
        "inf",
        "1e5",
        "-1",
        "cpu",
        "../../etc/passwd",
        "/dev/zero",
    ),
    *(
        "~",
        "~nobody-of-this-name",
        ".",
        "/",
        "$(id)",
        "`id`",
        "; rm -rf x",
        "'",
        '"',
        "\\",
        "%s%n",
        "{0}",
        "%",
    ),
    *(
        "💥" * 40,
        "x" * 5000,
        "a/" * 400,
        "[bold]x[/bold]",
        "[/]",
        "a\nb\rc\td",
        "rank0",
        "rank" + "9" * 5000,
        "rank" + "9" * 15,
        "0-99999999999",
        "3-1,2",
        "rank-1",
        "2026-13-45",
    ),
)
_BAD_STRINGS = ('"\\ud800"', '"\\udc00\\ud800"', '"\\x"', '"unclosed')
_WORDS = 16


class Verbatim(str):
    """Goes into a text of JSON as it is."""


class Pairs(list[tuple[str, Any]]):
    """An object that may have a key twice."""


class Maker:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    # --- values ---------------------------------------------------------------------------------

    def scalar(self) -> Any:
        kind = self.draw.randrange(6)
        if kind == 0:
            return Verbatim(self.draw.choice(NUMBERS))
        if kind == 1:
            return self.draw.choice(TEXTS)
        if kind == 2:
            return Verbatim(self.draw.choice(("null", "true", "false", "[]", "{}", *_BAD_STRINGS)))
        if kind == 3:
            return self.draw.randint(-5, 300)
        if kind == 4:
            return self.draw.uniform(-1e6, 1e6)
        return "".join(chr(self.draw.randrange(0x20, 0x3000)) for _ in range(self.draw.randrange(_WORDS)))

    def anything(self, depth: int = 3) -> Any:
        kind = self.draw.randrange(5) if depth else 0
        if kind == 3:
            return [self.anything(depth - 1) for _ in range(self.draw.randrange(4))]
        if kind == 4:
            return Pairs((self.key(), self.anything(depth - 1)) for _ in range(self.draw.randrange(4)))
        return self.scalar()

    def key(self) -> str:
        return self.draw.choice(TEXTS) if self.chance(0.3) else f"k{self.draw.randrange(5)}"

    # --- values of a known form --------------------------------------------------------------------

    def of(self, kind: inspect.Type | Any, depth: int = 6) -> Any:
        """A value that is of the type, and as far out as that allows."""
        found = kind if isinstance(kind, inspect.Type) else _type_info(kind)
        match found:
            case inspect.StructType():
                return self._struct(found, depth)
            case inspect.UnionType():
                nothing = [arm for arm in found.types if isinstance(arm, inspect.NoneType)]
                return self.of(self.draw.choice(nothing if nothing and depth <= 0 else found.types), depth)
            case inspect.VarTupleType() | inspect.ListType() | inspect.SetType():
                return [self.of(found.item_type, depth - 1) for _ in range(self._count(depth))]
            case inspect.TupleType():
                return [self.of(item, depth - 1) for item in found.item_types]
            case inspect.DictType():
                return Pairs(
                    (str(self.of(found.key_type, depth - 1)), self.of(found.value_type, depth - 1))
                    for _ in range(self._count(depth))
                )
        return self._plain(found)

    def _plain(self, kind: inspect.Type) -> Any:
        match kind:
            case inspect.LiteralType():
                return self.draw.choice(kind.values)
            case inspect.EnumType():
                return self.draw.choice(list(kind.cls)).value
            case inspect.BoolType():
                return self.chance(0.5)
            case inspect.IntType():
                return self._whole(kind)
            case inspect.FloatType():
                return self._number(kind)
            case inspect.StrType():
                if kind.pattern is not None and self.chance(0.8):
                    return "9.0"  # the only form that a text has to have: a compute capability
                return self.draw.choice(TEXTS) if self.chance(0.5) else f"w{self.draw.randrange(9)}"
            case inspect.NoneType():
                return None
        return self.anything(1)

    def _struct(self, kind: inspect.StructType, depth: int) -> Any:
        fields = [
            (field.encode_name, self.of(field.type, depth - 1))
            for field in kind.fields
            if field.required or (depth > 0 and self.chance(0.6))
        ]
        if kind.array_like:
            return [value for _, value in fields]
        if kind.tag_field is not None:
            fields.insert(0, (kind.tag_field, kind.tag))
        return Pairs(fields)

    def _whole(self, kind: inspect.IntType) -> int:
        low = kind.ge if kind.ge is not None else -1
        far = (0, 1, 2, 3, 7, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, -1, -(1 << 63))
        value = self.draw.choice(far) if self.chance(0.4) else self.draw.randrange(0, 100)
        return int(value if kind.ge is None and kind.gt is None else max(value, low, kind.gt or 0))

    def _number(self, kind: inspect.FloatType) -> float:
        far = (0.0, -0.0, 1e-320, 1e-9, 1.0, 1e9, 1e18, 1e300, -1.0, -1e300, 1.7e9, 253402300800.0)
        value = self.draw.choice(far) if self.chance(0.4) else self.draw.uniform(0, 100)
        return value if kind.ge is None and kind.gt is None else abs(value) or 1e-3

    def _count(self, depth: int) -> int:
        return self.draw.choice((0, 1, 1, 2, 3)) if depth > 0 else 0

    # --- spoilt documents --------------------------------------------------------------------------

    def spoilt(self, value: Any) -> Any:
        """A JSON value with some of its parts changed."""
        tree = _with_pairs(value)
        for _ in range(self.draw.choice((1, 1, 1, 2, 3, 6))):
            self._spoil(tree)
        return tree

    def _spoil(self, tree: Any) -> None:
        places = _places(tree)
        if not places:
            return
        holder, at = self.draw.choice(places)
        act = self.draw.randrange(8)
        if act <= 2:
            self._put(holder, at, self.scalar())
        elif act == 3:
            self._put(holder, at, self.anything())
        elif act == 4:
            del holder[at]
        elif act == 5:
            holder.insert(self.draw.randrange(len(holder) + 1), holder[at])
        elif act == 6:
            other, place = self.draw.choice(places)
            if place < len(other):
                self._put(
                    holder, at, copy.deepcopy(_value(other, place))
                )  # never itself: no value is endless
        elif isinstance(holder, Pairs):
            holder[at] = (self.key(), holder[at][1])
        else:
            self._put(holder, at, Verbatim("[" * 60 + "]" * 60))

    def _put(self, holder: Any, at: int, value: Any) -> None:
        holder[at] = (holder[at][0], value) if isinstance(holder, Pairs) else value

    # --- texts and bytes --------------------------------------------------------------------------

    def json_of(self, value: Any) -> bytes:
        """The text of a value, now and then torn, nested, in another encoding or with other bytes."""
        text = dumped(value)
        if self.chance(0.02):
            depth = self.draw.choice((100, 1000, 20_000))
            text = "[" * depth + text + "]" * self.draw.choice((0, depth))
        content = text.encode("utf-8", "surrogatepass")
        return self.bytes_of(content) if self.chance(0.2) else content

    def bytes_of(self, content: bytes) -> bytes:
        act = self.draw.randrange(7)
        if act == 0:
            return content[: self.draw.randrange(len(content) + 1)]
        if act == 1:
            return content.decode("utf-8", "replace").encode(
                self.draw.choice(("utf-16", "utf-32", "utf-8-sig"))
            )
        if act == 2:
            return b""
        changed = bytearray(content)
        for _ in range(self.draw.choice((1, 1, 2, 8))):
            at = self.draw.randrange(len(changed) + 1)
            if act == 3:
                changed[at:at] = self.draw.randbytes(self.draw.randrange(1, 9))
            elif act == 4:
                del changed[at : at + self.draw.randrange(1, 20)]
            elif at < len(changed):
                changed[at] = (
                    self.draw.randrange(256) if act == 5 else changed[at] ^ (1 << self.draw.randrange(8))
                )
        return bytes(changed)

    def toml_of(self, values: Sequence[tuple[str, str]]) -> bytes:
        """Lines `key = value`, some of them spoilt."""
        lines = list(values)
        for _ in range(self.draw.choice((1, 1, 2, 4))):
            act, at = self.draw.randrange(5), self.draw.randrange(len(lines) + 1)
            if act <= 1 and at < len(lines):
                lines[at] = (lines[at][0], self.toml_value())
            elif act == 2:
                lines.insert(at, (self.draw.choice(TEXTS).replace("\n", ""), self.toml_value()))
            elif act == 3 and at < len(lines):
                del lines[at]
            elif lines:
                lines.insert(at, (self.draw.choice(lines)[0], self.toml_value()))
        text = "\n".join(f"{key} = {value}" if value else key for key, value in lines) + "\n"
        content = text.encode("utf-8", "surrogatepass")
        return self.bytes_of(content) if self.chance(0.15) else content

    def toml_value(self) -> str:
        kind = self.draw.randrange(6)
        if kind == 0:
            return self.draw.choice(
                (*NUMBERS, "nan", "inf", "-inf", "1_0", "2026-01-01", "07:32:00", "0o7", "1.e5")
            )
        if kind == 1:
            return json.dumps(self.draw.choice(TEXTS))
        if kind == 2:
            return "[" * self.draw.choice((1, 2, 40, 3000)) + "]" * self.draw.choice((1, 2, 40, 3000))
        if kind == 3:
            return "{ " + ", ".join(f"k{n} = {n}" for n in range(self.draw.randrange(4))) + " }"
        if kind == 4:
            return str(self.draw.randint(-3, 1 << 20))
        return self.draw.choice(("true", "false", '"auto"', '"none"', '"cpu"', "''", '"""a"""', "tru", "= 3"))


@cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def dumped(value: Any) -> str:
    """As JSON, but for what is verbatim."""
    if isinstance(value, Verbatim):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(item)}" for key, item in value) + "}"
    if isinstance(value, dict):
        return dumped(Pairs(value.items()))
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(dumped, value)) + "]"
    return json.dumps(value)


def tree_of(value: object) -> Any:
    """A struct as the JSON value that it is written as."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _with_pairs(value: Any) -> Any:
    if isinstance(value, dict):
        return Pairs((key, _with_pairs(item)) for key, item in value.items())
    return [_with_pairs(item) for item in value] if isinstance(value, list) else value


def _places(tree: Any) -> list[tuple[Any, int]]:
    """Every holder of values, and where in it."""
    found: list[tuple[Any, int]] = []
    waiting = [tree]
    while waiting:
        holder = waiting.pop()
        if not isinstance(holder, list):
            continue
        for at in range(len(holder)):
            found.append((holder, at))
            waiting.append(_value(holder, at))
    return found


def _value(holder: Any, at: int) -> Any:
    return holder[at][1] if isinstance(holder, Pairs) else holder[at]
