"""Index algebra: SymPy expressions over loop axes, with a floor division and a modulus that know how far an axis runs.

Invariant: every function is exact for all points of the axes' ranges, and cheap: integers and linear sums take a fast
path, nothing calls `sympy.simplify` or `expand`. An axis symbol carries its size (`axis(name, size)`), so
`FloorDiv(6*i + j, 6)` is `i` at once where `j` was made with size 6. Symbols of unknown range are legal and merely
simplify less; `simplify(expr, ranges)` tells their ranges afterwards. A tracked size (prims/size_int.py) stands in an
index as a `SizeSymbol`; rules see it as the number that it is, and use only what is sure for all sizes.

What stands in an index: integers, symbols, sums, products, `FloorDiv`, `Mod`. `codegen/expr.py` prints all of
it, `evaluate` computes it on integers or integer tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import pairwise
from operator import mul
from typing import Any, TypeAlias

import sympy
from torchlazy.inductor.size_symbol import SizeSymbol, number_of
from torchlazy.prims.meta import Dim, contiguous_strides
from torchlazy.prims.size_int import (
    divides,
    is_tracked,
    surely_at_least,
    surely_equal,
    surely_less,
)

Expr: TypeAlias = sympy.Expr
Index: TypeAlias = "tuple[sympy.Expr, ...]"

ZERO: Expr = sympy.Integer(0)
_CACHE = 1 << 16


class AxisSymbol(sympy.Symbol):
    """A loop counter: an integer from 0 to `size` - 1. Symbols of one name and different sizes are different."""

    __slots__ = ("size",)
    size: Dim

    def __new__(cls, name: str, size: Dim) -> AxisSymbol:
        symbol = sympy.Symbol.__xnew__(cls, name, integer=True, nonnegative=True)
        symbol.size = size
        return symbol

    def _hashable_content(self) -> tuple[Any, ...]:
        return (*super()._hashable_content(), self.size)

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.name, self.size), {}

    def __reduce__(self) -> tuple[Any, ...]:
        return axis, (self.name, self.size)


def _is_one(number: int) -> bool:
    return surely_equal(number, 1)


@lru_cache(maxsize=_CACHE)
def axis(name: str, size: Dim) -> AxisSymbol:
    """The symbol `name` that runs over `range(size)`."""
    return AxisSymbol(name, size.number if isinstance(size, SizeSymbol) else size)


def axis_index(prefix: str, sizes: Sequence[Dim], start: int = 0) -> Index:
    """One symbol a dimension, `prefix{start}`..; a dimension of size 1 gets the constant 0."""
    return tuple(ZERO if _is_same(size, 1) else axis(f"{prefix}{start + n}", size) for n, size in enumerate(sizes))


@lru_cache(maxsize=_CACHE)
def _divided(cls: type, simpler: Callable[[Expr, Expr], Expr | None], a: Expr, b: Expr) -> Expr:
    result = simpler(a, b)
    return sympy.Expr.__new__(cls, a, b) if result is None else result


class FloorDiv(sympy.Function):
    """`a // b` of a non-negative `a` and a positive `b`."""

    is_integer = True
    is_nonnegative = True

    def __new__(cls, a: Expr | int, b: Expr | int) -> Expr:  # type: ignore[misc]
        return _divided(cls, _floor_div, sympy.sympify(a), sympy.sympify(b))  # type: ignore[arg-type]


class Mod(sympy.Function):
    """`a % b` of a non-negative `a` and a positive `b`."""

    is_integer = True
    is_nonnegative = True

    def __new__(cls, a: Expr | int, b: Expr | int) -> Expr:  # type: ignore[misc]
        return _divided(cls, _mod, sympy.sympify(a), sympy.sympify(b))  # type: ignore[arg-type]


Bounds: TypeAlias = "tuple[int | None, int | None]"


@lru_cache(maxsize=_CACHE)
def bounds(expr: Expr) -> Bounds:
    """The least and the greatest value of `expr`, inclusive; None where nothing is known."""
    if expr.is_Integer:
        return int(expr), int(expr)
    if isinstance(expr, AxisSymbol):
        size = expr.size
        if is_tracked(size):
            return 0, size - 1  # of an axis without points nothing is asked
        return 0, (max(int(size) - 1, 0) if isinstance(size, int) or size.is_Integer else None)
    if isinstance(expr, SizeSymbol):
        return expr.number, expr.number
    if expr.is_Symbol:
        return (1, None) if expr.is_positive else (0, None) if expr.is_nonnegative else (None, None)
    if isinstance(expr, FloorDiv):
        (lo, hi), divisor = bounds(expr.args[0]), number_of(expr.args[1])
        if divisor is None or not surely_at_least(divisor, 1):
            return (0, hi) if lo is not None and surely_at_least(lo, 0) else (None, None)
        return (None if lo is None else lo // divisor), (None if hi is None else hi // divisor)
    if isinstance(expr, Mod):
        hi = bounds(expr.args[0])[1]
        divisor = number_of(expr.args[1])
        top = None if divisor is None else divisor - 1
        if hi is None or surely_less(hi, 0):
            return 0, top
        return 0, hi if top is None or surely_less(hi, top) else top
    if expr.is_Add:
        return _sum_bounds([bounds(term) for term in expr.args])
    if expr.is_Mul:
        return reduce(_product_bounds, [bounds(factor) for factor in expr.args])
    return None, None


def _sum_bounds(terms: Sequence[Bounds]) -> Bounds:
    lows, highs = [lo for lo, _ in terms], [hi for _, hi in terms]
    return (None if None in lows else sum(lows)), (None if None in highs else sum(highs))  # type: ignore[arg-type]


def _product_bounds(a: Bounds, b: Bounds) -> Bounds:
    if a[0] is not None and b[0] is not None and surely_at_least(a[0], 0) and surely_at_least(b[0], 0):
        return a[0] * b[0], (None if a[1] is None or b[1] is None else a[1] * b[1])
    if any(is_tracked(end) for end in (*a, *b)):
        return _tracked_product_bounds(a, b)
    if None not in a and None not in b:
        corners = [x * y for x in a for y in b]  # type: ignore[operator]
        return min(corners), max(corners)
    if a[0] is not None and a[0] == a[1] and b[0] is not None and b[0] >= 0:  # a negative constant times x >= lo
        return None, a[0] * b[0]
    if b[0] is not None and b[0] == b[1]:
        return _product_bounds(b, a) if b[0] < 0 and a[0] is not None and a[0] >= 0 else (None, None)
    return None, None


def _tracked_product_bounds(a: Bounds, b: Bounds) -> Bounds:
    """A number below zero times what is not: -s * x."""
    for number, other in ((a, b), (b, a)):
        c = number[0]
        if c is None or number[1] is None or not surely_equal(c, number[1]) or not surely_at_least(0, c):
            continue
        if other[0] is not None and surely_at_least(other[0], 0):
            return (None if other[1] is None else c * other[1]), c * other[0]
    return None, None


def _terms(expr: Expr) -> tuple[int, list[tuple[int, Expr]]]:
    """`expr` as constant + sum of coefficient * base; a coefficient that is no number stays in the base."""
    constant: int = 0
    terms = []
    for term in expr.args if expr.is_Add else (expr,):
        if term.is_Integer:
            constant += int(term)
            continue
        if isinstance(term, SizeSymbol):
            constant += term.number
            continue
        coefficient, base = term.as_coeff_Mul() if term.is_Mul else (sympy.S.One, term)
        if not coefficient.is_Integer:
            terms.append((1, term))
            continue
        number = int(coefficient)
        if base.is_Mul and any(isinstance(factor, SizeSymbol) for factor in base.args):
            rest = []
            for factor in base.args:
                if isinstance(factor, SizeSymbol):
                    number = number * factor.number
                else:
                    rest.append(factor)
            if not rest:
                constant += number
                continue
            base = sympy.Mul(*rest)
        elif isinstance(base, SizeSymbol):
            constant += number * base.number
            continue
        terms.append((number, base))
    return constant, terms


def _sum(constant: int, terms: Sequence[tuple[int, Expr]]) -> Expr:
    return sympy.Add(sympy.sympify(constant), *(base if _is_one(c) else c * base for c, base in terms))


def _range_of(constant: int, terms: Sequence[tuple[int, Expr]]) -> Bounds:
    parts = [_product_bounds((c, c), bounds(base)) for c, base in terms]
    return _sum_bounds([(constant, constant), *parts])


def _never_negative(constant: int, terms: Sequence[tuple[int, Expr]]) -> bool:
    low = _range_of(constant, terms)[0]
    return low is not None and surely_at_least(low, 0)


def _within(limits: Bounds, size: int) -> bool:
    least, most = limits
    return least is not None and most is not None and surely_at_least(least, 0) and surely_less(most, size)


def _whole_multiples(a: Expr, d: int) -> tuple[Expr, Expr] | None:
    """(q, r) with a = d*q + r, r >= 0 and q not 0, pulling out the terms that d divides; None where none can be."""
    constant, terms = _terms(a)
    whole = [(c // d, base) for c, base in terms if divides(d, c)]
    rest = [(c, base) for c, base in terms if not divides(d, c)]
    quotient, remainder = divmod(constant, d)
    has_quotient = is_tracked(quotient) or quotient != 0
    if (whole or has_quotient) and _never_negative(remainder, rest):
        return _sum(quotient, whole), _sum(remainder, rest)
    if whole and has_quotient and _never_negative(constant, rest):
        return _sum(0, whole), _sum(constant, rest)
    return None


def _common_factor(a: Expr, d: int) -> tuple[int, Expr, Expr] | None:
    """(g, high, low) with a = g*high + low, g > 1 a divisor of d and 0 <= low < g; None where there is none."""
    constant, terms = _terms(a)
    if any(is_tracked(number) for number in (constant, d, *(c for c, _ in terms))):
        return None
    for g in sorted({math.gcd(c, d) for c, _ in terms}, reverse=True):
        if g == 1:
            break
        high = [(c // g, base) for c, base in terms if c % g == 0]
        low = [(c, base) for c, base in terms if c % g != 0]
        if _within(_range_of(constant % g, low), g) and _never_negative(constant // g, high):
            return g, _sum(constant // g, high), _sum(constant % g, low)
    return None


def _floor_div(a: Expr, b: Expr) -> Expr | None:
    if b is sympy.S.One or a is ZERO:
        return a
    d = number_of(b)
    if d is None or not surely_at_least(d, 1):
        return sympy.S.One if a == b else None
    number = number_of(a)
    if number is not None:
        return sympy.sympify(number // d)
    if _within(bounds(a), d):
        return ZERO
    if isinstance(a, FloorDiv) and (inner := number_of(a.args[1])) is not None:
        return FloorDiv(a.args[0], inner * d)
    if isinstance(a, Mod) and (inner := number_of(a.args[1])) is not None and divides(d, inner):
        return Mod(FloorDiv(a.args[0], b), inner // d)
    if whole := _whole_multiples(a, d):
        return whole[0] + FloorDiv(whole[1], b)
    if factor := _common_factor(a, d):
        return FloorDiv(factor[1], sympy.Integer(d // factor[0]))
    return None


def _mod(a: Expr, b: Expr) -> Expr | None:
    if b is sympy.S.One or a is ZERO or a == b:
        return ZERO
    d = number_of(b)
    if d is None or not surely_at_least(d, 1):
        return None
    number = number_of(a)
    if number is not None:
        return sympy.sympify(number % d)
    if _within(bounds(a), d):
        return a
    if isinstance(a, Mod) and (inner := number_of(a.args[1])) is not None and divides(d, inner):
        return Mod(a.args[0], b)
    if whole := _whole_multiples(a, d):
        return Mod(whole[1], b)
    if factor := _common_factor(a, d):
        return factor[0] * Mod(factor[1], sympy.Integer(d // factor[0])) + factor[2]
    return None


def recombine(expr: Expr) -> Expr:
    """x % n + n * (x // n) -> x, and x % n + n * ((x // n) % m) -> x % (n*m), anywhere in the top sum."""
    if not expr.is_Add or not any(isinstance(base, Mod) for _, base in _terms(expr)[1]):
        return expr
    constant, terms = _terms(expr)
    for c, base in terms:
        if not isinstance(base, Mod):
            continue
        x, n = base.args
        upper = FloorDiv(x, n)
        for other_c, other in terms:
            number = number_of(n)
            if number is None or not surely_equal(other_c, c * number):
                continue
            if other == upper:
                joined = x
            elif isinstance(other, Mod) and other.args[0] == upper:
                joined = Mod(x, n * other.args[1])
            else:
                continue
            rest = [(k, t) for k, t in terms if t is not base and t is not other]
            return recombine(_sum(constant, [*rest, (c, joined)]))
    return expr


def _scaled(i: Expr, stride: Dim) -> Expr:
    # A symbol times an int is in canonical form already: building it without Mul.flatten is five times faster.
    if i.is_Symbol and isinstance(stride, int) and not is_tracked(stride):
        return sympy.Mul._from_args((sympy.Integer(stride), i))
    return i * stride


@lru_cache(maxsize=_CACHE)
def dot(index: Index, strides: tuple[Dim, ...], offset: Dim = 0) -> Expr:
    """offset + sum of index[d] * strides[d]: the element offset of a logical index in a strided layout."""
    parts: list[Any] = [] if _is_same(offset, 0) else [offset]
    for i, stride in zip(index, strides, strict=True):
        if not _is_same(stride, 0) and i is not ZERO:
            parts.append(i if _is_same(stride, 1) else _scaled(i, stride))
    return recombine(sympy.Add(*parts))


def flatten(index: Index, sizes: tuple[Dim, ...]) -> Expr:
    """The row-major position of `index` in a shape."""
    return dot(tuple(index), contiguous_strides(tuple(sizes)))


@lru_cache(maxsize=_CACHE)
def unflatten(flat: Expr, sizes: tuple[Dim, ...]) -> Index:
    """The index in a shape of the row-major position `flat`, which must be less than the shape's numel."""
    strides = contiguous_strides(sizes)
    result: list[Expr] = []
    seen_first = False  # the first dimension that is not 1 needs no modulus: flat is in range
    for size, stride in zip(sizes, strides, strict=True):
        if _is_same(size, 1):
            result.append(ZERO)
            continue
        quotient = FloorDiv(flat, stride)
        result.append(Mod(quotient, size) if seen_first else quotient)
        seen_first = True
    return tuple(result)


@lru_cache(maxsize=_CACHE)
def reshape_groups(shape: tuple[Dim, ...], source: tuple[Dim, ...]) -> tuple[tuple[range, range], ...]:
    """The finest split of two shapes into runs of dimensions of equal numel: (dims of shape, dims of source).

    (6, 4, 5) against (2, 3, 20) gives (0:1, 0:2), (1:3, 2:3). Sizes of 1 join the run before them.
    """
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(shape) or j < len(source):
        i0, j0 = i, j
        a: Dim = 1
        b: Dim = 1
        if i < len(shape):
            a, i = shape[i], i + 1
        if j < len(source):
            b, j = source[j], j + 1
        while not _is_same(a, b) and (i < len(shape) or j < len(source)):
            take_left = i < len(shape) and (j >= len(source) or not _is_less(b, a))
            if take_left:
                a, i = a * shape[i], i + 1
            else:
                b, j = b * source[j], j + 1
        groups.append((range(i0, i), range(j0, j)))
    return tuple(groups)


def _is_same(a: Dim, b: Dim) -> bool:
    return surely_equal(a, b) if isinstance(a, int) and isinstance(b, int) else bool(a == b)


def _is_less(a: Dim, b: Dim) -> bool:
    return surely_less(a, b) if isinstance(a, int) and isinstance(b, int) else False


@lru_cache(maxsize=_CACHE)
def reshape_index(index: Index, shape: tuple[Dim, ...], source: tuple[Dim, ...]) -> Index:
    """The index in `source` of the element that stands at `index` in `shape` (both row-major, one numel)."""
    result: list[Expr] = []
    for left, right in reshape_groups(shape, source):
        outer, inner = tuple(shape[d] for d in left), tuple(source[d] for d in right)
        if len(outer) == len(inner) and all(map(_is_same, outer, inner)):
            result.extend(index[d] for d in left)
        else:
            result.extend(unflatten(flatten(tuple(index[d] for d in left), outer), inner))
    return tuple(result)


def reshape_strides(
    shape: tuple[Dim, ...], strides: tuple[Dim, ...], new_shape: tuple[Dim, ...]
) -> tuple[Dim, ...] | None:
    """The strides that show a strided layout under `new_shape` without a copy; None where a copy is needed."""
    if any(size == 0 for size in shape):
        return contiguous_strides(new_shape)
    result: list[Dim] = []
    for left, right in reshape_groups(new_shape, shape):
        dims = [d for d in right if not _is_same(shape[d], 1)]
        for d, following in pairwise(dims):
            if not _is_same(strides[d], strides[following] * shape[following]):
                return None
        step: Dim = strides[dims[-1]] if dims else 1
        inner: list[Dim] = []
        for d in reversed(left):
            inner.append(step)
            step = step * new_shape[d]
        result.extend(reversed(inner))
    return tuple(result)


def simplify(expr: Expr, ranges: Mapping[sympy.Symbol, Dim]) -> Expr:
    """`expr` with what the ranges of its plain symbols allow; axis symbols bring their own range."""
    if expr.is_Integer or not (expr.has(FloorDiv, Mod)):
        return expr
    sized = {s: axis(f"{s.name}__sized", n) for s, n in ranges.items() if not isinstance(s, AxisSymbol)}
    if not sized:
        return recombine(expr)
    return recombine(expr.xreplace(sized)).xreplace({new: old for old, new in sized.items()})


def substitute(expr: Expr, mapping: Mapping[sympy.Symbol, Expr]) -> Expr:
    """`expr` with symbols replaced, divisions evaluated anew."""
    if expr.is_Integer or not mapping:
        return expr
    if expr.is_Symbol:
        return sympy.sympify(mapping.get(expr, expr))
    return recombine(expr.xreplace({s: sympy.sympify(e) for s, e in mapping.items()}))


@lru_cache(maxsize=_CACHE)
def stride_of(expr: Expr, symbol: sympy.Symbol) -> Dim | None:
    """What `expr` grows by when `symbol` grows by 1: an int (or size expression), or None when it is not affine."""
    total: Any = 0
    for term in expr.args if expr.is_Add else (expr,):
        if term == symbol:
            total = total + 1
        elif symbol not in term.free_symbols:
            continue
        elif term.is_Mul and symbol in term.args:
            rest = [factor for factor in term.args if factor != symbol]
            if any(symbol in factor.free_symbols for factor in rest):
                return None
            total = total + reduce(mul, rest)
        else:
            return None
    if isinstance(total, int):
        return total
    number = number_of(total)
    return total if number is None else number


def strides_of(expr: Expr, symbols: Sequence[Expr]) -> tuple[Dim | None, ...]:
    """`stride_of` for each symbol; 0 for the constant that stands for an axis of size 1."""
    return tuple(stride_of(expr, s) if s.is_Symbol else 0 for s in symbols)


def evaluate(expr: Expr, values: Mapping[sympy.Symbol, Any]) -> Any:
    """The value of `expr` where `values` binds its symbols to ints or integer tensors."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return values[expr]
    parts = [evaluate(arg, values) for arg in expr.args]
    if isinstance(expr, FloorDiv):
        return parts[0] // parts[1]
    if isinstance(expr, Mod):
        return parts[0] % parts[1]
    if expr.is_Add:
        return reduce(lambda a, b: a + b, parts)
    if expr.is_Mul:
        return reduce(mul, parts)
    if expr.is_Pow:
        return parts[0] ** parts[1]
    raise TypeError(f"index expression: cannot evaluate {type(expr).__name__} in {expr}")
