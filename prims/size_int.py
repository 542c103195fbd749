"""Tracked sizes: ints that remember how they came from the symbols of a program, and what was decided by them.

A compiler that plans with tracked sizes does what it does with ints. Sums and products know their expression; a
comparison that the expression does not decide is answered by the value, and the answer is kept as a guard: for other
sizes the plan holds only if the guards do. Printing a tracked size gives its marker, a name, so that text made with it
holds for all sizes.

Invariant: every answer that depends on the value leaves a guard, except `hint(x)`, which is for heuristics: choices
that are right for any size. C code may read the value unseen (range, sequence repeat, `1.0 / size`, most of torch):
whoever plans with tracked sizes plans twice, with other values and the same hints, and compares.
"""

from __future__ import annotations

import operator
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torchlazy.prims.size_expr import Poly, SizeExprs, Structure, Symbol, python_text

_spaces: weakref.WeakValueDictionary[int, SizeSpace] = weakref.WeakValueDictionary()
_numbers = count()
_MARKER = re.compile(r"\bSZ(\d+)x(\d+)\b")


@dataclass(frozen=True, slots=True)
class Guard:
    """`kind` of the expression: "eq" 0, "ne" 0, "ge" 0; or of two floats: "flt" is true, "fnot" is not. `why` names the
    line that asked."""

    kind: str
    expr: Structure
    why: str = ""


class SizeSpace:
    """The symbols of one planning, their tracked sizes, and the guards so far."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self.exprs = SizeExprs(symbols)
        self.key = next(_numbers)
        self.guards: dict[tuple[str, Any], Guard] = {}
        self.pins: list[str] = []  # where a plain number was taken: the plan holds for this value alone
        _spaces[self.key] = self

    def size(self, poly: Poly) -> int:
        """The tracked size of an expression; a plain int where it is constant."""
        constant = poly.constant
        if constant is not None:
            return constant
        if poly.integer is None:
            poly.integer = SizeInt._make(poly, self)
        return poly.integer  # type: ignore[no-any-return]

    def symbol(self, name: str) -> int:
        """The tracked size that is this symbol."""
        return self.size(self.exprs.symbol(name))

    def read(self, structure: Structure) -> int:
        """The tracked size of an expression told as a structure."""
        return self.size(self.exprs.read(structure))

    def decide(self, kind: str, poly: Poly) -> bool:
        """Whether the expression is equal to ("eq") or at least ("ge") zero; guarded unless it is proved."""
        constant = poly.constant
        if constant is not None:
            return constant == 0 if kind == "eq" else constant >= 0
        low = self.exprs.low(poly)
        if low is not None and low > 0:
            return kind == "ge"
        negative = self.exprs.add(self.exprs.number(0), poly, -1)
        below = self.exprs.low(negative)
        if kind == "eq":
            if below is not None and below > 0:
                return False
            outcome = poly.value == 0
            self._guard("eq" if outcome else "ne", poly)
            return outcome
        if low is not None and low >= 0:
            return True
        if below is not None and below > 0:
            return False
        outcome = poly.value >= 0
        self._guard("ge", poly if outcome else self.exprs.add(negative, self.exprs.number(1), -1))
        return outcome

    def _guard(self, kind: str, poly: Poly) -> None:
        key = (kind, poly.number)
        if key not in self.guards:
            self.guards[key] = Guard(kind, self.exprs.structure(poly), _asking_line())

    def guard_floats(self, relation: str, left: Structure, right: Structure, outcome: bool) -> None:
        key = ("float", (relation, left, right, outcome))
        if key not in self.guards:
            self.guards[key] = Guard("flt" if outcome else "fnot", (relation, left, right), _asking_line())

    def pin(self, poly: Poly, what: str) -> int:
        """A plain number for code that takes no other: the plan then holds for this value alone."""
        self.pins.append(f"{what} of {python_text(self.exprs.structure(poly))} at {_asking_line()}")
        self._guard("eq", self.exprs.add(poly, self.exprs.number(poly.value), -1))
        return poly.value


def _asking_line() -> str:
    """The line of the compiler that asked, and the graph node that it works on."""
    frame: Any = sys._getframe(2)
    own = (__file__, "<string>")
    while frame is not None and frame.f_code.co_filename in own:
        frame = frame.f_back
    if frame is None:
        return "?"
    place = f"{frame.f_code.co_filename.rpartition('torchlazy/')[2].rpartition('/main/')[2]}:{frame.f_lineno}"
    for _ in range(12):
        node: Any = frame.f_locals.get("node") if frame is not None else None
        if hasattr(node, "meta") and hasattr(node, "target"):
            return f"{place}, for {getattr(node.target, '__name__', node.target)} {node.meta.get('frame', '')}".strip()
        frame = frame.f_back if frame is not None else None
    return place


class SizeInt(int):
    """A tracked size. Made by a `SizeSpace`; one object for each expression of it."""

    poly: Poly
    space: SizeSpace

    @staticmethod
    def _make(poly: Poly, space: SizeSpace) -> SizeInt:
        self = int.__new__(SizeInt, poly.value)
        self.poly = poly
        self.space = space
        return self

    @property
    def hint(self) -> int:
        """The value that heuristics see."""
        return self.poly.hint

    @property
    def marker(self) -> str:
        """The name that stands for this size in generated text."""
        return f"SZ{self.space.key}x{self.poly.number}"

    @property
    def low(self) -> int | None:
        """A lower bound that holds for all sizes."""
        return self.space.exprs.low(self.poly)

    def _other(self, other: Any) -> Poly | None:
        if type(other) is SizeInt:
            return other.poly
        if isinstance(other, int):
            return self.space.exprs.number(int(other))
        return None

    def __hash__(self) -> int:
        return hash((self.space.key, self.poly.number, "size"))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        poly = self._other(other)
        if poly is None:
            return NotImplemented
        return self.space.decide("eq", self.space.exprs.add(self.poly, poly, -1))

    def __ne__(self, other: object) -> bool:
        answer = self.__eq__(other)
        return answer if answer is NotImplemented else not answer

    def __bool__(self) -> bool:
        return not self.space.decide("eq", self.poly)

    def __repr__(self) -> str:
        return self.marker

    def __str__(self) -> str:
        return self.marker

    def __format__(self, spec: str) -> str:
        return format(self.marker, spec)

    def __int__(self) -> int:
        return self.space.pin(self.poly, "int()")

    def __index__(self) -> int:
        return self.space.pin(self.poly, "index")

    def __float__(self) -> float:
        return float(self.space.pin(self.poly, "float()"))

    def __pos__(self) -> int:
        return self

    def __neg__(self) -> int:
        exprs = self.space.exprs
        return self.space.size(exprs.add(exprs.number(0), self.poly, -1))

    def __abs__(self) -> int:
        return self if self >= 0 else -self

    def __pow__(self, power: Any, modulo: Any = None) -> Any:
        if modulo is None and type(power) is int and 0 <= power <= 4:
            result: Any = 1
            for _ in range(power):
                result = result * self
            return result
        return self.space.pin(self.poly, "power") ** power

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __truediv__(self, other: Any) -> Any:
        return _float_operation("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _float_operation("/", other, self)

    def bit_length(self) -> int:
        return self.space.pin(self.poly, "bit_length").bit_length()

    def __reduce__(self) -> Any:
        raise TypeError("a tracked size belongs to its planning and is not pickled or copied")

    def __copy__(self) -> SizeInt:
        return self

    def __deepcopy__(self, memo: Any) -> SizeInt:
        return self


def _define_operators() -> None:
    def binary(name: str, combine: Callable[[SizeExprs, Poly, Poly], Poly], symbol: str) -> None:
        def forward(self: SizeInt, other: Any) -> Any:
            poly = self._other(other)
            if poly is None:
                return _float_operation(symbol, self, other)
            return self.space.size(combine(self.space.exprs, self.poly, poly))

        def backward(self: SizeInt, other: Any) -> Any:
            poly = self._other(other)
            if poly is None:
                return _float_operation(symbol, other, self)
            return self.space.size(combine(self.space.exprs, poly, self.poly))

        setattr(SizeInt, f"__{name}__", forward)
        setattr(SizeInt, f"__r{name}__", backward)

    binary("add", lambda e, a, b: e.add(a, b), "+")
    binary("sub", lambda e, a, b: e.add(a, b, -1), "-")
    binary("mul", lambda e, a, b: e.mul(a, b), "*")
    binary("floordiv", lambda e, a, b: e.floor_div(a, b), "//")
    binary("mod", lambda e, a, b: e.mod(a, b), "%")

    def ordered(name: str, swap: bool, strict: bool, relation: str) -> None:
        def compare(self: SizeInt, other: Any) -> Any:
            poly = self._other(other)
            if poly is None:
                return _compare_floats(relation, self, other) if isinstance(other, float) else NotImplemented
            exprs = self.space.exprs
            larger, smaller = (poly, self.poly) if swap else (self.poly, poly)
            difference = exprs.add(larger, smaller, -1)
            return self.space.decide("ge", exprs.add(difference, exprs.number(1), -1) if strict else difference)

        setattr(SizeInt, f"__{name}__", compare)

    ordered("lt", True, True, "<")
    ordered("le", True, False, "<=")
    ordered("gt", False, True, ">")
    ordered("ge", False, False, ">=")

    def pinned(name: str) -> None:
        function = getattr(operator, name if name in ("lshift", "rshift", "xor") else f"{name}_")

        def forward(self: SizeInt, other: Any) -> Any:
            return function(self.space.pin(self.poly, name), integer_of(other))

        def backward(self: SizeInt, other: Any) -> Any:
            return function(integer_of(other), self.space.pin(self.poly, name))

        setattr(SizeInt, f"__{name}__", forward)
        setattr(SizeInt, f"__r{name}__", backward)

    for name in ("lshift", "rshift", "and", "or", "xor"):
        pinned(name)


class SizeFloat(float):
    """A float computed from tracked sizes: a tree of operations on expressions and numbers."""

    tree: Structure
    space: SizeSpace

    @staticmethod
    def _make(value: float, tree: Structure, space: SizeSpace) -> SizeFloat:
        self = float.__new__(SizeFloat, value)
        self.tree = tree
        self.space = space
        return self

    def __hash__(self) -> int:
        return hash((self.space.key, self.tree))

    def __repr__(self) -> str:
        return self.text(lambda size: size.marker)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def text(self, size_text: Callable[[SizeInt], str]) -> str:
        """The tree as source that C, Python and Triton read alike; `size_text` writes a size as a float."""
        return _tree_text(self.tree, self.space, size_text)

    def __float__(self) -> float:
        self.space.pins.append(f"float() of {self!r} at {_asking_line()}")
        self.space.guard_floats("==", self.tree, float.__add__(self, 0.0), True)
        return float.__add__(self, 0.0)

    def __bool__(self) -> bool:
        return not _compare_floats("==", self, 0.0)

    def __neg__(self) -> Any:
        return _float_operation("*", self, -1.0)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return _compare_floats("==", self, other) if isinstance(other, int | float) else NotImplemented

    def __ne__(self, other: object) -> bool:
        answer = self.__eq__(other)
        return answer if answer is NotImplemented else not answer


def _define_float_operators() -> None:
    def binary(name: str, symbol: str) -> None:
        setattr(SizeFloat, f"__{name}__", lambda self, other: _float_operation(symbol, self, other))
        setattr(SizeFloat, f"__r{name}__", lambda self, other: _float_operation(symbol, other, self))

    for name, symbol in (("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/")):
        binary(name, symbol)
    for name, symbol in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
        relation = symbol
        setattr(SizeFloat, f"__{name}__", lambda self, other, relation=relation: _compare_floats(relation, self, other))


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
}  # fmt: skip


def _tree(value: Any) -> Structure:
    if type(value) is SizeInt:
        return ("size", value.space.exprs.structure(value.poly))
    if type(value) is SizeFloat:
        return value.tree
    return value


def _raw(value: Any) -> Any:
    """The value itself, with no guard: for computing on, never for deciding by."""
    if type(value) is SizeInt:
        return value.poly.value
    return float.__add__(value, 0.0) if type(value) is SizeFloat else value


def _float_operation(symbol: str, left: Any, right: Any) -> Any:
    if symbol not in _OPERATIONS or not all(isinstance(v, int | float) for v in (left, right)):
        return NotImplemented
    space = next(v.space for v in (left, right) if isinstance(v, SizeInt | SizeFloat))
    value = _OPERATIONS[symbol](_raw(left), _raw(right))
    return SizeFloat._make(value, (symbol, _tree(left), _tree(right)), space)


def _compare_floats(relation: str, left: Any, right: Any) -> bool:
    if not all(isinstance(v, int | float) for v in (left, right)):
        return NotImplemented
    space = next(v.space for v in (left, right) if isinstance(v, SizeInt | SizeFloat))
    outcome = bool(_OPERATIONS[relation](_raw(left), _raw(right)))
    space.guard_floats(relation, _tree(left), _tree(right), outcome)
    return outcome


def _tree_text(tree: Structure, space: SizeSpace | None, size_text: Callable[[SizeInt], str]) -> str:
    if isinstance(tree, tuple):
        if tree[0] == "size":
            assert space is not None
            return size_text(space.read(tree[1]))  # type: ignore[arg-type]
        symbol, left, right = tree
        return f"({_tree_text(left, space, size_text)} {symbol} {_tree_text(right, space, size_text)})"
    return f"({float(tree)!r})"


_define_operators()
_define_float_operators()


# ---- what compilers ask


def is_tracked(value: Any) -> bool:
    """Whether a number is a tracked size or computed from some."""
    return type(value) is SizeInt or type(value) is SizeFloat


def hint(value: Any) -> Any:
    """A plain number for choices that are right for any size: of a tracked size the one that heuristics see."""
    if type(value) is SizeInt:
        return value.poly.hint
    if type(value) is SizeFloat:
        return float.__add__(value, 0.0)
    return value


def value_now(value: Any) -> Any:
    """The number that a tracked size is while planning, with no guard: to compare with what torch computed from it."""
    return _raw(value)


def integer_of(value: Any) -> int:
    """`int(value)` that lets a tracked size stay one."""
    return value if isinstance(value, int) else int(value)


def divides(divisor: int, value: int) -> bool:
    """Whether `value % divisor == 0`; of tracked sizes whether that is sure, and no guard is left."""
    if type(divisor) is not SizeInt and type(value) is not SizeInt:
        return value % divisor == 0
    return _constant(value % divisor) == 0


def surely_less(a: int, b: int) -> bool:
    """Whether `a < b`; of tracked sizes whether that is sure, and no guard is left."""
    return surely_at_least(b - a, 1)


def surely_at_least(a: int, b: int) -> bool:
    """Whether `a >= b`; of tracked sizes whether that is sure, and no guard is left."""
    difference = a - b
    if type(difference) is SizeInt:
        low = difference.low
        return low is not None and low >= 0
    return difference >= 0


def surely_equal(a: int, b: int) -> bool:
    """Whether `a == b`; of tracked sizes whether they are one expression, and no guard is left."""
    if type(a) is SizeInt or type(b) is SizeInt:
        return a is b
    return a == b


def clamped(value: int, low: int, high: int | None = None) -> int:
    """`max(low, min(value, high))`; of tracked sizes with no guard where the order is sure."""
    if high is not None and not surely_at_least(high, value):
        value = high if surely_at_least(value, high) else min(value, high)
    if surely_at_least(value, low):
        return value
    return low if surely_at_least(low, value) else max(value, low)


def same_sizes(a: Sequence[int], b: Sequence[int]) -> bool:
    """`surely_equal` of each pair; False where the lengths differ."""
    return len(a) == len(b) and all(surely_equal(x, y) for x, y in zip(a, b, strict=True))


def _constant(value: int) -> int | None:
    return None if type(value) is SizeInt else value


def markers_in(text: str) -> list[SizeInt]:
    """The tracked sizes whose markers stand in a text, each once, in the order of their first place."""
    found: dict[tuple[str, str], None] = dict.fromkeys(_MARKER.findall(text))
    sizes = []
    for space, number in found:
        owner = _spaces[int(space)]
        sizes.append(owner.size(owner.exprs.by_number[int(number)]))
    return sizes  # type: ignore[return-value]


def rename_markers(text: str, names: dict[str, str]) -> str:
    """The text with each marker replaced by its name."""
    return _MARKER.sub(lambda match: names[match.group(0)], text) if names else text
