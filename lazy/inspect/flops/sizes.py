"""Sizes as formulas of the input sizes, found from their values in several recordings.

Every size is known as a vector, its value in each recording ("probe"). The vectors of the symbols are known, and a new
vector is searched among the formulas that shapes are made of: products, sums, differences, quotients, and the lengths
of sliding windows.

Invariant: a formula that is found gives the right value in every probe, those that were kept for checking included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import TypeAlias

import sympy

Vector: TypeAlias = tuple[int, ...]
_STRIDES = (2, 3, 4, 5, 6, 7, 8, 16, 32)
_SHIFT = 16


class NoFormula(Exception):
    """A size that no formula of the kinds known here explains."""


class SizeFormulas:
    """Formulas by vector. Starts with the symbols; what is found is kept."""

    def __init__(self, symbols: dict[sympy.Symbol, Vector]) -> None:
        self._known: dict[Vector, sympy.Expr] = {}
        for symbol, vector in symbols.items():
            self._known.setdefault(vector, symbol)
        self._basis = tuple(self._known)

    def expression(
        self, vector: Vector, near: Iterable[Vector] = (), windows: Sequence[tuple[int, int, int]] = ()
    ) -> sympy.Expr:
        """The formula of a size. `near` are sizes that it may be made of (the operands'), `windows` (stride, extent,
        padding) of windows that slide. Raises NoFormula."""
        if len(set(vector)) == 1:
            return sympy.Integer(vector[0])
        found = self._known.get(vector)
        if found is None:
            candidates = dict.fromkeys([*near, *self._basis])
            varying = [v for v in candidates if len(set(v)) > 1 and v in self._known]
            found = self._search(vector, varying, windows)
            if found is None:
                raise NoFormula(f"a size that was {', '.join(map(str, vector))}")
            self._known[vector] = found
        return found

    def _search(
        self, vector: Vector, varying: list[Vector], windows: Sequence[tuple[int, int, int]]
    ) -> sympy.Expr | None:
        for search in (self._windows, self._products, self._affine, self._sums, self._quotients, self._floors):
            found = next(search(vector, varying, windows), None)
            if found is not None:
                return found
        return None

    def _windows(self, vector: Vector, varying: list[Vector], windows: Sequence[tuple[int, int, int]]) -> Iterator:
        for stride, extent, padding in windows:
            for one in varying:
                if all((v + padding - extent) // stride + 1 == w for v, w in zip(one, vector, strict=True)):
                    yield floor_div(self._known[one] + padding - extent, stride) + 1

    def _products(self, vector: Vector, varying: list[Vector], windows: object) -> Iterator[sympy.Expr]:
        """c * a, c * a * b, c * a * b * c'"""
        for count in (1, 2, 3):
            for chosen in combinations_with_replacement(varying[:8], count):
                values = [_product(v[i] for v in chosen) for i in range(len(vector))]
                factor = _constant(Fraction(w, v) if v else None for v, w in zip(values, vector, strict=True))
                if factor is not None:
                    product = sympy.Mul(*(self._known[v] for v in chosen))
                    yield sympy.Rational(factor.numerator, factor.denominator) * product

    def _affine(self, vector: Vector, varying: list[Vector], windows: object) -> Iterator[sympy.Expr]:
        """c * a + d"""
        for one in varying:
            place = next(i for i, v in enumerate(one) if v != one[0])
            slope = Fraction(vector[place] - vector[0], one[place] - one[0])
            start = vector[0] - slope * one[0]
            if all(slope * v + start == w for v, w in zip(one, vector, strict=True)):
                rational = sympy.Rational(slope.numerator, slope.denominator)
                yield rational * self._known[one] + sympy.Rational(start.numerator, start.denominator)

    def _sums(self, vector: Vector, varying: list[Vector], windows: object) -> Iterator[sympy.Expr]:
        """a + b + d, a - b + d, a * b + d, a * b + c"""
        for a, b in combinations_with_replacement(varying[:10], 2):
            x, y = self._known[a], self._known[b]
            for sign, text in ((1, x + y), (-1, x - y)):
                rest = _constant(Fraction(w - v - sign * u) for v, u, w in zip(a, b, vector, strict=True))
                if rest is not None:
                    yield text + int(rest)
            products = [v * u for v, u in zip(a, b, strict=True)]
            rest = _constant(Fraction(w - p) for p, w in zip(products, vector, strict=True))
            if rest is not None:
                yield x * y + int(rest)
            for third in varying[:10]:
                rest = _constant(Fraction(w - p - t) for p, t, w in zip(products, third, vector, strict=True))
                if rest is not None:
                    yield x * y + self._known[third] + int(rest)

    def _quotients(self, vector: Vector, varying: list[Vector], windows: object) -> Iterator[sympy.Expr]:
        """c * a / b, c * a * b / c'"""
        for count in (1, 2):
            for chosen in combinations_with_replacement(varying[:8], count):
                values = [_product(v[i] for v in chosen) for i in range(len(vector))]
                for under in varying[:8]:
                    ratios = (Fraction(w * u, v) if v else None for v, u, w in zip(values, under, vector, strict=True))
                    factor = _constant(ratios)
                    if factor is not None:
                        above = sympy.Mul(*(self._known[v] for v in chosen))
                        yield sympy.Rational(factor.numerator, factor.denominator) * above / self._known[under]

    def _floors(self, vector: Vector, varying: list[Vector], windows: object) -> Iterator[sympy.Expr]:
        """floor((a + d) / s) + c"""
        for one in varying:
            for stride in _STRIDES:
                for shift in sorted(range(-_SHIFT, _SHIFT + 1), key=abs):
                    rest = _constant(Fraction(w - (v + shift) // stride) for v, w in zip(one, vector, strict=True))
                    if rest is not None:
                        yield floor_div(self._known[one] + shift, stride) + int(rest)


def floor_div(expression: sympy.Expr, divisor: int) -> sympy.Expr:
    """floor(expression / divisor); the expression itself where nothing is divided."""
    return expression if divisor == 1 else sympy.floor(expression / divisor)


def _product(values: Iterable[int]) -> int:
    total = 1
    for value in values:
        total *= value
    return total


def _constant(values: Iterable[Fraction | None]) -> Fraction | None:
    """The one value that all of them are; None if there is none."""
    found: Fraction | None = None
    for value in values:
        if value is None or (found is not None and value != found):
            return None
        found = value
    return found
