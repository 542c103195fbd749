"""Fits an expression in the symbolic sizes to a number's values at several sizes, exact at every one of them.

Points move one size at a time, then all of them, so that each size's own contribution shows.

Invariant: `Fit.of(values)` is an expression that gives each of `values` at its point, or `NoFit`; simple expressions
come before complicated ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction

from torchlazy.lazy.export.expressions import Number, SizeExpr, add, evaluate, floordiv, linear, mul, symbol

_MAX_DIVISOR = 64
_MAX_RATIO = 16  # denominators of ratios; ratios themselves are below 8
_DEPTH = 3
_MAX_ATOMS = 24


class NoFit(ValueError):
    """No expression of the sizes gives these values."""


class Fit:
    """Expressions over `points` (size by name, at each recording); the first point is where the example lies."""

    def __init__(self, points: Sequence[Mapping[str, int]]) -> None:
        self.points = [dict(point) for point in points]
        self.names = sorted(points[0]) if points else []
        self._found: dict[tuple[int, ...], Number] = {}
        self._atoms: list[tuple[SizeExpr, tuple[int, ...]]] = []
        for name in self.names:
            self._add_atom(symbol(name))

    def prepare(self, found: Iterable[Sequence[int]]) -> None:
        """Look at all numbers of a graph, small ones first: sizes, whose products the large ones are."""
        for values in sorted({tuple(v) for v in found}, key=lambda v: max(map(abs, v), default=0)):
            with suppress(NoFit):
                self.of(values)

    def of(self, values: Sequence[int]) -> int | SizeExpr:
        """The expression of a whole number; NoFit where there is none."""
        key = tuple(values)
        if key not in self._found:
            found = self._found[key] = self._search(key, _DEPTH)
            if isinstance(found, SizeExpr) and found.op == "floordiv":  # a size, which others are products of
                self._add_atom(found)
        found = self._found[key]
        assert not isinstance(found, float)
        return found

    def of_float(self, values: Sequence[float]) -> Number:
        """The expression of a float: a constant, a size as a float, or a constant over or times a size or its root."""
        first = values[0]
        if all(v.hex() == first.hex() for v in values):
            return first
        if all(v.is_integer() for v in values):
            try:
                return SizeExpr("float", (self.of([int(v) for v in values]),))
            except NoFit:
                pass
        near = [add(symbol(name), step) for name in self.names for step in (-1, 1)]
        for expr in [*(atom for atom, _ in self._atoms), *near, *(product for product, _ in self._products())]:
            assert isinstance(expr, SizeExpr)
            for candidate in (expr, SizeExpr("sqrt", (expr,)), SizeExpr("rsqrt", (expr,))):
                for build in _FLOAT_FORMS:
                    found = build(candidate, first, self.points[0])
                    if found is not None and self._gives_floats(found, values):
                        return found
        raise NoFit(f"no form for {list(values)}")

    # ---------------------------------------------------------------- whole numbers

    def _search(self, values: tuple[int, ...], depth: int) -> Number:
        if all(v == values[0] for v in values):
            return values[0]
        for candidate in self._candidates(values, depth):
            if self._gives(candidate, values):
                return candidate
        raise NoFit(f"no form for {list(values)}")

    def _candidates(self, values: tuple[int, ...], depth: int) -> Iterator[Number]:
        yield from self._affine(values, 1)
        yield from self._times_atom(values, depth)
        yield from self._floors(values)
        yield from self._scaled_floors(values)
        yield from self._affine(values, _MAX_RATIO)
        yield from self._quadratics(values)
        yield from self._affine_in_products(values)
        yield from self._bilinear(values)
        yield from self._sum_of_atom(values, depth)

    def _gives(self, expr: Number, values: Sequence[int]) -> bool:
        return all(evaluate(expr, point) == value for point, value in zip(self.points, values, strict=True))

    def _gives_floats(self, expr: Number, values: Sequence[float]) -> bool:
        return all(
            float(evaluate(expr, point)).hex() == value.hex() for point, value in zip(self.points, values, strict=True)
        )

    def _axis(self, name: str, values: Sequence[int]) -> list[tuple[int, int]]:
        """(size, value) at the points where only `name` has moved from the example."""
        base = self.points[0]
        return [
            (point[name], value)
            for point, value in zip(self.points, values, strict=True)
            if all(point[other] == base[other] for other in self.names if other != name)
        ]

    def _affine(self, values: tuple[int, ...], divisor: int) -> Iterator[Number]:
        """c + m0 * s0 + m1 * s1 ..., or that divided by at most `divisor`: a larger one fits by chance."""
        slopes: dict[str, Fraction] = {}
        for name in self.names:
            samples = self._axis(name, values)
            (x0, v0), *rest = samples
            moved = [(x, v) for x, v in rest if x != x0]
            if not moved:
                return
            slopes[name] = Fraction(moved[-1][1] - v0, moved[-1][0] - x0)
        scale = math.lcm(*(slope.denominator for slope in slopes.values()))
        if scale > divisor:
            return
        total: Number = 0
        offset = scale * values[0]
        for name, slope in slopes.items():
            factor = int(slope * scale)
            offset -= factor * self.points[0][name]
            total = add(total, mul(factor, symbol(name)))
        yield floordiv(add(total, offset), scale)

    def _times_atom(self, values: tuple[int, ...], depth: int) -> Iterator[Number]:
        """(something simpler) * atom."""
        if depth <= 0:
            return
        for atom, at in list(self._atoms):
            if any(a == 0 or v % a for v, a in zip(values, at, strict=True)):
                continue
            try:
                rest = self._search(tuple(v // a for v, a in zip(values, at, strict=True)), depth - 1)
            except NoFit:
                continue
            yield mul(rest, atom)

    def _sum_of_atom(self, values: tuple[int, ...], depth: int) -> Iterator[Number]:
        """atom + (something simpler): (s//2) + t, s*t + s//2."""
        if depth < _DEPTH:
            return
        for atom, at in list(self._atoms):
            try:
                rest = self._search(tuple(v - a for v, a in zip(values, at, strict=True)), 1)
            except NoFit:
                continue
            yield add(rest, atom)

    def _floors(self, values: tuple[int, ...]) -> Iterator[Number]:
        """m * ((s + a) // b) + c, of one size: what strides and halvings make of it."""
        for name in self.names:
            samples = self._axis(name, values)
            (x0, v0), *rest = samples
            moved = [(x, v) for x, v in rest if v != v0]
            if not moved:
                continue
            x1, v1 = max(moved, key=lambda pair: abs(pair[0] - x0))
            for b in range(2, _MAX_DIVISOR + 1):
                for a in range(b):
                    q0, q1 = (x0 + a) // b, (x1 + a) // b
                    if q0 == q1 or (v1 - v0) % (q1 - q0):
                        continue
                    m = (v1 - v0) // (q1 - q0)
                    c = v0 - m * q0
                    if all(m * ((x + a) // b) + c == v for x, v in samples):
                        atom = floordiv(linear(name, 1, a), b)
                        found = add(mul(m, atom), c)
                        if self._gives(found, values):
                            assert isinstance(atom, SizeExpr) and isinstance(found, SizeExpr)
                            self._add_atom(atom)
                            self._add_atom(found)
                            yield found
                            return

    def _scaled_floors(self, values: tuple[int, ...]) -> Iterator[Number]:
        """(k * s + a) // b of one size: what resampling by a ratio makes of it."""
        for name in self.names:
            samples = self._axis(name, values)
            (x0, v0), (x1, v1) = samples[0], max(samples, key=lambda pair: abs(pair[0] - samples[0][0]))
            for b in range(2, _MAX_RATIO + 1):
                for k in range(2, 8 * b) if v0 != v1 else ():
                    if math.gcd(k, b) > 1 or abs((v1 - v0) * b - k * (x1 - x0)) >= b:
                        continue
                    low = max(v * b - k * x for x, v in samples)
                    high = min(v * b - k * x + b - 1 for x, v in samples)
                    if low > high:
                        continue
                    found = floordiv(linear(name, k, min(max(0, low), high)), b)
                    if isinstance(found, SizeExpr) and self._gives(found, values):
                        self._add_atom(found)
                        yield found
                        return

    def _affine_in_products(self, values: tuple[int, ...]) -> Iterator[Number]:
        """c + m * atom * atom: the patches of a picture and one more."""
        for product, at in self._products():
            moved = [(a, v) for a, v in zip(at, values, strict=True) if a != at[0]]
            if not moved or (moved[-1][1] - values[0]) % (moved[-1][0] - at[0]):
                continue
            m = (moved[-1][1] - values[0]) // (moved[-1][0] - at[0])
            if m:
                found = add(mul(m, product), values[0] - m * at[0])
                if self._gives(found, values):
                    assert isinstance(found, SizeExpr)
                    self._add_atom(found)
                    yield found
                    return

    def _quadratics(self, values: tuple[int, ...]) -> Iterator[Number]:
        """(p * s * s + q * s + r) // t of one size."""
        for name in self.names:
            samples = list(dict(self._axis(name, values)).items())
            if len(samples) < 4:
                continue
            (x0, v0), (x1, v1), (x2, v2) = samples[0], samples[1], samples[-1]
            first = Fraction(v1 - v0, x1 - x0)
            second = (Fraction(v2 - v0, x2 - x0) - first) / (x2 - x1)
            if not second:
                continue
            q = first - second * (x0 + x1)
            r = v0 - second * x0 * x0 - q * x0
            scale = math.lcm(second.denominator, q.denominator, r.denominator)
            s = symbol(name)
            square = mul(int(second * scale), mul(s, s))
            yield floordiv(add(add(square, mul(int(q * scale), s)), int(r * scale)), scale)

    def _bilinear(self, values: tuple[int, ...]) -> Iterator[Number]:
        """c + m*s + n*t + k*s*t of two sizes."""
        for i, first in enumerate(self.names):
            for second in self.names[i + 1 :]:
                base = self.points[0]
                corner = [
                    (p, v)
                    for p, v in zip(self.points, values, strict=True)
                    if p[first] != base[first] and p[second] != base[second]
                ]
                if not corner:
                    continue
                point, value = corner[0]
                x0, y0 = base[first], base[second]
                along_x = dict(self._axis(first, values)).get(point[first])
                along_y = dict(self._axis(second, values)).get(point[second])
                if along_x is None or along_y is None:
                    continue
                dx, dy = point[first] - x0, point[second] - y0
                k = Fraction(value - along_x - along_y + values[0], dx * dy)
                m = Fraction(along_x - values[0], dx) - k * y0
                n = Fraction(along_y - values[0], dy) - k * x0
                c = values[0] - m * x0 - n * y0 - k * x0 * y0
                if any(part.denominator != 1 for part in (k, m, n, c)):
                    continue
                s, t = symbol(first), symbol(second)
                total = add(mul(int(k), mul(s, t)), add(mul(int(m), s), mul(int(n), t)))
                yield add(total, int(c))

    def _add_atom(self, atom: SizeExpr) -> None:
        at = tuple(evaluate(atom, point) for point in self.points)
        if len(self._atoms) < _MAX_ATOMS and all(at != known for _, known in self._atoms):
            self._atoms.append((atom, at))

    def _products(self) -> list[tuple[SizeExpr, tuple[int, ...]]]:
        found = []
        for i, (a, at_a) in enumerate(self._atoms):
            for b, at_b in self._atoms[i:]:
                product = mul(a, b)
                assert isinstance(product, SizeExpr)
                found.append((product, tuple(x * y for x, y in zip(at_a, at_b, strict=True))))
        return found


def _over(expr: SizeExpr, first: float, point: Mapping[str, int]) -> Number | None:
    top = first * evaluate(expr, point)
    return SizeExpr("truediv", (float(round(top, 12)), expr))


def _times(expr: SizeExpr, first: float, point: Mapping[str, int]) -> Number | None:
    at = evaluate(expr, point)
    return mul(float(round(first / at, 12)), expr) if at else None


def _divided(expr: SizeExpr, first: float, point: Mapping[str, int]) -> Number | None:
    bottom = evaluate(expr, point) / first if first else 0.0
    return SizeExpr("truediv", (expr, float(round(bottom, 12)))) if bottom else None


_FLOAT_FORMS: tuple[Callable[[SizeExpr, float, Mapping[str, int]], Number | None], ...] = (_over, _times, _divided)
