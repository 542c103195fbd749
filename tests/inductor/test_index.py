"""Index algebra: every simplification is checked against brute force over all points."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
import sympy
import torch
from torchlazy.inductor.index import (
    ZERO,
    FloorDiv,
    Mod,
    axis,
    axis_index,
    bounds,
    dot,
    evaluate,
    flatten,
    reshape_groups,
    reshape_index,
    reshape_strides,
    simplify,
    stride_of,
    strides_of,
    substitute,
    unflatten,
)

A, B, C = axis("i", 5), axis("j", 6), axis("k", 4)


def points(*symbols):
    for values in itertools.product(*(range(s.size) for s in symbols)):
        yield dict(zip(symbols, values))


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (FloorDiv(6 * A + B, 6), A),
        (Mod(6 * A + B, 6), B),
        (FloorDiv(12 * A + 2 * B, 12), A),
        (FloorDiv(6 * A + B, 12), FloorDiv(A, 2)),
        (Mod(6 * A + B, 12), 6 * Mod(A, 2) + B),
        (FloorDiv(FloorDiv(A, 2), 3), FloorDiv(A, 6)),
        (Mod(Mod(24 * A, 7), 7), Mod(24 * A, 7)),
        (FloorDiv(B, 6), ZERO),
        (FloorDiv(6 * A + B + 13, 6), A + 2 + FloorDiv(B + 1, 6)),
        (FloorDiv(24 * A + 4 * B + C, 4), 6 * A + B),
        (Mod(24 * A + 4 * B + C, 24), 4 * B + C),
    ],
)
def test_simplifications(expr, expected):
    assert expr == expected


def test_random_expressions_keep_their_value():
    generator = random.Random(0)
    for _ in range(300):
        coefficients = [generator.choice([-12, -3, -1, 0, 1, 2, 3, 6, 12, 24]) for _ in range(3)]
        constant = -sum(min(c, 0) * (s.size - 1) for c, s in zip(coefficients, (A, B, C))) + generator.randrange(20)
        a = sum((c * s for c, s in zip(coefficients, (A, B, C))), sympy.Integer(constant))
        d, e = generator.choice([2, 3, 4, 6, 12]), generator.choice([2, 3, 4])
        for expr, reference in (
            (FloorDiv(a, d), lambda v, d, e: v // d),
            (Mod(a, d), lambda v, d, e: v % d),
            (Mod(FloorDiv(a, d), e), lambda v, d, e: v // d % e),
            (FloorDiv(Mod(a, d * e), d), lambda v, d, e: v % (d * e) // d),
        ):
            low, high = bounds(sympy.sympify(expr))
            for point in points(A, B, C):
                value = evaluate(sympy.sympify(expr), point)
                assert value == reference(evaluate(sympy.sympify(a), point), d, e), (expr, a, point)
                assert (low is None or low <= value) and (high is None or value <= high)


def test_division_never_sees_a_negative_operand():
    for expr in (FloorDiv(15 - A, 4), Mod(17 - B - A, 4), FloorDiv(23 - 6 * C + B, 6)):
        for division in expr.atoms(FloorDiv, Mod):
            assert all(evaluate(division.args[0], p) >= 0 for p in points(A, B, C))


@pytest.mark.parametrize("sizes", [(7,), (2, 3, 4), (1, 5, 1, 2), (4, 1), ()])
def test_flatten_undoes_unflatten(sizes):
    flat = axis("p", int(torch.tensor(sizes).prod()) if sizes else 1)
    assert flatten(unflatten(flat, sizes), sizes) == flat or sizes == ()
    index = axis_index("i", sizes)
    assert unflatten(flatten(index, sizes), sizes) == index


def test_recombine_partial_runs():
    flat = axis("p", 120)
    a, b, c = unflatten(flat, (4, 5, 6))
    assert dot((b, c), (6, 1)) == Mod(flat, 30)
    assert dot((a, b), (5, 1)) == FloorDiv(flat, 6)
    assert dot((a, b, c), (60, 12, 2), 7) == 2 * flat + 7


def test_reshape_groups_are_finest():
    assert reshape_groups((6, 4, 5), (2, 3, 20)) == ((range(1), range(2)), (range(1, 3), range(2, 3)))
    assert reshape_groups((8, 16, 12, 64), (8, 16, 768))[-1] == (range(2, 4), range(2, 3))


@pytest.mark.parametrize(
    ("shape", "source"),
    [((6, 4, 5), (2, 3, 20)), ((120,), (4, 5, 6)), ((4, 30), (8, 15)), ((1, 6, 1), (2, 3)), ((), (1, 1)), ((1,), ())],
)
def test_reshape_index_is_torch_reshape(shape, source):
    x = torch.arange(int(torch.Size(source).numel())).reshape(source)
    index = axis_index("i", shape)
    mapped = reshape_index(index, shape, source)
    assert len(mapped) == len(source)
    symbols = [s for s in index if s.is_Symbol]
    for point in points(*symbols):
        at = tuple(point[s] if s.is_Symbol else 0 for s in index)
        assert x.reshape(shape)[at] == x[tuple(evaluate(e, point) for e in mapped)]


@pytest.mark.parametrize(
    ("shape", "strides", "new_shape"),
    [
        ((4, 6), (6, 1), (2, 2, 6)),
        ((4, 6), (1, 4), (4, 2, 3)),
        ((4, 6), (1, 4), (24,)),
        ((2, 3, 4), (24, 8, 2), (6, 4)),
        ((2, 3, 4), (24, 8, 2), (24,)),
        ((2, 1, 4), (4, 99, 1), (8, 1, 1)),
        ((3, 4), (0, 1), (3, 2, 2)),
    ],
)
def test_reshape_strides_agrees_with_torch_view(shape, strides, new_shape):
    x = torch.as_strided(torch.arange(200), shape, strides)
    ours = reshape_strides(shape, strides, new_shape)
    try:
        theirs = x.view(new_shape)
    except RuntimeError:
        assert ours is None
        return
    assert ours is not None and torch.equal(torch.as_strided(torch.arange(200), new_shape, ours), theirs)


def test_strides():
    assert stride_of(6 * A + B + 3, A) == 6
    assert stride_of(6 * A + B + 3, C) == 0
    assert stride_of(FloorDiv(A, 2) + B, A) is None
    assert stride_of(FloorDiv(A, 2) + B, B) == 1
    assert strides_of(6 * A + B, (A, ZERO, B)) == (6, 0, 1)
    n = sympy.Symbol("n", integer=True, positive=True)
    assert stride_of(n * A + B, A) == n


def test_simplify_and_substitute():
    x, y = sympy.symbols("x y", integer=True, nonnegative=True)
    assert simplify(FloorDiv(6 * x + y, 6), {y: 6}) == x
    assert simplify(FloorDiv(x, 6), {x: 6}) == 0
    assert substitute(FloorDiv(x, 6), {x: 6 * A + B}) == A
    assert substitute(x, {x: 3}) == 3


def test_symbols_are_interned_and_pickle():
    assert axis("i", 5) is A and axis("i", 6) != A
    assert pickle.loads(pickle.dumps(6 * A + FloorDiv(B, 4))) == 6 * A + FloorDiv(B, 4)
