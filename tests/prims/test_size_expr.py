"""Size expressions: they equal their value everywhere, and their lower bounds hold."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from torchlazy.prims.size_expr import Poly, SizeExprs, Symbol, python_text

LOWS = {"a": 2, "b": 2, "c": 0}


def exprs(values: dict[str, int]) -> SizeExprs:
    return SizeExprs([Symbol(name, value, value, LOWS[name]) for name, value in values.items()])


def value_of(space: SizeExprs, poly: Poly, values: dict[str, int]) -> int:
    return int(eval(python_text(space.structure(poly)), dict(values)))


def random_poly(space: SizeExprs, rng: random.Random, values: dict[str, int], depth: int) -> tuple[Poly, int]:
    """An expression, and its value computed on ints beside it."""
    if depth == 0:
        if rng.random() < 0.4:
            number = rng.randint(-4, 6)
            return space.number(number), number
        name = rng.choice(list(values))
        return space.symbol(name), values[name]
    left, x = random_poly(space, rng, values, depth - 1)
    right, y = random_poly(space, rng, values, depth - 1)
    kind = rng.choice("+-*/%")
    if kind == "+":
        return space.add(left, right), x + y
    if kind == "-":
        return space.add(left, right, -1), x - y
    if kind == "*":
        return space.mul(left, right), x * y
    divisor = rng.choice((2, 3, 4, 16))
    number = space.number(divisor)
    return (space.floor_div(left, number), x // divisor) if kind == "/" else (space.mod(left, number), x % divisor)


def test_expressions_equal_their_value_and_are_no_less_than_their_bound() -> None:
    rng = random.Random(0)
    for _ in range(300):
        values = {"a": rng.randint(2, 40), "b": rng.randint(2, 40), "c": rng.randint(0, 9)}
        space = exprs(values)
        poly, expected = random_poly(space, rng, values, 4)
        assert poly.value == expected == value_of(space, poly, values)
        assert space.read(space.structure(poly)) is poly
        low = space.low(poly)
        if low is not None:
            for a, b, c in itertools.product((2, 3, 5, 16), (2, 7, 8), (0, 1, 6)):
                assert value_of(space, poly, {"a": a, "b": b, "c": c}) >= low


def test_equal_expressions_are_one_object() -> None:
    space = exprs({"a": 8, "b": 6, "c": 1})
    a, b, one = space.symbol("a"), space.symbol("b"), space.number(1)
    assert space.mul(space.add(a, one), b) is space.add(space.mul(a, b), b)
    assert space.floor_div(space.mul(a, b), b) is a
    assert space.mod(space.mul(a, space.number(768)), space.number(16)).constant == 0
    assert space.floor_div(space.add(space.mul(a, b), a), space.add(b, one)) is a
    two = space.number(-2)  # a is at least that much
    assert space.mod(two, a) is space.add(a, two) and space.floor_div(two, a).constant == -1


@pytest.mark.parametrize("structure", [(), ("-",), ("+", ("x",)), ("+", (1, "import os")), ("+", (1, ("**", 1, 2)))])
def test_text_is_made_of_structures_only(structure: Any) -> None:
    with pytest.raises(ValueError, match="size expression"):
        python_text(structure)


def test_division_by_zero_is_an_error() -> None:
    space = exprs({"a": 8, "b": 6, "c": 1})
    with pytest.raises(ZeroDivisionError):
        space.floor_div(space.symbol("a"), space.number(0))
