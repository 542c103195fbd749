"""Expressions for the numbers of several calls, over few symbols: the sizes in which the calls' arguments differ.

A column is one number in each of the calls. The arguments' columns come first, and each that no simple expression gives
becomes a symbol; every other number must then be an expression of the symbols. Numbers that were the same in all calls
are constants.

Invariant: each expression is right for every call that it was made from. For other calls it is a guess, which its user
checks: by the arguments themselves, by the operators' shapes, and by an audit, whose Python runs after all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement, permutations
from typing import Any, TypeAlias

Column: TypeAlias = "tuple[int, ...]"
_MOST_SYMBOLS = 4
MOST_UNBACKED = 8  # more symbols for unbacked sizes
_DIVISORS = (2, 3, 4, 8, 16, 32)
_MOST_DIVISOR = 64
_SMALL = 4  # of constants beside a symbol
_MOST_DERIVED = 6  # earlier expressions that products are tried with


class DoesNotFit(Exception):
    """No expression of the symbols gives a number; the message says which."""


class SizeFit:
    """Expressions, as Python text over `s0`, `s1`, ..., for columns."""

    def __init__(self, calls: int, late: int = 0) -> None:
        """`late`: how many of the arguments' numbers are unbacked sizes."""
        self.calls = calls
        self._most = _MOST_SYMBOLS + min(late, MOST_UNBACKED)
        self.symbols: list[Column] = []
        self._known: dict[Column, str] = {}

    def add_argument(self, column: Column) -> str:
        """The expression of an argument's number: a new symbol where it changes independently."""
        found = self._find(column)
        if found is None:
            if len(self.symbols) >= self._most:
                raise DoesNotFit(f"more than {self._most} sizes change independently")
            found = self._known[column] = f"s{len(self.symbols)}"
            self.symbols.append(column)
        return found

    def text(self, column: Column, what: str) -> str:
        """The expression of a number that must follow from the arguments."""
        found = self._find(column)
        if found is None:
            raise DoesNotFit(f"{what} was {', '.join(map(str, column))}, which does not follow from the sizes")
        return found

    def note(self, column: Column, text: str) -> None:
        """Numbers of this column have that expression from here on."""
        self._known[column] = text

    def is_known(self, column: Column) -> bool:
        """Whether the number changes, and has an expression already."""
        return column in self._known

    def text_of_float(self, numbers: Sequence[complex], what: str) -> str:
        """The same for a float; complex numbers have no expression."""
        column = [value for value in numbers if type(value) is float]
        if len(column) < len(numbers):
            raise DoesNotFit(f"{what} was {', '.join(map(repr, numbers))}, complex numbers that move with the sizes")
        if len({value.hex() for value in column}) == 1:
            return f"float.fromhex({column[0].hex()!r})"
        for inverse, template in _FLOATS:
            ints = [inverse(value) for value in column]
            if any(value is None for value in ints):
                continue
            found = self._find(tuple(ints))  # type: ignore[arg-type]
            if found is None:
                continue
            text = template.format(f"({found})")
            values = [eval(text, {"sqrt": math.sqrt}, self._at(call)) for call in range(self.calls)]
            if all(type(v) is float and v.hex() == c.hex() for v, c in zip(values, column, strict=True)):
                return text
        raise DoesNotFit(f"{what} was {', '.join(map(repr, column))}, which does not follow from the sizes")

    def _at(self, call: int) -> dict[str, Any]:
        return {f"s{number}": column[call] for number, column in enumerate(self.symbols)}

    def _find(self, column: Column) -> str | None:
        if len(set(column)) == 1:
            return str(column[0]) if column[0] >= 0 else f"({column[0]})"
        found = self._known.get(column)
        if found is None:
            found = next(self._candidates(column), None)
            if found is not None:
                self._known[column] = found
        return found

    def _candidates(self, column: Column) -> Iterator[str]:
        """The simplest expressions first."""
        single = [(f"s{number}", values) for number, values in enumerate(self.symbols)]
        pairs = [_product(*chosen) for chosen in combinations_with_replacement(single, 2)]
        triples = [_product(*chosen) for chosen in combinations_with_replacement(single, 3)]
        yield from self._scaled(column, single)
        yield from self._shifted(column, single, _SMALL)
        yield from self._scaled(column, pairs)
        yield from self._shifted(column, list(self._sums(single)), _SMALL)
        yield from self._scaled(column, triples)
        yield from self._shifted(column, single, None)
        yield from self._affine(column, [*single, *pairs])
        yield from self._shifted(column, list(self._sums(single)), None)
        yield from self._parts(column, single)
        yield from self._rests(column, single)
        if max(column) <= 0:  # what the gradient of a padding is cropped by
            yield from self._negated(column)
        derived = [_product(*chosen) for chosen in self._derived(single)]
        yield from self._scaled(column, derived)
        yield from self._shifted(column, derived, _SMALL)
        yield from self._affine(column, derived)

    def _derived(self, single: Sequence[tuple[str, Column]]) -> Iterator[tuple[tuple[str, Column], ...]]:
        """Products with an earlier expression: half of an image's height times half of its width, or a size times the
        next one."""
        known = [(text, column) for column, text in self._known.items() if "//" in text][-_MOST_DERIVED:]
        for first in known:
            yield (first,)
        for first in known:
            for second in (*known, *single):
                yield (first, second)
        for first in known:
            for second, third in combinations_with_replacement((*known, *single), 2):
                yield (first, second, third)
        moved = [(text, column) for column, text in self._known.items() if "//" not in text and " + " in text]
        for first in moved[-_MOST_DERIVED:]:
            for second in (*moved[-_MOST_DERIVED:], *single):
                yield (first, second)
                for third in single:
                    yield (first, second, third)

    def _negated(self, column: Column) -> Iterator[str]:
        positive = self._find(tuple(-value for value in column))
        if positive is not None:
            yield f"(-{positive})"

    def _scaled(self, column: Column, terms: Sequence[tuple[str, Column]]) -> Iterator[str]:
        for text, values in terms:
            if values[0] and not column[0] % values[0]:
                factor = column[0] // values[0]
                if all(factor * v == c for v, c in zip(values, column, strict=True)):
                    yield f"{factor} * {text}"

    def _shifted(self, column: Column, terms: Sequence[tuple[str, Column]], most: int | None) -> Iterator[str]:
        for text, values in sorted(terms, key=lambda term: abs(column[0] - term[1][0])):
            by = column[0] - values[0]
            if (most is None or abs(by) <= most) and all(c - v == by for v, c in zip(values, column, strict=True)):
                yield f"({text} + {by})"

    def _sums(self, terms: Sequence[tuple[str, Column]]) -> Iterator[tuple[str, Column]]:
        for (a, of_a), (b, of_b) in permutations(terms, 2):
            if a < b:
                yield f"{a} + {b}", tuple(x + y for x, y in zip(of_a, of_b, strict=True))
            yield f"{a} - {b}", tuple(x - y for x, y in zip(of_a, of_b, strict=True))

    def _affine(self, column: Column, terms: Sequence[tuple[str, Column]]) -> Iterator[str]:
        for text, values in terms:
            at = next((i for i, value in enumerate(values) if value != values[0]), None)
            if at is None or (column[at] - column[0]) % (values[at] - values[0]):
                continue
            factor = (column[at] - column[0]) // (values[at] - values[0])
            by = column[0] - factor * values[0]
            if all(factor * v + by == c for v, c in zip(values, column, strict=True)):
                yield f"({factor} * {text} + {by})"

    def _parts(self, column: Column, terms: Sequence[tuple[str, Column]]) -> Iterator[str]:
        """Halves and the like; then the number of windows at a stride, or at several in a row: the divisor is about how
        much faster the size grows."""
        for text, values in terms:
            for divisor in dict.fromkeys((*_DIVISORS, *_slopes(column, values))):
                most = 1 if divisor in _DIVISORS else _SMALL
                for before in range(divisor):
                    after = column[0] - (values[0] + before) // divisor
                    if abs(after) <= most and all(
                        (v + before) // divisor + after == c for v, c in zip(values, column, strict=True)
                    ):
                        yield f"(({text} + {before}) // {divisor} + {after})"

    def _rests(self, column: Column, terms: Sequence[tuple[str, Column]]) -> Iterator[str]:
        """Half a size times two, and the remainder."""
        for text, values in terms:
            for divisor in _DIVISORS:
                for factor in [power for power in _DIVISORS if power <= divisor and not divisor % power]:
                    for before in range(divisor):
                        after = column[0] - factor * ((values[0] + before) // divisor)
                        if abs(after) <= 1 and all(
                            factor * ((v + before) // divisor) + after == c for v, c in zip(values, column, strict=True)
                        ):
                            yield f"({factor} * (({text} + {before}) // {divisor}) + {after})"
                if all(v % divisor == c for v, c in zip(values, column, strict=True)):
                    yield f"({text} % {divisor})"
                if all(-v % divisor == c for v, c in zip(values, column, strict=True)):
                    yield f"(-{text} % {divisor})"


def _slopes(column: Column, values: Column) -> list[int]:
    """Integers near the ratio of the values' differences to the column's."""
    apart, grown = max(values) - min(values), max(column) - min(column)
    near = round(apart / grown)
    return [divisor for divisor in (near, near + 1, near - 1) if 2 <= divisor <= _MOST_DIVISOR]


def _product(*terms: tuple[str, Column]) -> tuple[str, Column]:
    columns = zip(*(values for _, values in terms), strict=True)
    return " * ".join(text for text, _ in terms), tuple(math.prod(values) for values in columns)


def _whole(value: float) -> int | None:
    near = round(value) if math.isfinite(value) else 0
    return near if near and abs(value - near) <= 1e-9 * abs(near) else None


def _reciprocal(power: float) -> Callable[[float], int | None]:
    return lambda value: _whole(value**power) if value > 0 and math.isfinite(value) else None


# From a float back to the int that it was computed from, and the formula.
_FLOATS: tuple[tuple[Callable[[float], int | None], str], ...] = (
    (_whole, "float({0})"),
    (_reciprocal(-1.0), "1.0 / {0}"),
    (_reciprocal(-2.0), "{0} ** -0.5"),
    (_reciprocal(-2.0), "1.0 / sqrt({0})"),
    (_reciprocal(2.0), "{0} ** 0.5"),
    (_reciprocal(2.0), "sqrt({0})"),
)


def symbols_in(text: str) -> frozenset[int]:
    """The numbers of the symbols in an expression."""
    return frozenset(map(int, re.findall(r"\bs(\d+)", text)))


def function_of(symbols: int, texts: Sequence[str]) -> Callable[..., list[Any]]:
    """From the symbols' values to the values of the expressions; ArithmeticError where one has none."""
    distinct = {text: f"v{number}" for number, text in enumerate(dict.fromkeys(texts))}
    lines = [f"    {name} = {text}" for text, name in distinct.items()]
    names = ", ".join(f"s{number}" for number in range(symbols))
    source = "\n".join([f"def values({names}):", *lines, f"    return [{', '.join(distinct[t] for t in texts)}]"])
    namespace: dict[str, Any] = {"sqrt": math.sqrt}
    exec(compile(source, "<torchlazy call sizes>", "exec"), namespace)
    made: Callable[..., list[Any]] = namespace["values"]
    return made
