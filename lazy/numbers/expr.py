"""Tracked numbers of a capture: Python numbers as expressions over sources, and the nodes behind them.

A number that may differ at the next call (a learning rate, a step count read from an optimizer's state, the loss as
`.item()` gives it) goes through the program as a tracked number (numbers/tracked.py) over a `TracedNumber`: arithmetic
builds the expression that the replay evaluates, with Python's own doubles and ints. Code that asks for the plain value
(a branch, `float()`, `math.sqrt`) gets it, and the capture records that this value was used.

Invariant: an expression evaluated at the values of its sources is bit for bit the number that the program itself would
have computed. A plain value that leaves the expressions is always reported as an escape.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeAlias

import numpy
import torch
from torch.fx.experimental import sym_node as _sym_node
from torchlazy.lazy.torch_private.patches import let_numbers_format

Number: TypeAlias = "int | float | bool"


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A reference to a source, whose value is known at each call: source number `place` of the template."""

    place: int


@dataclass(frozen=True, slots=True)
class Applied:
    """`operation` of `operands`, by Python's own operators. `places`: the sources that it reads."""

    operation: str
    operands: tuple[Any, ...]  # Known, Applied, plain numbers, or a frozenset of these
    places: frozenset[int] = field(init=False, compare=False, repr=False)
    depth: int = field(init=False, compare=False, repr=False)
    hashed: int = field(init=False, compare=False, repr=False)  # operands may be shared: each is hashed once

    def __post_init__(self) -> None:
        depth = 1 + max((operand.depth for operand in self.operands if type(operand) is Applied), default=0)
        object.__setattr__(self, "places", frozenset().union(*map(places_in, self.operands)))
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "hashed", hash((self.operation, self.operands)))

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        pairs: list[tuple[Any, Any]] = [(self, other)]
        seen: set[tuple[int, int]] = set()
        while pairs:
            a, b = pairs.pop()
            if a is b or (id(a), id(b)) in seen:
                continue
            if type(a) is not Applied or type(b) is not Applied:
                if type(a) is Applied or type(b) is Applied or a != b:
                    return False
                continue
            if (a.hashed, a.operation, len(a.operands)) != (b.hashed, b.operation, len(b.operands)):
                return False
            seen.add((id(a), id(b)))
            pairs += zip(a.operands, b.operands, strict=True)
        return True


# Expressions are traversed by recursion. A deeper one counts as escaped.
_DEEPEST = 100


# Frames between a number and the code that asks for its value: the methods of its class.
_WRAPPERS = frozenset(
    {torch.SymFloat.__bool__.__code__.co_filename, _sym_node.__file__, __file__,
     str(Path(__file__).with_name("tracked.py"))}
)  # fmt: skip


def caller() -> FrameType:
    """The frame whose instruction asks something of a number."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _WRAPPERS and frame.f_back is not None:
        frame = frame.f_back
    return frame


Expression: TypeAlias = "SourceRef | Applied | int | float | bool | frozenset[Any]"

_TEXT = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "truediv": "({} / {})", "float_truediv": "({} / {})",
    "int_truediv": "({} / {})", "int_floordiv": "({} // {})", "floordiv": "({} // {})", "mod": "({} % {})",
    "pow": "({} ** {})", "float_pow": "({} ** {})", "pow_by_natural": "({} ** {})", "neg": "(-{})", "pos": "(+{})",
    "abs": "abs({})", "lt": "({} < {})", "le": "({} <= {})", "gt": "({} > {})", "ge": "({} >= {})",
    "eq": "({} == {})", "ne": "({} != {})", "sym_min": "min({}, {})", "sym_max": "max({}, {})", "sym_not": "(not {})",
    "and": "({} and {})", "or": "({} or {})", "sym_and": "({} and {})", "sym_or": "({} or {})",
    "sym_ite": "({1} if {0} else {2})", "sym_float": "float({})", "trunc": "trunc({})", "floor": "floor({})",
    "ceil": "ceil({})", "sym_sqrt": "sqrt({})", "sqrt": "sqrt({})", "round": "round({})", "round_to": "round({}, {})",
    "to_float32": "to_float32({})", "is_c_int": f"(-{2**63} <= {{}} < {2**64})", "in": "({} in {})",
    "taken": "repr({})",
}  # fmt: skip
# Functions of `math` that are tracked as operations, of one number each.
MATH = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "degrees", "erf", "erfc", "exp", "expm1", "gamma",
    "lgamma", "log", "log10", "log1p", "log2", "radians", "sin", "sinh", "sqrt", "tan", "tanh", "fabs",
)  # fmt: skip
# Predicates of `math`, whose results are branched on: a loop that stops where its loss is NaN.
MATH_ASKED = ("isfinite", "isinf", "isnan")
_TEXT |= {name: f"{name}({{}})" for name in (*MATH, *MATH_ASKED)}


def _to_float32(value: Number) -> float:
    """The nearest float32, as a float: C++ narrows some numbers."""
    return float(numpy.float32(value))


_NAMES = {name: getattr(math, name) for name in ("floor", "ceil", "trunc", *MATH, *MATH_ASKED)}
_NAMES["to_float32"] = _to_float32


def text_of(expression: Expression) -> str:
    """The expression as Python over `s0`, `s1`, ..."""
    if isinstance(expression, SourceRef):
        return f"s{expression.place}"
    if isinstance(expression, Applied):
        return _TEXT[expression.operation].format(*map(text_of, expression.operands))
    if isinstance(expression, frozenset):
        return f"{{{', '.join(sorted(map(text_of, expression)))}}}" if expression else "()"
    if isinstance(expression, float) and not math.isfinite(expression):
        return f"float('{expression!r}')"
    return repr(expression)


def places_in(expression: Expression) -> frozenset[int]:
    """The sources that the expression reads."""
    if isinstance(expression, SourceRef):
        return frozenset((expression.place,))
    return expression.places if isinstance(expression, Applied) else frozenset()


def is_deep(expression: Expression) -> bool:
    """Whether the expression is too deep to be built on."""
    return type(expression) is Applied and expression.depth >= _DEEPEST


_ROUNDING = frozenset({"trunc", "floor", "ceil", "round"})


def is_many_to_one(expression: Expression) -> bool:
    """Whether many values of the sources give the same value of the expression: it is made of remainders by constants
    and of rounded numbers only."""
    if not isinstance(expression, Applied):
        return not isinstance(expression, SourceRef)
    if expression.operation in _ROUNDING or (expression.operation == "mod" and not places_in(expression.operands[1])):
        return True
    return all(map(is_many_to_one, expression.operands))


def place_behind(expression: Expression) -> int | None:
    """The source that the expression is, or is a sum or difference of with a constant: one has a value where the other
    has one."""
    if isinstance(expression, SourceRef):
        return expression.place
    if not isinstance(expression, Applied) or expression.operation not in ("add", "sub"):
        return None
    first, second = expression.operands
    found, constant = (second, first) if type(first) is int else (first, second)
    return found.place if type(constant) is int and isinstance(found, SourceRef) else None


def evaluator(expressions: Sequence[Expression]) -> Callable[[Any], list[Number]]:
    """One function from the sources' values to all expressions' values."""
    used = sorted({place for expression in expressions for place in places_in(expression)})
    lines = [f"    s{place} = sources[{place}]" for place in used]
    shared: dict[Expression, str] = {}

    def name_of(expression: Expression) -> str:
        if not isinstance(expression, Applied):
            return text_of(expression)
        found = shared.get(expression)
        if found is None:
            operands = [name_of(operand) for operand in expression.operands]
            found = shared[expression] = f"e{len(shared)}"
            lines.append(f"    {found} = {_TEXT[expression.operation].format(*operands)}")
        return found

    results = [name_of(expression) for expression in expressions]
    text = "\n".join(["def evaluate(sources):", *lines, f"    return [{', '.join(results)}]"])
    names: dict[str, Any] = dict(_NAMES)
    exec(compile(text, "<torchlazy scalars>", "exec"), names)
    function: Callable[[Any], list[Number]] = names["evaluate"]
    return function


def hold(
    evaluate: Callable[[Any], list[Any]], sources: Sequence[Any] | Mapping[int, Any], checks: Sequence[tuple[Any, Any]]
) -> bool:
    """Whether the checked expressions still have their values. One that cannot be computed now was not reached: the
    call took another branch before (it does not divide by zero)."""
    try:
        values = evaluate(sources)
    except (ArithmeticError, ValueError, TypeError):
        return False
    return all(_same(now, then) for now, (_, then) in zip(values, checks, strict=True))


def _same(now: Any, then: Any) -> bool:
    if type(then) is float and type(now) is float:
        return now.hex() == then.hex()
    return type(now) is type(then) and now == then


class Listener(Protocol):
    """Gets a report when a plain value leaves the expressions."""

    def branched(self, node: TracedNumber, outcome: bool, asserted: bool) -> None:
        """The program branched on `outcome`; `asserted`: it would have raised otherwise."""

    @property
    def listens(self) -> bool:
        """Whether the captured call is still running: afterwards numbers are plain."""

    def escaped(self, node: TracedNumber, caller: tuple[int, int]) -> None:
        """The frame and instruction `caller` has the plain value, or the C code that this instruction calls."""

    def taken_plain(self, node: TracedNumber) -> None:
        """Python has the plain value, and what it does by it is not seen."""

    def made(self, number: Any) -> None:
        """The program has this number from now on."""


class TracedNumber:
    """The node behind a `torch.SymFloat`, `torch.SymInt` or `torch.SymBool`: a value and its expression."""

    __slots__ = ("expression", "listener", "value")

    def __init__(self, value: Number, expression: Expression, listener: Listener) -> None:
        self.value = value
        self.expression = expression
        self.listener = listener

    # ---- what torch asks a node for

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def nested_int(self) -> None:
        return None

    maybe_as_int = maybe_as_float = constant_int = constant_bool = nested_int

    @property
    def pytype(self) -> type:
        return type(self.value)

    @property
    def hint(self) -> Number:
        return self.value

    @property
    def shape_env(self) -> None:
        return None

    def clone(self) -> TracedNumber:
        return self

    def wrap_int(self, value: int) -> TracedNumber:
        return TracedNumber(int(value), int(value), self.listener)

    def wrap_float(self, value: float) -> TracedNumber:
        return TracedNumber(float(value), float(value), self.listener)

    def wrap_bool(self, value: bool) -> TracedNumber:
        return TracedNumber(bool(value), bool(value), self.listener)

    def applied(self, name: str, *operands: tuple[Number, Expression]) -> Any:
        """The result of the operation for operands (value, expression): a number as the program sees it."""
        value = _apply(name, *(value for value, _ in operands))
        if not self.listener.listens or type(value) not in of_type:  # a complex root cannot be a program input
            return value if not self.listener.listens else self._escape_all(value, operands)
        if any(is_deep(expression) for _, expression in operands):
            return of_type[type(value)](TracedNumber(self._escape_all(value, operands), value, self.listener))
        if name == "pow":  # the sign of a base or an exponent decides the type of a power
            for operand, expression in operands:
                self.asked("ge", (operand, expression), (0, 0))
        expression = Applied(name, tuple(expression for _, expression in operands))
        return of_type[type(value)](TracedNumber(value, expression, self.listener))

    def _escape_all(self, value: Any, operands: tuple[tuple[Number, Expression], ...]) -> Any:
        for operand, expression in operands:
            TracedNumber(operand, expression, self.listener).escaped_value()
        return value

    def asked(self, name: str, *operands: tuple[Number, Expression]) -> bool:
        """Branch on a comparison: its outcome, which is reported."""
        outcome = bool(_apply(name, *(value for value, _ in operands)))
        self.answered(name, tuple(expression for _, expression in operands), outcome)
        return outcome

    def answered(self, name: str, operands: tuple[Any, ...], outcome: bool) -> None:
        """Report that the program branches on this outcome."""
        expression = Applied(name, operands)
        if self.listener.listens and places_in(expression):
            self.listener.branched(TracedNumber(outcome, expression, self.listener), outcome, False)

    def is_followed(self) -> bool:
        """Whether uses of the number are reported to the capture."""
        return self.listener.listens and bool(places_in(self.expression))

    def escaped_value(self) -> Number:
        """The plain value for Python, which may branch on it unseen: reported as an escape, and as such a branch."""
        if self.is_followed():
            self.listener.taken_plain(self)
        return self._escape()

    def operand_value(self) -> Number:
        """The plain value for an operator, reported as an escape."""
        return self._escape()

    def _escape(self) -> Number:
        if self.listener.listens and places_in(self.expression):
            frame = caller()
            self.listener.escaped(self, (id(frame), frame.f_lasti))
        return self.value

    def guard_int(self, file: str, line: int) -> int:
        return int(self._escape())

    def guard_float(self, file: str, line: int) -> float:
        return float(self._escape())

    def int_(self) -> int:
        return int(self._escape())

    def _branch(self, asserted: bool) -> bool:
        outcome = bool(self.value)
        if self.listener.listens and places_in(self.expression):
            self.listener.branched(self, outcome, asserted)
        return outcome

    def bool_(self) -> bool:
        return self._branch(False)

    def guard_bool(self, file: str, line: int) -> bool:
        return self._branch(False)

    def guard_or_false(self, file: str, line: int) -> bool:
        return self._branch(False)

    guard_or_true = guard_size_oblivious = statically_known_true = guard_or_false

    def expect_true(self, file: str, line: int) -> bool:
        return self._branch(True)

    def expect_size(self, file: str, line: int) -> bool:
        return self._branch(True)

    def __str__(self) -> str:
        return repr(self.escaped_value())

    _graph_repr = __str__

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        if operation == "str":
            return self.__str__
        if operation not in _TEXT and operation.rstrip("_") not in _TEXT:
            raise AttributeError(f"torchlazy: a captured number has no operation {operation!r}")
        name = operation.rstrip("_")

        def apply(*others: TracedNumber) -> TracedNumber:
            value = _apply(name, self.value, *(other.value for other in others))
            operands = (self.expression, *(other.expression for other in others))
            if not any(places_in(operand) for operand in operands):
                return TracedNumber(value, value, self.listener)
            if any(map(is_deep, operands)):
                for number in (self, *others):
                    number.escaped_value()
                return TracedNumber(value, value, self.listener)
            return TracedNumber(value, Applied(name, operands), self.listener)

        return apply


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "truediv": operator.truediv, "float_truediv": operator.truediv, "int_truediv": operator.truediv,
    "int_floordiv": operator.floordiv, "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
    "float_pow": operator.pow, "pow_by_natural": operator.pow, "sym_min": min, "sym_max": max,
    "sym_not": operator.not_, "and": lambda a, b: a and b, "or": lambda a, b: a or b, "sym_float": float,
    "sym_and": lambda a, b: a and b, "sym_or": lambda a, b: a or b, "sym_ite": lambda asked, a, b: a if asked else b,
    "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "sym_sqrt": math.sqrt, "sqrt": math.sqrt,
    "abs": operator.abs, "round": round, "round_to": round, "to_float32": _to_float32,
    "is_c_int": lambda value: -(2**63) <= value < 2**64,
    **{name: getattr(math, name) for name in (*MATH, *MATH_ASKED)},
}  # fmt: skip


def _apply(name: str, *values: Number) -> Any:
    function = _FUNCTIONS.get(name) or getattr(operator, name)
    return function(*values)


# The class of the program's numbers by the type of their value: filled by numbers/tracked.py.
of_type: dict[type, Callable[[TracedNumber], Any]] = {}

let_numbers_format()
