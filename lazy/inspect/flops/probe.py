"""Finds which sizes of a call's inputs may change, which must change together, and records at enough of them.

A size that may not change by itself is tried together with related ones: equal ones, multiples and divisors. Sizes that
move together are one symbol; where smaller steps fail, the symbol has a divisibility.

Invariant: every recording that is kept has the same operators in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
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
NO_WHOLE_NUMBERS = "other sizes would be no whole numbers"


@dataclass(frozen=True)
class Constraint:
    """A condition on the sizes without which the call would raise, or be another program.

    `condition` is a SymPy relation over the symbols; `why` what happens otherwise, with the user's line.
    """

    condition: sympy.Basic
    why: str

    def __str__(self) -> str:
        return f"{self.condition}: {self.why}"


def symbol_of(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


class Prober:
    """Tries sizes; recordings are kept by the sizes that they were made at.

    `traces` are the recordings that agree; `symbols` the sizes that vary by themselves, in order, with their value in
    each of them; `names` gives every size of every input, by name and in order, as an expression over them.
    """

    def __init__(self, call: UnrunCall) -> None:
        self.call, self.places = call, call.places
        self._tried: dict[tuple[int, ...], CutTrace | str] = {}
        self._free: dict[int, tuple[list[int], int]] = {}  # a size that varies by itself: those that follow, its step
        self._drivers: dict[int, list[int]] = {}  # a size that follows others -> those
        own = tuple(place.size for place in self.places)
        try:
            self.base = call.record(own)
        except CannotCount as error:
            call.as_export = True
            try:
                self.base = call.record(own)
            except Exception:  # the obstacle was no library that checks is_exporting()
                raise error from None
        self._find_free()
        points = self._record_points()
        self.symbols = {symbol_of(self.places[f].name): tuple(point[f] for point in points) for f in self._free}
        self.names = {place.name: self._expression(i) for i, place in enumerate(self.places)}
        self.constraints = tuple(self._constraints())

    def trace_at(self, sizes: tuple[int, ...]) -> CutTrace | str:
        """The recording at these sizes (one for each place), or why there is none."""
        found = self._tried.get(sizes)
        if found is None:
            try:
                trace = self.call.record(sizes)
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

    def _with(self, first: int, size: int, companions: Iterable[int] = ()) -> CutTrace | str:
        """The recording where `first` gets `size`, and its companions grow in proportion."""
        moves = {first: size}
        for other in companions:
            moves[other], rest = divmod(self.places[other].size * size, self.places[first].size)
            if rest:
                return NO_WHOLE_NUMBERS
        return self.trace_at(tuple(moves.get(i, place.size) for i, place in enumerate(self.places)))

    def _works(self, first: int, size: int, companions: Iterable[int] = ()) -> bool:
        return not isinstance(self._with(first, size, companions), str)

    def _companions(self, first: int) -> list[int] | None:
        """The fewest other sizes that must grow with this one; None if it may not change at all."""
        base = self.places[first].size
        if base == 0:
            return None
        if self._works(first, 2 * base):
            return []
        others = [(i, place.size) for i, place in enumerate(self.places) if i != first]
        equal = [i for i, size in others if size == base]
        related = [i for i, size in others if min(size, base) > 1 and (size % base == 0 or base % size == 0)]
        for kept in (equal, related):
            if kept and self._works(first, 2 * base, kept):
                for candidate in tuple(kept):
                    fewer = [other for other in kept if other != candidate]
                    kept = fewer if self._works(first, 2 * base, fewer) else kept
                return kept
        # Too many at once: some of them must stay.
        return next(([one] for one in related if self._works(first, 2 * base, [one])), None)

    def _find_free(self) -> None:
        for first, place in enumerate(self.places):
            if first in self._drivers or (companions := self._companions(first)) is None:
                continue
            for other in companions:
                self._drivers.setdefault(other, []).append(first)
            smaller = (s for s in _STEPS if s < place.size and self._works(first, place.size + s, companions))
            self._free[first] = companions, next(smaller, place.size)

    def _record_points(self) -> list[dict[int, int]]:
        """Record at as many sizes as formulas need: each free one moved by itself, then all of them.

        Twice the size shows what grows in steps larger than the others, as the positions of a wide stride.
        """
        base = {first: self.places[first].size for first in self._free}
        steps = {first: step for first, (_, step) in self._free.items()}
        points = [base, *({**base, f: base[f] + n * step} for f, step in steps.items() for n in _MULTIPLES)]
        points += [{**base, f: 2 * base[f]} for f in base]
        points += [{f: base[f] + (n + i) * step for i, (f, step) in enumerate(steps.items())} for n in _JOINT]
        kept = {}
        for point in points:
            sizes = self._at(point)
            trace = NO_WHOLE_NUMBERS if sizes is None else self.trace_at(sizes)
            if sizes is not None and not isinstance(trace, str):
                kept[sizes] = point, trace
        self.traces = tuple(trace for _, trace in kept.values())
        return [point for point, _ in kept.values()]

    def _at(self, point: dict[int, int]) -> tuple[int, ...] | None:
        """All sizes where the free ones are `point`; None where one would be no whole number."""
        moves = dict(point)
        for follower, leaders in self._drivers.items():
            size = self.places[follower].size * math.prod(point[leader] for leader in leaders)
            moves[follower], rest = divmod(size, math.prod(self.places[leader].size for leader in leaders))
            if rest:
                return None
        return tuple(moves.get(i, place.size) for i, place in enumerate(self.places))

    def _expression(self, place: int) -> sympy.Expr:
        """The size as an expression over the free ones."""
        leaders = [place] if place in self._free and place not in self._drivers else self._drivers.get(place, [])
        ratio = sympy.Rational(self.places[place].size, math.prod(self.places[leader].size for leader in leaders))
        return ratio * sympy.Mul(*(symbol_of(self.places[leader].name) for leader in leaders))

    def _constraints(self) -> Iterator[Constraint]:
        for place in self._drivers:
            condition = sympy.Eq(symbol_of(self.places[place].name), self._expression(place))
            yield Constraint(condition, self._why(place, self.places[place].size * 2))
        for first, (companions, step) in self._free.items():
            symbol, size = symbol_of(self.places[first].name), self.places[first].size
            if step > 1:
                condition = sympy.Eq(sympy.Mod(symbol, step), size % step, evaluate=False)
                yield Constraint(condition, self._why(first, size + 1, companions))
            yield from self._bounds(first, companions, step, symbol)
        for first, fixed in enumerate(self.places):
            if first not in self._free and first not in self._drivers:
                condition = sympy.Eq(symbol_of(fixed.name), fixed.size)
                yield Constraint(condition, self._why(first, max(2 * fixed.size, 1)))

    def _bounds(self, first: int, companions: list[int], step: int, symbol: sympy.Symbol) -> Iterator[Constraint]:
        """The least and the greatest size at which the call raises nothing, others as they are, where there is one."""
        base = self.places[first].size

        def error_at(count: int) -> str | None:
            """What the call raises `count` steps from its own size."""
            try:
                found = self._with(first, base + count * step, companions)
            except CannotCount:
                return None
            return found if isinstance(found, str) and found not in (OTHER_OPERATORS, NO_WHOLE_NUMBERS) else None

        recurrent = any(str(entry.op) == "aten.mkldnn_rnn_layer.default" for entry in self.base.entries)
        farthest = _FARTHEST_RECURRENT if recurrent else _FARTHEST
        ends = (-((base - 1) // step), sympy.Ge), (max((farthest - base) // step, 0), sympy.Le)
        for bad, relation in ends:
            fine, why = 0, error_at(bad)
            while why is not None and abs(bad - fine) > 1:
                middle = (fine + bad) // 2
                told = error_at(middle)
                fine, bad, why = (middle, bad, why) if told is None else (fine, middle, told)
            if why is not None:
                yield Constraint(relation(symbol, base + fine * step), why)

    def _why(self, place: int, size: int, companions: Iterable[int] = ()) -> str:
        found = self._with(place, size, companions)
        return found if isinstance(found, str) else "its sizes change together"
