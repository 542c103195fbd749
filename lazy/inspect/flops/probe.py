"""Finds which sizes of a call's inputs may change, which must change together, and records at enough of them.

A size that may not change by itself is tried together with related ones: equal ones, multiples and divisors. Sizes that
move together are one symbol; where smaller steps fail, the symbol has a divisibility.

Invariant: every recording that is kept has the same operators in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import sympy
from torchlazy.lazy.inspect.flops.trace import CannotCount, UnrunCall, WouldRaise
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.lazy.trace.user_frames import frame_of_error

_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512)
_MULTIPLES = (1, 2, 3, 7)
_JOINT = (2, 3, 5)
_FARTHEST = 65536
_FARTHEST_RECURRENT = 256  # the geometry of oneDNN's recurrent layers is learnt by running them
OTHER_OPERATORS = "other operators are called"


@dataclass(frozen=True)
class Constraint:
    """A condition on the sizes without which the call would raise, or be another program.

    `condition` is a SymPy relation over the symbols; `why` what happens otherwise, with the user's line.
    """

    condition: sympy.Basic
    why: str

    def __str__(self) -> str:
        return f"{self.condition}: {self.why}"


@dataclass(frozen=True)
class Probes:
    """Recordings at different sizes.

    `symbols` are the sizes that vary by themselves, in order, with their value in each recording; `names` gives every
    size of every input, by name, as an expression over them; `base` what each was in the call itself.
    """

    traces: tuple[CutTrace, ...]
    symbols: dict[sympy.Symbol, tuple[int, ...]]
    names: dict[str, sympy.Expr]
    base: dict[str, int]
    constraints: tuple[Constraint, ...]


@dataclass(frozen=True)
class _Place:
    name: str
    leaf: int
    dim: int
    size: int


class Prober:
    """Tries sizes; recordings are kept by the sizes that they were made at."""

    def __init__(self, call: UnrunCall) -> None:
        self.call = call
        self.places = [
            _Place(f"{argument.name}_{dim}", argument.leaf, dim, size)
            for argument in call.arguments
            for dim, size in enumerate(argument.shape)
        ]
        self._tried: dict[tuple[int, ...], CutTrace | str] = {}
        own = tuple(place.size for place in self.places)
        try:
            self.base = self._record(own)
        except CannotCount as error:
            call.as_export = True
            try:
                self.base = self._record(own)
            except Exception:  # the obstacle was no library that checks is_exporting()
                raise error from None

    def trace_at(self, sizes: tuple[int, ...]) -> CutTrace | str:
        """The recording at these sizes (one for each place), or why there is none."""
        found = self._tried.get(sizes)
        if found is None:
            try:
                trace = self._record(sizes)
                same = [e.op for e in trace.entries] == [e.op for e in self.base.entries]
                found = trace if same else OTHER_OPERATORS
            except CannotCount:
                raise
            except WouldRaise as error:
                found = str(error)
            except Exception as error:  # an error of the function, or of torch above the recorder, at these sizes
                text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                found = f"{text} (at {frame_of_error(error) or 'an unknown line'})"
            self._tried[sizes] = found
        return found

    def _record(self, sizes: tuple[int, ...]) -> CutTrace:
        shapes: dict[int, list[int]] = {}
        for place, size in zip(self.places, sizes, strict=True):
            shapes.setdefault(place.leaf, []).append(size)
        return self.call.record({leaf: tuple(shape) for leaf, shape in shapes.items()})

    def _moved(self, moves: dict[int, int]) -> tuple[int, ...] | None:
        """All sizes, those in `moves` (place -> new size) changed; None where one would be no whole number."""
        return tuple(moves.get(i, place.size) for i, place in enumerate(self.places))

    def _with(self, first: int, size: int, companions: Iterable[int]) -> tuple[int, ...] | None:
        """`first` gets `size`, and its companions grow in proportion."""
        moves = {first: size}
        for other in companions:
            grown, rest = divmod(self.places[other].size * size, self.places[first].size)
            if rest:
                return None
            moves[other] = grown
        return self._moved(moves)

    def _works(self, sizes: tuple[int, ...] | None) -> bool:
        return sizes is not None and not isinstance(self.trace_at(sizes), str)

    def _companions(self, first: int) -> list[int] | None:
        """The fewest other sizes that must grow with this one; None if it may not change at all."""
        base = self.places[first].size
        if self._works(self._with(first, 2 * base, ())):
            return []
        if base == 1:
            equal = [i for i, p in enumerate(self.places) if i != first and p.size == 1]
            return self._fewest(first, equal)
        related = [
            i
            for i, p in enumerate(self.places)
            if i != first and p.size > 1 and (p.size % base == 0 or base % p.size == 0)
        ]
        equal = [i for i in related if self.places[i].size == base]
        for candidates in (equal, related):
            found = self._fewest(first, candidates)
            if found is not None:
                return found
        for count in related:  # too many at once: some of them must stay
            if self._works(self._with(first, 2 * base, [count])):
                return [count]
        return None

    def _fewest(self, first: int, candidates: list[int]) -> list[int] | None:
        size = 2 * self.places[first].size
        kept = list(candidates)
        if not kept or not self._works(self._with(first, size, kept)):
            return None
        for candidate in candidates:
            fewer = [other for other in kept if other != candidate]
            if self._works(self._with(first, size, fewer)):
                kept = fewer
        return kept

    def _step(self, first: int, companions: list[int]) -> int:
        """The smallest step by which this size may grow."""
        base = self.places[first].size
        return next((s for s in _STEPS if s < base and self._works(self._with(first, base + s, companions))), base)

    def probe(self) -> Probes:
        """Find the symbols, and record at as many sizes as their formulas need."""
        drivers: dict[int, list[int]] = {}  # a size that follows others -> those
        free: list[tuple[int, list[int], int]] = []
        fixed: list[int] = []
        for first, place in enumerate(self.places):
            if first in drivers:
                continue
            companions = self._companions(first) if place.size else None
            if companions is None:
                fixed.append(first)
                continue
            for other in companions:
                drivers.setdefault(other, []).append(first)
            free.append((first, companions, self._step(first, companions)))
        return self._record_all(free, drivers, fixed)

    def _record_all(
        self, free: list[tuple[int, list[int], int]], drivers: dict[int, list[int]], fixed: list[int]
    ) -> Probes:
        base = {first: self.places[first].size for first, _, _ in free}
        points: list[dict[int, int]] = [base]
        for first, _, step in free:
            points += [{**base, first: base[first] + times * step} for times in _MULTIPLES]
        points += [
            {first: base[first] + (start + order) * step for order, (first, _, step) in enumerate(free)}
            for start in _JOINT
        ]
        traces: list[CutTrace] = []
        kept: list[dict[int, int]] = []
        for point in points:
            sizes = self._at(point, drivers)
            trace = self.trace_at(sizes) if sizes is not None else "no whole number"
            if not isinstance(trace, str) and point not in kept:
                traces.append(trace)
                kept.append(point)
        symbols = {
            sympy.Symbol(self.places[first].name, integer=True, positive=True): tuple(p[first] for p in kept)
            for first, _, _ in free
        }
        by_place = dict(zip((first for first, _, _ in free), symbols, strict=True))
        names = {place.name: self._expression(i, by_place, drivers) for i, place in enumerate(self.places)}
        base_sizes = {place.name: place.size for place in self.places}
        return Probes(tuple(traces), symbols, names, base_sizes, self._constraints(free, drivers, fixed, by_place))

    def _at(self, point: dict[int, int], drivers: dict[int, list[int]]) -> tuple[int, ...] | None:
        """All sizes where the free ones are `point`."""
        moves = dict(point)
        for follower, leaders in drivers.items():
            size = self.places[follower].size * math.prod(point[leader] for leader in leaders)
            size, rest = divmod(size, math.prod(self.places[leader].size for leader in leaders))
            if rest:
                return None
            moves[follower] = size
        return self._moved(moves)

    def _expression(self, place: int, by_place: dict[int, sympy.Symbol], drivers: dict[int, list[int]]) -> sympy.Expr:
        if place in by_place:
            return by_place[place]
        if place not in drivers:
            return sympy.Integer(self.places[place].size)
        leaders = drivers[place]
        ratio = sympy.Rational(self.places[place].size, math.prod(self.places[leader].size for leader in leaders))
        return ratio * sympy.Mul(*(by_place[leader] for leader in leaders))

    def _constraints(
        self,
        free: list[tuple[int, list[int], int]],
        drivers: dict[int, list[int]],
        fixed: list[int],
        by_place: dict[int, sympy.Symbol],
    ) -> tuple[Constraint, ...]:
        found: list[Constraint] = []
        for place in drivers:
            symbol = sympy.Symbol(self.places[place].name, integer=True, positive=True)
            why = self._why(place, self.places[place].size * 2, [])
            found.append(Constraint(sympy.Eq(symbol, self._expression(place, by_place, drivers)), why))
        for first, companions, step in free:
            if step > 1:
                rest = self.places[first].size % step
                why = self._why(first, self.places[first].size + 1, companions)
                found.append(Constraint(sympy.Eq(sympy.Mod(by_place[first], step), rest, evaluate=False), why))
            found += self._bounds(first, companions, step, by_place[first])
        for place in fixed:
            symbol = sympy.Symbol(self.places[place].name, integer=True, positive=True)
            size = self.places[place].size
            found.append(Constraint(sympy.Eq(symbol, size), self._why(place, max(2 * size, 1), [])))
        return tuple(found)

    def _bounds(self, first: int, companions: list[int], step: int, symbol: sympy.Symbol) -> list[Constraint]:
        """The least and the greatest size at which the call raises nothing, others as they are, where there is one."""
        base = self.places[first].size

        def error_at(count: int) -> str | None:
            """What the call raises `count` steps from its own size."""
            try:
                sizes = self._with(first, base + count * step, companions)
                found = self.trace_at(sizes) if sizes is not None else None
            except CannotCount:
                return None
            return found if isinstance(found, str) and found != OTHER_OPERATORS else None

        bounds: list[Constraint] = []
        recurrent = any(str(entry.op) == "aten.mkldnn_rnn_layer.default" for entry in self.base.entries)
        farthest = _FARTHEST_RECURRENT if recurrent else _FARTHEST
        least, most = -((base - 1) // step), max((farthest - base) // step, 0)
        for end, relation in ((least, sympy.Ge), (most, sympy.Le)):
            why = error_at(end)
            if why is None:
                continue
            fine, bad = 0, end
            while abs(bad - fine) > 1:
                middle = (fine + bad) // 2
                told = error_at(middle)
                fine, bad, why = (middle, bad, why) if told is None else (fine, middle, told)
            bounds.append(Constraint(relation(symbol, base + fine * step), why))
        return bounds

    def _why(self, place: int, size: int, companions: list[int]) -> str:
        sizes = self._with(place, size, companions) if self.places[place].size else self._moved({place: size})
        found = self.trace_at(sizes) if sizes is not None else "other sizes would be no whole numbers"
        return found if isinstance(found, str) else "its sizes change together"
