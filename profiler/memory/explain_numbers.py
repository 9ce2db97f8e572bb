"""Whole numbers that remember how they were made, so that the formulas themselves tell their terms.

A `Counted` is an int: the prediction's own code computes with it as with any other, and each operation also
keeps the result as a sum of products of named counts. What no operation can follow (bits, hashes) goes on as
a plain number and appears as a constant; the sum of the terms is the value always.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

Number = int | float
_LONGEST = 160
"""Characters of a formula inside a factor; a longer one is given as its value."""


class Factor(Struct, frozen=True, kw_only=True):
    """One named count, or a division or rounding that is taken as a whole."""

    value: int
    words: str
    """What is counted; of a division the whole formula."""
    is_formula: bool = False
    is_count: bool = False
    """A number of blocks: what is added to or taken from it is one, too."""
    is_bytes: bool = False

    @property
    def text(self) -> str:
        if self.is_formula:
            return self.words
        return f"{self.value:,} {self.words}".rstrip()


class Term(Struct, frozen=True, kw_only=True):
    """A product of a whole number and factors."""

    coefficient: int
    factors: tuple[Factor, ...] = ()
    rule: str = ""
    """The function that made it, as module.function; the innermost one."""
    label: str = ""
    """What it is, where its place tells more than the function."""

    @property
    def value(self) -> int:
        return self.coefficient * prod(factor.value for factor in self.factors)


class Counted(int):
    """A whole number and its terms."""

    terms: tuple[Term, ...]

    def __new__(cls, value: int, terms: tuple[Term, ...]) -> Counted:
        made = super().__new__(cls, value)
        made.terms = terms
        return made

    def __add__(self, other: Number, /) -> Any:
        return _sum(self, other, 1)

    def __radd__(self, other: Number, /) -> Any:
        return _sum(other, self, 1)

    def __sub__(self, other: Number, /) -> Any:
        return _sum(self, other, -1)

    def __rsub__(self, other: Number, /) -> Any:
        return _sum(other, self, -1)

    def __neg__(self) -> Counted:
        return (
            _count(-int(self)) if self and _is_count(self) else Counted(-int(self), _scaled(self.terms, -1))
        )

    def __mul__(self, other: Number, /) -> Any:
        return _product(self, other)

    def __rmul__(self, other: Number, /) -> Any:
        return _product(other, self)

    def __pow__(self, power: int, modulo: int | None = None, /) -> Any:
        return _product(self, self) if power == 2 and modulo is None else pow(int(self), power, modulo)

    def __floordiv__(self, other: int, /) -> Counted:
        return _quotient(self, other)

    def __rfloordiv__(self, other: int, /) -> Counted:
        return _quotient(other, self)

    def __truediv__(self, other: Number, /) -> Any:
        return Fraction(int(self) / _plain(other), f"{words(self)} / {words(other)}", _rule())

    def __round__(self, digits: Any = None, /) -> Counted:
        return self


class Fraction(float):
    """A number on its way to be rounded, with its formula in words."""

    formula: str
    rule: str

    def __new__(cls, value: float, formula: str, rule: str) -> Fraction:
        made = super().__new__(cls, value)
        made.formula = formula if len(formula) <= _LONGEST else f"{value:,.0f}"
        made.rule = rule
        return made

    def __add__(self, other: Number, /) -> Fraction:
        return _fraction_sum(self, "+", other)

    def __radd__(self, other: Number, /) -> Fraction:
        return _fraction_sum(other, "+", self)

    def __sub__(self, other: Number, /) -> Fraction:
        return _fraction_sum(self, "-", other)

    def __rsub__(self, other: Number, /) -> Fraction:
        return _fraction_sum(other, "-", self)

    def __mul__(self, other: Number, /) -> Fraction:
        return _fraction_product(self, other)

    def __rmul__(self, other: Number, /) -> Fraction:
        return _fraction_product(other, self)

    def __round__(self, digits: Any = None, /) -> Any:
        if digits is not None:
            return round(float(self), digits)
        return _whole(round(float(self)), f"round({self.formula})", self.rule)

    def __ceil__(self) -> Counted:
        value = -int(-float(self) // 1)
        return _whole(value, f"ceil({self.formula})", self.rule)


def named(value: int, words: str, *, is_count: bool = False, is_bytes: bool = False) -> Counted:
    """A count by its name."""
    factor = Factor(value=int(value), words=words, is_count=is_count, is_bytes=is_bytes)
    return Counted(int(value), (Term(coefficient=1, factors=(factor,)),) if value else ())


def labelled(value: int, label: str, rule: str) -> Counted:
    """The same number as a part of what `label` says; `rule` is for what has none."""
    terms = terms_of(value, rule)
    return Counted(
        int(value), tuple(replace(term, label=label, rule=_specific(term.rule, rule)) for term in terms)
    )


def _specific(own: str, given: str) -> str:
    return own or given


def terms_of(value: int, rule: str = "") -> tuple[Term, ...]:
    """The terms of any number; a plain one is its only term."""
    if isinstance(value, Counted):
        return value.terms
    return (Term(coefficient=int(value), rule=rule),) if value else ()


def words(value: Number) -> str:
    """A number as a formula of its terms, or as itself where that is long."""
    if isinstance(value, Fraction):
        return value.formula
    if isinstance(value, Counted) and value.terms:
        formula = " + ".join(term_words(term) for term in value.terms).replace("+ -", "- ")
        return formula if len(formula) <= _LONGEST else f"{int(value):,}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"


def term_words(term: Term, unit: str = "") -> str:
    """`617,907,200 weights x 4 B`; the coefficient has the unit where no factor has it."""
    shown = [factor for factor in term.factors if factor.value != 1]
    parts = [factor.text for factor in shown if not factor.is_bytes]
    sizes = [factor.text for factor in shown if factor.is_bytes]
    coefficient = abs(term.coefficient)
    if unit and not sizes and coefficient == 1 and len(shown) == 1 and shown[0].is_formula:
        parts = [shown[0].text + unit]
    elif coefficient != 1 or not shown or (unit and not sizes):
        parts.append(f"{coefficient:,}{unit if not sizes else ''}")
    return ("-" if term.coefficient < 0 else "") + " x ".join([*parts, *sizes])


def _grouped(value: Number) -> str:
    text = words(value)
    return f"({text})" if " + " in text or " - " in text else text


def _plain(value: Number) -> float:
    return int(value) if isinstance(value, int) else float(value)


def _rule() -> str:
    """The function outside this module that is computing."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals["__name__"] == __name__ or frame.f_code.co_name.startswith("<")
    ):
        frame = frame.f_back
    return f"{frame.f_globals['__name__'].rpartition('.')[2]}.{frame.f_code.co_name}"


def _scaled(terms: tuple[Term, ...], by: int) -> tuple[Term, ...]:
    return tuple(replace(term, coefficient=term.coefficient * by) for term in terms) if by else ()


def _is_count(value: Number) -> bool:
    """Whether it is a number of blocks, or a plain number that may be added to one."""
    if not isinstance(value, Counted):
        return isinstance(value, int)
    return all(len(term.factors) == 1 and term.factors[0].is_count for term in value.terms)


def _count(value: int) -> Counted:
    return named(value, "block" if value == 1 else "blocks", is_count=True)


def _sum(left: Number, right: Number, sign: int) -> Any:
    if isinstance(left, float) or isinstance(right, float):
        return _fraction_sum(left, "+" if sign > 0 else "-", right)
    total = int(left) + sign * int(right)
    if left and right and _is_count(left) and _is_count(right):
        return _count(total)
    if not right and isinstance(left, Counted):
        return left
    if not left and sign > 0 and isinstance(right, Counted):
        return right
    rule = _rule()
    found: dict[tuple[object, ...], Term] = {}
    for place, term in enumerate((*terms_of(left), *_scaled(terms_of(right), sign))):
        own = term if term.rule else replace(term, rule=rule)
        # Constants of one formula are different things, and stay apart.
        key = (own.factors, own.rule, own.label, place if not own.factors else -1)
        before = found.get(key)
        if before is not None:
            own = replace(own, coefficient=own.coefficient + before.coefficient)
        found[key] = own
    return Counted(total, tuple(term for term in found.values() if term.coefficient))


def _fraction_sum(left: Number, sign: str, right: Number) -> Fraction:
    total = _plain(left) + _plain(right) if sign == "+" else _plain(left) - _plain(right)
    parts = [words(left)] if left else []
    parts += [f"{sign} {words(right)}" if parts or sign == "-" else words(right)] if right else []
    return Fraction(total, " ".join(parts) or "0", _rule())


def _fraction_product(left: Number, right: Number) -> Fraction:
    value = _plain(left) * _plain(right)
    factors = [number for number in (left, right) if number != 1]
    parts = [words(factors[0])] if len(factors) == 1 else [_grouped(factor) for factor in factors]
    return Fraction(value, (" x ".join(parts) or "1") if value else "0", _rule())


def _product(left: Number, right: Number) -> Any:
    if isinstance(left, float) or isinstance(right, float):
        return _fraction_product(left, right)
    rule = _rule()
    terms = tuple(
        Term(
            coefficient=one.coefficient * other.coefficient,
            factors=tuple(sorted((*one.factors, *other.factors), key=_order)),
            rule=one.rule or other.rule or rule,
            label=one.label or other.label,
        )
        for one in terms_of(left)
        for other in terms_of(right)
    )
    return Counted(int(left) * int(right), terms)


def _order(factor: Factor) -> tuple[bool, int, str]:
    """Large counts first, so that equal products look alike."""
    return factor.is_bytes, -factor.value, factor.words


def _quotient(left: int, right: int) -> Counted:
    value, rule = int(left) // int(right), _rule()
    if right == 1:
        return Counted(int(left), terms_of(left, rule))
    if _is_count(left) and _is_count(right):
        return _count(value)
    # -(-a // b) is the division of a that is rounded up.
    up = left < 0
    size = abs(value)
    over = words(right)
    over = f"({over})" if " x " in over else over
    formula = f"{_grouped(abs_of(left))} / {over}"
    if left % right:
        formula = f"{'ceil' if up else 'floor'}({formula})"
    return -_whole(size, formula, rule) if up else _whole(size, formula, rule)


def abs_of(value: int) -> int:
    """A negative number turned around with its terms."""
    return -value if value < 0 else value


def _whole(value: int, formula: str, rule: str) -> Counted:
    factor = Factor(value=value, words=formula, is_formula=True)
    return Counted(value, (Term(coefficient=1, factors=(factor,), rule=rule),) if value else ())
