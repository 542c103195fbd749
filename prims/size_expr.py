"""Sizes as expressions: polynomials with integer coefficients over symbols, floor divisions and remainders.

SymPy would do, but planning a model does a million operations on sizes. Here equal polynomials of one space are one
object, every operation is remembered, and what is asked of an expression (its least value) is asked once.

Invariant: an expression equals its value at every binding of the symbols for which the operations that made it are
defined; what `low` answers is a true lower bound wherever each symbol is at least its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Monomial: TypeAlias = "tuple[int, ...]"  # atoms by number, ascending, a power repeated
Terms: TypeAlias = "tuple[tuple[Monomial, int], ...]"
Structure: TypeAlias = Any  # nested tuples of str and int: see `SizeExprs.structure`

_DEPTH = 4  # of the proofs about floor divisions
_UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size that a run binds. `value` is its value while this space plans, `hint` the one that heuristics see; `low`
    the least value that it is ever bound to (None: any)."""

    name: str
    value: int
    hint: int
    low: int | None


class Poly:
    """An interned expression; made by a `SizeExprs` only."""

    __slots__ = ("_low", "hint", "integer", "number", "terms", "value")

    def __init__(self, number: int, terms: Terms, value: int, hint: int) -> None:
        self.number = number
        self.terms = terms
        self.value = value
        self.hint = hint
        self.integer: Any = None
        self._low: Any = _UNKNOWN

    @property
    def constant(self) -> int | None:
        """The number, where the expression is one."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None


@dataclass(frozen=True, slots=True)
class _Atom:
    """A symbol, or `kind` ("//" or "%") of two expressions."""

    kind: str
    name: str
    value: int
    hint: int
    low: int | None
    left: Poly | None = None
    right: Poly | None = None


class SizeExprs:
    """The expressions of one planning."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self.symbols = tuple(symbols)
        self._atoms: list[_Atom] = []
        self._atom_of: dict[Any, int] = {}
        self._polys: dict[Terms, Poly] = {}
        self.by_number: list[Poly] = []
        self._known: dict[tuple[str, int, int], Poly] = {}
        for symbol in symbols:
            self._enter(symbol)

    # ---- making

    def add_symbol(self, symbol: Symbol) -> None:
        """One more symbol."""
        self.symbols = (*self.symbols, symbol)
        self._enter(symbol)

    def _enter(self, symbol: Symbol) -> None:
        self._new_atom(("symbol", symbol.name), "symbol", symbol.name, symbol.value, symbol.hint, symbol.low)

    def symbol(self, name: str) -> Poly:
        """The expression that is this symbol."""
        return self._poly((((self._atom_of["symbol", name],), 1),))

    def number(self, value: int) -> Poly:
        """A constant."""
        return self._poly((((), value),) if value else ())

    def add(self, a: Poly, b: Poly, factor: int = 1) -> Poly:
        """a + factor * b"""
        key = (f"+{factor}", a.number, b.number)
        if key not in self._known:
            total = dict(a.terms)
            for monomial, coefficient in b.terms:
                total[monomial] = total.get(monomial, 0) + factor * coefficient
            self._known[key] = self._of(total)
        return self._known[key]

    def mul(self, a: Poly, b: Poly) -> Poly:
        """a * b"""
        key = ("*", a.number, b.number)
        if key not in self._known:
            total: dict[Monomial, int] = {}
            for left, c in a.terms:
                for right, d in b.terms:
                    monomial = tuple(sorted(left + right))
                    total[monomial] = total.get(monomial, 0) + c * d
            self._known[key] = self._of(total)
        return self._known[key]

    def floor_div(self, a: Poly, b: Poly) -> Poly:
        """a // b"""
        key = ("//", a.number, b.number)
        if key not in self._known:
            whole, rest = self._divide(a, b)
            if not rest.terms or self._is_digit(rest, b):
                self._known[key] = whole
            elif rest.constant is not None and b.constant is not None:
                self._known[key] = self.add(whole, self.number(rest.constant // b.constant))
            elif self._is_digit(self.add(rest, b), b):
                self._known[key] = self.add(whole, self.number(1), -1)
            else:
                self._known[key] = self.add(whole, self._function("//", rest, b))
        return self._known[key]

    def mod(self, a: Poly, b: Poly) -> Poly:
        """a % b"""
        key = ("%", a.number, b.number)
        if key not in self._known:
            _, rest = self._divide(a, b)
            if not rest.terms or self._is_digit(rest, b):
                self._known[key] = rest
            elif rest.constant is not None and b.constant is not None:
                self._known[key] = self.number(rest.constant % b.constant)
            elif self._is_digit(self.add(rest, b), b):
                self._known[key] = self.add(rest, b)
            else:
                self._known[key] = self._function("%", rest, b)
        return self._known[key]

    def _is_digit(self, a: Poly, b: Poly) -> bool:
        """Whether 0 <= a < b is sure."""
        low = self.low(a)
        if low is None or low < 0:
            return False
        room = self.low(self.add(b, a, -1))
        return room is not None and room >= 1

    def _divide(self, a: Poly, b: Poly) -> tuple[Poly, Poly]:
        """(q, r) with a = q * b + r, as far as polynomials divide."""
        if not b.terms:
            raise ZeroDivisionError("size expression: division by zero")
        lead, lead_coefficient = b.terms[-1]
        quotient: dict[Monomial, int] = {}
        rest = dict(a.terms)
        for monomial in sorted(rest, key=_degree, reverse=True):
            coefficient = rest.get(monomial, 0)
            part = _without(monomial, lead)
            if part is None or not coefficient:
                continue
            times = coefficient // lead_coefficient
            if not times or (len(b.terms) == 1 and lead and coefficient % lead_coefficient):
                continue
            if len(b.terms) > 1 and coefficient % lead_coefficient:
                continue
            quotient[part] = quotient.get(part, 0) + times
            for other, c in b.terms:
                place = tuple(sorted(part + other))
                rest[place] = rest.get(place, 0) - times * c
        if b.constant is not None:  # what is left over of coefficients: 7*s // 4 is s + 3*s // 4
            return self._of(quotient), self._of(rest)
        remainder = self._of(rest)
        if len(b.terms) > 1 and remainder.terms:
            return self.number(0), a  # of a sum only what divides whole
        return self._of(quotient), remainder

    def _function(self, kind: str, a: Poly, b: Poly) -> Poly:
        key = (kind, a.number, b.number)
        if key not in self._atom_of:
            compute = int.__floordiv__ if kind == "//" else int.__mod__
            low_a, low_b = self.low(a), self.low(b)
            positive = low_b is not None and low_b >= 1
            low: int | None = None
            if kind == "%":
                low = 0 if positive else None
            elif positive and low_a is not None:
                low = low_a // b.constant if b.constant else min(0, low_a)
            if not b.value or not b.hint:
                raise ZeroDivisionError("size expression: division by zero")
            self._new_atom(key, kind, "", compute(a.value, b.value), compute(a.hint, b.hint), low, a, b)
        return self._poly((((self._atom_of[key],), 1),))

    def _new_atom(self, key: Any, kind: str, name: str, value: int, hint: int, low: int | None, *parts: Poly) -> None:
        self._atom_of[key] = len(self._atoms)
        self._atoms.append(_Atom(kind, name, value, hint, low, *parts))

    def _of(self, terms: Mapping[Monomial, int]) -> Poly:
        return self._poly(tuple(sorted(((m, c) for m, c in terms.items() if c), key=lambda term: _degree(term[0]))))

    def _poly(self, terms: Terms) -> Poly:
        found = self._polys.get(terms)
        if found is None:
            value = hint = 0
            for monomial, coefficient in terms:
                here = there = coefficient
                for atom in monomial:
                    here *= self._atoms[atom].value
                    there *= self._atoms[atom].hint
                value, hint = value + here, hint + there
            found = self._polys[terms] = Poly(len(self.by_number), terms, value, hint)
            self.by_number.append(found)
        return found

    # ---- knowing

    def low(self, poly: Poly) -> int | None:
        """A lower bound, where one can be proved."""
        if poly._low is _UNKNOWN:
            poly._low = None  # a proof that comes round to itself is none
            poly._low = self._prove_low(poly, _DEPTH)
        return poly._low  # type: ignore[no-any-return]

    def _prove_low(self, poly: Poly, depth: int) -> int | None:
        shifted: dict[Monomial, int] = {}
        for monomial, coefficient in poly.terms:
            parts: dict[Monomial, int] = {(): coefficient}
            for number in monomial:
                low = self._atoms[number].low
                if low is None:
                    return None
                grown: dict[Monomial, int] = {}
                for part, c in parts.items():
                    for place, d in ((tuple(sorted((*part, number))), c), (part, c * low)):
                        grown[place] = grown.get(place, 0) + d
                parts = grown
            for part, c in parts.items():
                shifted[part] = shifted.get(part, 0) + c
        if all(c >= 0 for part, c in shifted.items() if part):
            return shifted.get((), 0)
        return self._prove_below_division(poly, depth) if depth else None

    def _prove_below_division(self, poly: Poly, depth: int) -> int | None:
        """k * (p // c) is at least k * (p - c + 1) / c, -k * (p // c) at least -k * p / c, and -k * (p % q) at least
        -k * (q - 1)."""
        for monomial, coefficient in poly.terms:
            if len(monomial) != 1:
                continue
            atom = self._atoms[monomial[0]]
            if atom.left is None or atom.right is None or (coefficient > 0 and atom.kind == "%"):
                continue
            rest = self._of({m: c for m, c in poly.terms if m != monomial})
            if atom.kind == "%" and (self.low(atom.right) or 0) >= 1:
                return self._prove_low(self.add(rest, self.add(atom.right, self.number(1), -1), coefficient), depth - 1)
            divisor = atom.right.constant
            if atom.kind == "//" and divisor is not None and divisor > 0:
                bound = atom.left if coefficient < 0 else self.add(atom.left, self.number(divisor - 1), -1)
                scaled = self.add(self.mul(rest, self.number(divisor)), bound, coefficient)
                low = self._prove_low(scaled, depth - 1)
                return None if low is None else -(-low // divisor)
        return None

    # ---- telling

    def structure(self, poly: Poly) -> Structure:
        """The expression as nested tuples: ("+", (coefficient, factor, ...), ...) with factors that are symbol names or
        ("//" | "%", left, right)."""
        return ("+", *((c, *(self._atom_structure(a) for a in monomial)) for monomial, c in poly.terms))

    def _atom_structure(self, number: int) -> Structure:
        atom = self._atoms[number]
        if atom.left is None or atom.right is None:
            return atom.name
        return (atom.kind, self.structure(atom.left), self.structure(atom.right))

    def read(self, structure: Structure) -> Poly:
        """The expression that `structure` told of, in this space."""
        total = self.number(0)
        for coefficient, *factors in structure[1:]:
            product = self.number(coefficient)
            for factor in factors:
                product = self.mul(product, self._read_atom(factor))
            total = self.add(total, product)
        return total

    def _read_atom(self, factor: Structure) -> Poly:
        if isinstance(factor, str):
            return self.symbol(factor)
        kind, left, right = factor
        return (self.floor_div if kind == "//" else self.mod)(self.read(left), self.read(right))


def python_text(structure: Structure) -> str:
    """The expression as Python source over its symbols' names; ValueError for what is no structure."""
    if not isinstance(structure, (tuple, list)) or not structure or structure[0] != "+":
        raise ValueError(f"size expression: {structure!r} is no sum")
    parts = []
    for term in structure[1:]:
        coefficient, *factors = term
        if type(coefficient) is not int:
            raise ValueError(f"size expression: the coefficient {coefficient!r} is no int")
        texts = [_factor_text(factor) for factor in factors]
        parts.append(" * ".join([*texts, *([f"({coefficient})"] if coefficient != 1 or not texts else [])]))
    return " + ".join(parts) or "0"


def _factor_text(factor: Structure) -> str:
    if isinstance(factor, str):
        if not factor.isidentifier():
            raise ValueError(f"size expression: {factor!r} is no name of a symbol")
        return factor
    kind, left, right = factor
    if kind not in ("//", "%"):
        raise ValueError(f"size expression: no function {kind!r}")
    return f"(({python_text(left)}) {kind} ({python_text(right)}))"


def _degree(monomial: Monomial) -> tuple[int, Monomial]:
    return len(monomial), monomial


def _without(monomial: Monomial, part: Monomial) -> Monomial | None:
    """The monomial divided by `part`, or None."""
    left = list(monomial)
    for atom in part:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)
