"""Tracked numbers as a captured call's Python sees them, in place of floats and ints that may differ at the next call.

To Python they are numbers: `isinstance(lr, float)` holds, arithmetic, rounding, formatting, hashing, `math` and NumPy
work. To torch they are `SymFloat` and `SymInt`, so C code can read their value by `__float__` or `__index__` only,
where it is seen. Arithmetic among them builds expressions; any other use gets the plain value and is reported to the
capture.

Invariant: no plain value is handed out unreported while the capture lasts; afterwards these numbers only give plain
ones, and those that something still references are exchanged (`numbers_left`). `type(x) is float` is not True for
them, as Python has no hook for it; compiled/guards/code.py looks for code that may ask so.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torchlazy.lazy.numbers.expr import MATH, MATH_ASKED, Expression, Listener, TracedNumber, caller, of_type
from torchlazy.lazy.numbers.lookups import container_at, lookup_outcome
from torchlazy.lazy.numbers.questions import TrackedSize, plain_size, range_asked
from torchlazy.lazy.torch_private.patches import patched_float, patched_number, patched_type

_PLAIN = (int, float)


def traced(value: Any, expression: Expression, listener: Listener) -> Any:
    """The number as the program sees it. A bool stays a bool: it is only branched on."""
    kind = _KINDS.get(type(value))
    return value if kind is None else kind(TracedNumber(value, expression, listener))


def node_of(value: Any) -> TracedNumber | None:
    """The node behind a tracked number; None for anything else."""
    if type(value) in _NUMBERS:
        node = value.node
        return node if isinstance(node, TracedNumber) else None
    return None


def as_tracked(value: Any) -> Any:
    """A value from torch as the program should see it: torch's symbolic numbers become tracked numbers."""
    kind = type(value)
    if kind is torch.SymFloat or kind is torch.SymInt:
        node = value.node
        if isinstance(node, TracedNumber):
            return _KINDS[type(node.value)](node)
    return value


def plain_number(value: Any) -> Any:
    """The plain number behind a tracked one, without a report; anything else as it is."""
    node = node_of(value)
    return value if node is None else node.value


def _operand(value: Any) -> Any:
    """A number's (value, expression), or None."""
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return value, value
    if kind is TrackedSize:
        plain = plain_size(value)
        return plain, plain
    if kind in _NUMBERS:
        node = value.node
        return (node.value, node.expression) if isinstance(node, TracedNumber) else None
    if isinstance(value, _PLAIN) and not isinstance(value, numpy.generic):  # an enum's member, a subclass
        return _plain_of(value)
    return None


def _plain_of(value: Any) -> Any:
    plain = int(value) if isinstance(value, int) else float(value)
    return plain, plain


def _binary(name: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        found = _operand(other)
        if found is None:
            if type(other) is complex:
                plain = (other, self.node.escaped_value()) if swapped else (self.node.escaped_value(), other)
                return getattr(operator, name)(*plain)
            return NotImplemented
        mine = (self.node.value, self.node.expression)
        first, second = (found, mine) if swapped else (mine, found)
        return self.node.applied(name, first, second)

    return apply


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        found = _operand(other)
        if found is None:
            return NotImplemented
        if name == "eq" and self.node.is_followed() and container_at(caller()) is not None:
            return bool(self.node.value == found[0])  # a key of the same hash: `__hash__` has reported the outcome
        return self.node.asked(name, (self.node.value, self.node.expression), found)

    return apply


def _unary(name: str) -> Callable[[Any], Any]:
    def apply(self: Any) -> Any:
        return self.node.applied(name, (self.node.value, self.node.expression))

    return apply


def _taken(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on the plain value, which thereby escapes."""

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self.node.escaped_value(), *args, **kwargs)

    return apply


class _Number:
    """What both kinds have in common. Their `node` holds value and expression."""

    node: TracedNumber

    def __init__(self, node: TracedNumber) -> None:
        self.node = node
        node.listener.made(self)

    def __round__(self, digits: Any = None) -> Any:
        mine = (self.node.value, self.node.expression)
        if digits is None:
            return self.node.applied("round", mine)
        return self.node.applied("round_to", mine, (operator.index(digits),) * 2)

    def __bool__(self) -> bool:
        return self.node.asked("ne", (self.node.value, self.node.expression), (0, 0))

    def __hash__(self) -> int:
        """The value's hash. A lookup in a known container is reported as a question, any other as an escape."""
        node = self.node
        if not node.is_followed():
            return hash(node.value)
        found = lookup_outcome(caller(), node.value)
        if found is None:
            return hash(node.escaped_value())
        keys, answer = found
        node.answered("in", (node.expression, keys), answer)
        return hash(node.value)

    def __divmod__(self, other: Any) -> Any:
        quotient = self // other  # type: ignore[operator]
        return NotImplemented if quotient is NotImplemented else (quotient, self % other)  # type: ignore[operator]

    def __rdivmod__(self, other: Any) -> Any:
        quotient = other // self
        return NotImplemented if quotient is NotImplemented else (quotient, other % self)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.node.value), (self.node.escaped_value(),)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return numpy.asarray(self.node.escaped_value(), dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """A Python number among arrays: its type does not decide the result's."""
        plain = [x.node.escaped_value() if type(x) in _NUMBERS else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What plain numbers have beside operators: `is_integer`, `bit_length`, `real`."""
        if name == "node" or name.startswith("__") or not hasattr(type(self.node.value), name):
            raise AttributeError(f"{type(self.node.value).__name__!r} object has no attribute {name!r}")
        return getattr(self.node.escaped_value(), name)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("neg", "pos", "abs", "floor", "ceil", "trunc")
_TAKEN: dict[str, Callable[..., Any]] = {
    "format": format, "repr": repr, "str": str, "float": float, "int": int, "complex": complex,
    "sizeof": lambda value: value.__sizeof__(),
}  # fmt: skip
_INTEGERS = ("and", "or", "xor", "lshift", "rshift")


def _members() -> dict[str, Any]:
    """The methods that Python's operators ask for."""
    found: dict[str, Any] = {name: member for name, member in vars(_Number).items() if callable(member)}
    for name in _BINARY:
        found[f"__{name}__"] = _binary(name)
        found[f"__r{name}__"] = _binary(name, swapped=True)
    found |= {f"__{name}__": _comparison(name) for name in _COMPARISONS}
    found |= {f"__{name}__": _unary(name) for name in _UNARY}
    found |= {f"__{name}__": _taken(function) for name, function in _TAKEN.items()}
    return found


def _integer_members() -> dict[str, Any]:
    found: dict[str, Any] = {"__index__": _taken(operator.index), "__invert__": _taken(operator.invert)}
    for name in _INTEGERS:
        function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        found[f"__{name}__"] = _taken(lambda mine, other, function=function: function(mine, plain_number(other)))
        found[f"__r{name}__"] = _taken(lambda mine, other, function=function: function(plain_number(other), mine))
    return found


def _float_attributes() -> dict[str, Any]:
    """Methods that torch's class defines itself and would compute by its own node."""
    found = {name: _taken(getattr(float, name)) for name in ("is_integer", "hex", "as_integer_ratio", "conjugate")}
    return found | {f"__{side}{name}__": _unsupported for name in _INTEGERS for side in ("", "r")}


def _unsupported(self: Any, other: Any) -> Any:
    return NotImplemented


def _whole(self: Any) -> int:
    """`int(number)`, a plain int: only the truncated value is fixed."""
    return operator.index(self.node.applied("trunc", (self.node.value, self.node.expression)))


TracedFloat: Any = type(
    "float",
    (torch.SymFloat,),
    {**_members(), **_float_attributes(), "__int__": _whole, "__class__": property(lambda self: float)},
)
TracedInt: Any = type(
    "int", (torch.SymInt,), {**_members(), **_integer_members(), "__class__": property(lambda self: int)}
)
_KINDS: dict[type, Any] = {float: TracedFloat, int: TracedInt}
_NUMBERS = frozenset({torch.SymFloat, torch.SymInt, torch.SymBool, TracedFloat, TracedInt})
of_type.update(_KINDS)


@contextlib.contextmanager
def tracked_math() -> Iterator[None]:
    """Inside, some functions of `math` give tracked numbers for tracked numbers, as schedules need. So does `float`
    where batch norms count their batches for a cumulative average, and where gradients are clipped."""
    before = {name: getattr(math, name) for name in (*MATH, *MATH_ASKED)}
    for name, function in before.items():
        setattr(math, name, _followed(name, function))
    try:
        with patched_float(_float_followed), patched_type(_type_of):
            yield
    finally:
        for name, function in before.items():
            setattr(math, name, function)


@contextlib.contextmanager
def tracked_conversions(spaces: Sequence[tuple[dict[str, Any], Sequence[str]]]) -> Iterator[None]:
    """Inside, `float(x)` and `int(x)` of a tensor or a tracked number stay tracked in code with these globals, and
    `range` of a tracked size asks for its value, for the names beside them."""
    followed = {"float": (float, _float_followed), "int": (int, _int_followed), "range": (range, range_asked)}
    with contextlib.ExitStack() as stack:
        for name, (kind, function) in followed.items():
            mine = [space for space, names in spaces if name in names]
            stack.enter_context(patched_number(kind, function, mine))
        yield


def _number_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tracked number that the arguments of a conversion are, or that the tensor gives; else None."""
    if len(args) != 1 or kwargs:
        return None
    value = args[0]
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype is torch.bool or value.dtype.is_complex:
            return None
        value = value.item()
    return None if node_of(value) is None else value


def _float_followed(*args: Any, **kwargs: Any) -> Any:
    """`float(value)` that stays tracked, which the builtin in C would not."""
    number = _number_in(args, kwargs)
    if number is None:
        return float(*args, **kwargs)
    return number.node.applied("sym_float", (number.node.value, number.node.expression))


def _int_followed(*args: Any, **kwargs: Any) -> Any:
    """`int(value)` that stays tracked: an integer as it is."""
    number = _number_in(args, kwargs)
    if number is None or not math.isfinite(number.node.value):
        return int(*args, **kwargs)
    if type(number.node.value) is int:
        return as_tracked(number)
    return number.node.applied("trunc", (number.node.value, number.node.expression))


def _type_of(value: Any) -> type:
    return type(plain_number(value))


def _followed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        node = node_of(args[0]) if len(args) == 1 else None
        if node is None:
            return function(*args)
        followed = node.asked if name in MATH_ASKED else node.applied
        return followed(name, (node.value, node.expression))

    return call


__all__ = ["as_tracked", "node_of", "plain_number", "traced", "tracked_math"]
