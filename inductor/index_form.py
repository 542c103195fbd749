"""Index expressions in integer form: an affine part over numbered atoms, plus the terms that are not affine.

An atom is a loop of known size; a node's range index is a sum of atoms times multipliers (its digits). Fusion compares
and rewrites thousands of indices, so all of it happens on tuples of ints; SymPy is read once per index and written
once.

Invariant: `to_form(e, digits)` equals `e` with each range symbol replaced by its digits; floor divisions and
remainders that the atoms' sizes decide are gone from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, TypeAlias

import sympy
from torchlazy.inductor.size_symbol import SizeSymbol, number_of
from torchlazy.prims.size_int import divides, is_tracked, surely_at_least, surely_less

Digits: TypeAlias = "tuple[tuple[int, int], ...]"  # (atom, multiplier) summed


@dataclass(frozen=True, slots=True)
class Term:
    """`coef * func(*args)`, or `coef * leaf` for an expression free of atoms (the result of an indirect access)."""

    coef: int
    func: Any = None
    args: tuple[Form, ...] = ()
    leaf: sympy.Expr | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """`const + sum(coefs[k] * atom[k]) + sum(terms)`."""

    coefs: tuple[int, ...]
    const: int = 0
    terms: tuple[Term, ...] = ()

    @property
    def is_affine(self) -> bool:
        return not self.terms

    def plus(self, other: Form) -> Form:
        coefs = tuple(a + b for a, b in zip(self.coefs, other.coefs, strict=True))
        return Form(coefs, self.const + other.const, self.terms + other.terms)

    def times(self, factor: int) -> Form:
        if factor == 1:
            return self
        if factor == 0:
            return Form((0,) * len(self.coefs))
        terms = tuple(Term(t.coef * factor, t.func, t.args, t.leaf) for t in self.terms)
        return Form(tuple(c * factor for c in self.coefs), self.const * factor, terms)

    def bounds(self, sizes: Sequence[int]) -> tuple[int, int] | None:
        """The least and greatest value over the atoms; None when a term is not affine."""
        if self.terms:
            return None
        low = high = self.const
        for coef, size in zip(self.coefs, sizes, strict=True):
            if surely_at_least(coef, 0):
                high += coef * (size - 1)
            elif surely_at_least(0, coef):
                low += coef * (size - 1)
            else:
                return None
        return low, high


def to_form(expr: sympy.Expr | int, digits: Mapping[sympy.Symbol, Digits], sizes: Sequence[int]) -> Form:
    """The form of `expr`, whose range symbols are the keys of `digits`, over atoms of these sizes."""
    rank = len(sizes)
    if isinstance(expr, int):
        return Form((0,) * rank, expr)
    number = number_of(expr)
    if number is not None:
        return Form((0,) * rank, number)
    if expr.is_Symbol:
        return _symbol_form(expr, digits, rank)
    if expr.is_Add:
        return _sum_form(expr, digits, sizes)
    if expr.is_Mul:
        coef, rest = expr.as_coeff_Mul()
        if coef.is_Integer and coef != 1:
            return to_form(rest, digits, sizes).times(int(coef))
        tracked = [factor.number for factor in expr.args if isinstance(factor, SizeSymbol)]
        if tracked:
            other = sympy.Mul(*(factor for factor in expr.args if not isinstance(factor, SizeSymbol)))
            return to_form(other, digits, sizes).times(prod(tracked))
    if not expr.free_symbols & digits.keys():
        return Form((0,) * rank, 0, (Term(1, leaf=expr),))
    args = tuple(to_form(arg, digits, sizes) for arg in expr.args)
    return apply_function(expr.func, args, sizes)


def _symbol_form(symbol: sympy.Symbol, digits: Mapping[sympy.Symbol, Digits], rank: int) -> Form:
    places = digits.get(symbol)
    if places is None:
        return Form((0,) * rank, 0, (Term(1, leaf=symbol),))
    coefs = [0] * rank
    for atom, multiplier in places:
        coefs[atom] += multiplier
    return Form(tuple(coefs))


def _sum_form(expr: sympy.Expr, digits: Mapping[sympy.Symbol, Digits], sizes: Sequence[int]) -> Form:
    coefs = [0] * len(sizes)
    const = 0
    terms: list[Term] = []
    for arg in expr.args:
        part = to_form(arg, digits, sizes)
        for atom, coef in enumerate(part.coefs):
            coefs[atom] += coef
        const += part.const
        terms.extend(part.terms)
    return Form(tuple(coefs), const, tuple(terms))


def apply_function(func: Any, args: tuple[Form, ...], sizes: Sequence[int]) -> Form:
    """`func(*args)`; division and remainder by a positive number give up what is known of them."""
    name = func.__name__
    if name in ("FloorDiv", "Mod") and len(args) == 2:
        divisor = args[1]
        if divisor.is_affine and not any(divisor.coefs) and surely_at_least(divisor.const, 1):
            rule = _floor_div if name == "FloorDiv" else _mod
            return rule(func, args[0], divisor.const, sizes)
    return Form((0,) * len(sizes), 0, (Term(1, func, args),))


def _split_multiples(form: Form, divisor: int) -> tuple[Form, Form]:
    """(q, r) with form == divisor * q + r: every coefficient that the divisor divides goes to q."""
    quotient = tuple(c // divisor if divides(divisor, c) else 0 for c in form.coefs)
    rest = tuple(0 if divides(divisor, c) else c for c in form.coefs)
    q_terms = tuple(Term(t.coef // divisor, t.func, t.args, t.leaf) for t in form.terms if divides(divisor, t.coef))
    r_terms = tuple(t for t in form.terms if not divides(divisor, t.coef))
    return Form(quotient, form.const // divisor, q_terms), Form(rest, form.const % divisor, r_terms)


def _within(form: Form, divisor: int, sizes: Sequence[int]) -> bool:
    bounds = form.bounds(sizes)
    return bounds is not None and surely_at_least(bounds[0], 0) and surely_less(bounds[1], divisor)


def _never_negative(form: Form, sizes: Sequence[int]) -> bool:
    """Whether the form is known to be >= 0: divisions, remainders and indirect indices are never negative."""
    low = form.const
    for coef, size in zip(form.coefs, sizes, strict=True):
        if not surely_at_least(coef, 0):
            low = low + coef * (size - 1)
    return surely_at_least(low, 0) and all(surely_at_least(term.coef, 0) for term in form.terms)


def _drop_small(form: Form, divisor: int, sizes: Sequence[int]) -> tuple[Form, int]:
    """floor(form / divisor) == floor(form' / divisor'): the terms below a common factor of the others never carry."""
    if form.terms or any(is_tracked(number) for number in (divisor, form.const, *form.coefs)):
        return form, divisor
    for factor in sorted({gcd(c, divisor) for c in form.coefs if c} - {1}, reverse=True):
        small = Form(tuple(c if c % factor else 0 for c in form.coefs), form.const % factor)
        if _within(small, factor, sizes):
            big = tuple(c // factor if c % factor == 0 else 0 for c in form.coefs)
            return Form(big, form.const // factor), divisor // factor
    return form, divisor


def _floor_div(func: Any, form: Form, divisor: int, sizes: Sequence[int]) -> Form:
    quotient, rest = _split_multiples(form, divisor)
    if not _never_negative(rest, sizes):
        quotient, rest = Form((0,) * len(sizes)), form
    if _within(rest, divisor, sizes):
        return quotient
    rest, divisor = _drop_small(rest, divisor, sizes)
    if divisor == 1:
        return quotient.plus(rest)
    constant = Form((0,) * len(sizes), divisor)
    return quotient.plus(Form((0,) * len(sizes), 0, (Term(1, func, (rest, constant)),)))


def _mod(func: Any, form: Form, divisor: int, sizes: Sequence[int]) -> Form:
    _, rest = _split_multiples(form, divisor)
    if not _never_negative(rest, sizes):
        rest = form
    if _within(rest, divisor, sizes):
        return rest
    constant = Form((0,) * len(sizes), divisor)
    return Form((0,) * len(sizes), 0, (Term(1, func, (rest, constant)),))


def remap(form: Form, mapping: Sequence[Digits], sizes: Sequence[int]) -> Form:
    """The form over new atoms of `sizes`, where old atom k is the digits `mapping[k]`."""
    coefs = [0] * len(sizes)
    for coef, places in zip(form.coefs, mapping, strict=True):
        if is_tracked(coef) or coef:
            for atom, multiplier in places:
                coefs[atom] += coef * multiplier
    result = Form(tuple(coefs), form.const)
    for term in form.terms:
        if term.func is None:
            result = Form(result.coefs, result.const, (*result.terms, term))
        else:
            args = tuple(remap(arg, mapping, sizes) for arg in term.args)
            result = result.plus(apply_function(term.func, args, sizes).times(term.coef))
    return result


def affine_parts(form: Form) -> list[tuple[int, ...]]:
    """The coefficient rows of the form and of every form inside it."""
    rows = [form.coefs]
    for term in form.terms:
        for arg in term.args:
            rows.extend(affine_parts(arg))
    return rows


def select(form: Form, atoms: Sequence[int]) -> Form:
    """The form over a choice of its atoms: each merged axis keeps its innermost atom's coefficient."""
    terms = tuple(Term(t.coef, t.func, tuple(select(arg, atoms) for arg in t.args), t.leaf) for t in form.terms)
    return Form(tuple(form.coefs[atom] for atom in atoms), form.const, terms)


def to_expr(form: Form, axes: Sequence[Any]) -> Any:
    """The form as an expression of the axes' indices: SymPy expressions, or numbers when all axes are numbers."""
    parts = [coef * axis for coef, axis in zip(form.coefs, axes, strict=True) if is_tracked(coef) or coef]
    for term in form.terms:
        value: Any = term.leaf if term.func is None else term.func(*[to_expr(arg, axes) for arg in term.args])
        parts.append(term.coef * value)
    if all(isinstance(part, sympy.Basic) for part in parts):
        return sympy.Add(*parts, sympy.sympify(form.const))
    return sum(parts[1:], parts[0]) + form.const


def wanted_splits(form: Form, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(atom, k): splitting the atom into (size / k, k) would decide a division or remainder in this form."""
    wanted: list[tuple[int, int]] = []
    for term in form.terms:
        for arg in term.args:
            wanted.extend(wanted_splits(arg, sizes))
        if term.func is None or term.func.__name__ not in ("FloorDiv", "Mod"):
            continue
        divisor = term.args[1]
        if any(divisor.coefs) or divisor.terms or not surely_at_least(divisor.const, 1):
            continue
        for atom, coef in enumerate(term.args[0].coefs):
            size = sizes[atom]
            if surely_at_least(coef, 1) and divides(coef, divisor.const):
                low = divisor.const // coef
                if surely_less(1, low) and surely_less(low, size) and divides(low, size):
                    wanted.append((atom, low))
    return wanted
