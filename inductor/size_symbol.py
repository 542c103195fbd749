"""Tracked sizes in index expressions: a symbol for each, and the numbers that expressions of them are.

Invariant: a `SizeSymbol` stands for one tracked size and is printed as its marker; `sympify` makes one of every tracked
size, so that `axis * size` is an expression like any other.
"""

from __future__ import annotations

from functools import reduce
from operator import mul
from typing import Any, TypeAlias

import sympy
from sympy.core.sympify import converter
from torchlazy.prims.size_int import SizeInt

Expr: TypeAlias = sympy.Expr


class SizeSymbol(sympy.Symbol):
    """A tracked size in an index expression; its name is the marker that text has for it."""

    __slots__ = ("number",)
    number: SizeInt

    def __new__(cls, number: SizeInt) -> SizeSymbol:
        low = number.low
        facts = {"positive": True} if low is not None and low > 0 else {"nonnegative": True} if low == 0 else {}
        symbol = sympy.Symbol.__xnew__(cls, number.marker, integer=True, **facts)
        symbol.number = number
        return symbol

    def __reduce__(self) -> tuple[Any, ...]:
        return SizeSymbol, (self.number,)


converter[SizeInt] = SizeSymbol


def number_of(expr: Expr) -> int | None:
    """The number that an expression is, of tracked sizes too; None where it depends on an axis or on data."""
    if expr.is_Integer:
        return int(expr)
    if isinstance(expr, SizeSymbol):
        return expr.number
    if expr.is_Symbol or not (expr.is_Add or expr.is_Mul or expr.is_Pow):
        return None
    if expr.is_Pow:
        base = number_of(expr.args[0])
        return None if base is None or not expr.args[1].is_Integer else base ** int(expr.args[1])
    numbers = [number_of(arg) for arg in expr.args]
    if any(number is None for number in numbers):
        return None
    return sum(numbers) if expr.is_Add else reduce(mul, numbers)  # type: ignore[arg-type]
