"""Numbers of an exported graph that depend on its symbolic sizes: small expressions, without SymPy.

Invariant: an expression is data. Evaluating it is exact integer arithmetic, but for "truediv", "sqrt", "rsqrt" and
"float", which compute what Python computes; the sizes may be torch's symbolic ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Number: TypeAlias = "int | float | SizeExpr"

OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "truediv": operator.truediv, "sqrt": torch.sym_sqrt, "rsqrt": lambda x: x**-0.5, "float": torch.sym_float,
}  # fmt: skip
"""What each operator of sizes computes."""

_INFIX = {"add": " + ", "sub": " - ", "mul": "*", "floordiv": "//", "truediv": "/"}


@dataclass(frozen=True, slots=True)
class SizeExpr:
    """`op` is "size" (a symbol, its name in `args`), "add", "sub", "mul", "floordiv", "truediv", "sqrt", "rsqrt" or
    "float"."""

    op: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        if self.op == "size":
            return str(self.args[0])
        if self.op not in _INFIX:
            return f"{self.op}({self.args[0]})"
        sides = [f"({a})" if isinstance(a, SizeExpr) and a.op in _INFIX else str(a) for a in self.args]
        if self.op in ("add", "sub"):  # products bind closer than sums
            sides = [str(a) if isinstance(a, SizeExpr) and a.op == "mul" else s for a, s in zip(self.args, sides)]
        return _INFIX[self.op].join(sides)

    __repr__ = __str__


def symbol(name: str) -> SizeExpr:
    """The symbolic size of that name."""
    return SizeExpr("size", (name,))


def add(a: Number, b: Number) -> Number:
    """a + b, folded where a side is a constant zero or both are constants."""
    if not isinstance(a, SizeExpr) and not isinstance(b, SizeExpr):
        return a + b
    if a == 0:
        return b
    if b == 0:
        return a
    if isinstance(b, int) and b < 0:
        return SizeExpr("sub", (a, -b))
    return SizeExpr("add", (a, b))


def mul(a: Number, b: Number) -> Number:
    """a * b, folded where a side is 0 or 1 or both are constants."""
    if not isinstance(a, SizeExpr) and not isinstance(b, SizeExpr):
        return a * b
    if a == 0 or b == 0:
        return 0
    if a == 1:
        return b
    if b == 1:
        return a
    return SizeExpr("mul", (a, b))


def floordiv(a: Number, b: int) -> Number:
    """a // b for a positive constant b."""
    if b == 1:
        return a
    return SizeExpr("floordiv", (a, b)) if isinstance(a, SizeExpr) else a // b


def evaluate(value: Any, sizes: Mapping[str, int]) -> Any:
    """The number that `value` stands for; numbers stand for themselves."""
    if not isinstance(value, SizeExpr):
        return value
    if value.op == "size":
        return sizes[value.args[0]]
    return OPERATORS[value.op](*(evaluate(a, sizes) for a in value.args))


def names_in(value: Any) -> frozenset[str]:
    """The symbolic sizes that `value` depends on."""
    if not isinstance(value, SizeExpr):
        return frozenset()
    if value.op == "size":
        return frozenset((value.args[0],))
    return frozenset().union(*(names_in(a) for a in value.args))


def solve(expr: Any, actual: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """The one unknown symbol of `expr` and the size that makes it `actual`; None where there is not exactly one.

    Inverts sums and products with constants; ValueError where no whole number fits.
    """
    unknown = names_in(expr) - set(sizes)
    if len(unknown) != 1 or not isinstance(expr, SizeExpr):
        return None
    if expr.op == "size":
        return expr.args[0], actual
    if expr.op not in ("add", "sub", "mul"):
        return None
    a, b = expr.args
    inner, other = (a, b) if names_in(a) & unknown else (b, a)
    if names_in(other) - set(sizes):
        return None
    known = evaluate(other, sizes)
    if expr.op == "add":
        return solve(inner, actual - known, sizes)
    if expr.op == "sub":
        return solve(inner, actual + known if inner is a else known - actual, sizes)
    if not known or actual % known:
        raise ValueError(f"{actual} is not {expr} for any whole {next(iter(unknown))}")
    return solve(inner, actual // known, sizes)


def linear(name: str, scale: int, offset: int) -> Number:
    """scale * name + offset."""
    return add(mul(scale, symbol(name)), offset)


__all__ = [
    "OPERATORS",
    "Number",
    "SizeExpr",
    "add",
    "evaluate",
    "floordiv",
    "linear",
    "mul",
    "names_in",
    "solve",
    "symbol",
]
