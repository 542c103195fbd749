"""Arithmetic on numbers that differ between samples: an expression with its value in each sample.

Invariant: the values are what the expression gives at each sample's symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torchlazy.prims.size_expr import Poly, SizeExprs

Column: TypeAlias = "tuple[int, ...]"  # one number in each sample


@dataclass(frozen=True, slots=True)
class Num:
    """A number as an expression, and its values in the samples."""

    poly: Poly
    column: Column

    @property
    def moves(self) -> bool:
        """Whether it depends on the symbols, though it may be the same in all samples."""
        return self.poly.constant is None


def is_constant(column: Column) -> bool:
    """Whether it is the same number in all samples."""
    first = column[0]
    return all(value == first for value in column)


class Arithmetic:
    """Sums, products and floor divisions in one space of expressions."""

    def __init__(self, samples: int) -> None:
        self.exprs = SizeExprs(())
        self._samples = samples

    def constant(self, value: int) -> Num:
        """A number that is the same everywhere."""
        return Num(self.exprs.number(value), (value,) * self._samples)

    def add(self, a: Num, b: Num, factor: int = 1) -> Num:
        """a + factor * b"""
        column = tuple(x + factor * y for x, y in zip(a.column, b.column, strict=True))
        return Num(self.exprs.add(a.poly, b.poly, factor), column)

    def mul(self, a: Num, b: Num) -> Num:
        """a * b"""
        column = tuple(x * y for x, y in zip(a.column, b.column, strict=True))
        return Num(self.exprs.mul(a.poly, b.poly), column)

    def shift(self, a: Num, by: int) -> Num:
        """a + by"""
        return self.add(a, self.constant(by))

    def scale(self, a: Num, by: int) -> Num:
        """a * by"""
        return self.mul(a, self.constant(by))

    def floor(self, a: Num, by: int) -> Num:
        """a // by"""
        return Num(self.exprs.floor_div(a.poly, self.exprs.number(by)), tuple(x // by for x in a.column))

    def ceil_to(self, a: Num, by: int) -> Num:
        """The next multiple of `by`"""
        return self.scale(self.floor(self.shift(a, by - 1), by), by)

    def negative(self, a: Num) -> Num:
        """-a"""
        return self.scale(a, -1)

    def surely_at_least_zero(self, a: Num) -> bool:
        """Whether that is proved for all sizes."""
        low = self.exprs.low(a.poly)
        return low is not None and low >= 0
