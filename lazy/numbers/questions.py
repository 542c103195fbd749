"""Tracked sizes: sizes of tensors that a captured call's Python reads, and the comparisons that it makes with them.

A template for all sizes must not serve a size at which the Python would have branched otherwise. While a call is
captured to become part of such a template, the sizes that its Python gets are ints that remember which reads they came
from: sums, products and quotients keep remembering, a comparison is answered by the value and recorded.

Invariant: the Python runs as it would with plain ints, and afterwards they are plain ints. A use that no expression
describes (a square root, the digits of a size) is recorded as a value that must stay. C code may use the value unseen
(a slice of a list, NumPy): what follows from it shows in the operators.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.trace.geometry import Geometry


@dataclass(frozen=True, slots=True)
class SizeRead:
    """The size that was read as number `place`."""

    place: int


@dataclass(frozen=True, slots=True)
class Computed:
    """`operation`, one of `OPERATIONS`, of two expressions."""

    operation: str
    left: Any
    right: Any


Expression: TypeAlias = "SizeRead | Computed | int | float"
ShapeAndStrides: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """An operator call and its results, with Geometries in place of tensors. Not all views are recorded as operators:
    `x[:10]` of fewer rows is `x`, a result that is a view of an argument is a geometry on its memory."""

    op: torch._ops.OpOverload
    is_view: bool
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: Any  # a Geometry, or a tuple of them


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """A comparison ("lt", "le", "gt", "ge", "eq", "ne") and its outcome; "same": `left` must keep its value, which is
    `outcome`; "divided": `left` was divided by `right`, and both the quotient and the remainder may have been used."""

    question: str
    left: Expression
    right: Expression
    outcome: Any


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_SEQUENCES = (list, tuple, str, bytes, bytearray)
_OURS = 3  # references to a size that only the list of all sizes, a loop and the question hold
_SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_NBYTES: Any = torch.Tensor.nbytes.__get__  # type: ignore[attr-defined]
_READERS = frozenset(
    {_SHAPE, _NBYTES, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.stride, torch.numel}
)  # fmt: skip


class SizeQuestions:
    """The sizes read during one capture, in order, and the questions about them. `arguments`: positions of arguments
    that are sizes themselves."""

    def __init__(self, arguments: frozenset[int] = frozenset()) -> None:
        self.arguments = arguments
        self.listens = True
        self.all_stay = False  # the code may count by a size that nothing tells of
        self.reads: list[int] = []
        self._made: list[TrackedSize] = []
        self.asked: dict[SizeQuestion, None] = {}
        self.ran: list[OperatorRun] = []
        self.looked_at: list[ShapeAndStrides] = []  # the tensors whose sizes were read, in order

    def seen(self, func: Any, tensor: torch.Tensor, result: Any) -> Any:
        """The result of a tensor's method as the Python gets it, with tracked sizes."""
        if func is torch.Tensor.__len__:  # `len` gives plain ints, whatever it got
            self.looked_at.append(shape_and_strides_of(tensor))
            self.ask("same", self._read(result).expression, 0, result)
            return result
        if func not in _READERS:
            return result
        self.looked_at.append(shape_and_strides_of(tensor))
        kind = type(result)
        if kind is int:
            return self._read(result)
        if kind is torch.Size or kind is tuple:
            return kind([self._read(size) if type(size) is int else size for size in result])
        return result

    def _read(self, value: int) -> TrackedSize:
        self.reads.append(value)
        found = _sized(value, SizeRead(len(self.reads) - 1), self)
        if self.all_stay:
            self.ask("same", found.expression, 0, value)
        return found

    def track_argument(self, value: int) -> int:
        """A size that is itself an argument, tracked."""
        return self._read(value)

    def record_operator(
        self, op: torch._ops.OpOverload, is_view: bool, args: Any, kwargs: dict[str, Any], results: Any
    ) -> None:
        """Record an operator call with results of these geometries."""
        named = tuple([(name, _frozen(value)) for name, value in kwargs.items()])
        self.ran.append(OperatorRun(op, is_view, _frozen(tuple(args)), named, results))

    def still_held(self) -> list[TrackedSize]:
        """The tracked sizes that are still referenced: after the call they should be plain."""
        made, self._made = self._made, []
        return [size for size in made if sys.getrefcount(size) > _OURS]

    def ask(self, question: str, left: Expression, right: Expression, outcome: Any) -> None:
        """Record a question whose outcome the Python depends on."""
        if self.listens:
            self.asked[SizeQuestion(question, left, right, outcome)] = None


class TrackedSize(int):
    """An int that remembers how it came from sizes that were read."""

    expression: Expression
    sizes: SizeQuestions

    def __reduce__(self) -> Any:
        return int, (int.__add__(self, 0),)

    def __copy__(self) -> int:
        return int.__add__(self, 0)

    def __deepcopy__(self, memo: Any) -> int:
        return int.__add__(self, 0)

    def __hash__(self) -> int:
        self.sizes.ask("same", self.expression, 0, _digits(self))  # it may be a key of a dictionary
        return int.__hash__(self)

    def __bool__(self) -> bool:
        outcome = int.__bool__(self)
        self.sizes.ask("ne", self.expression, 0, outcome)
        return outcome

    def __pos__(self) -> int:
        return self

    def __neg__(self) -> int:
        return 0 - self

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


def range_asked(*bounds: Any) -> range:
    """`range` that records which sizes it was called with: the code may count in its loop."""
    for bound in bounds:
        if type(bound) is TrackedSize:
            bound.sizes.ask("same", bound.expression, 0, int.__add__(bound, 0))
    return range(*map(plain_size, bounds))


def shape_and_strides_of(tensor: torch.Tensor | Geometry) -> ShapeAndStrides:
    """Shape and strides, which distinguish tensors of different sizes."""
    geom = getattr(tensor, "_geometry", tensor)
    if type(geom) is Geometry:
        return geom.shape, geom.strides
    return tuple(tensor.shape), tensor.stride()  # type: ignore[operator,union-attr]


def _sized(value: int, expression: Expression, sizes: SizeQuestions) -> TrackedSize:
    made = int.__new__(TrackedSize, value)
    made.expression, made.sizes = expression, sizes
    sizes._made.append(made)
    return made


def plain_size(value: Any) -> Any:
    """The plain int that a tracked size stands for, also within torch.Size, tuples and lists; all else as it is."""
    kind = type(value)
    if kind is TrackedSize:
        return int.__add__(value, 0)
    if kind in (torch.Size, tuple, list) and any(type(item) is TrackedSize for item in value):
        return kind([plain_size(item) for item in value])
    return value


def _frozen(value: Any) -> Any:
    return tuple([_frozen(item) for item in value]) if isinstance(value, (tuple, list)) else value


def _expression_of(value: Any) -> Any:
    kind = type(value)
    if kind is TrackedSize:
        return value.expression
    return int(value) if kind is int or kind is bool else value if kind is float else None


def _arithmetic(name: str, reflected: bool) -> Callable[[TrackedSize, Any], Any]:
    plain = getattr(int, f"__{'r' if reflected else ''}{name}__")
    compute = OPERATIONS[name]

    def method(self: TrackedSize, other: Any) -> Any:
        if type(other) is float:
            self.sizes.ask("same", self.expression, 0, int.__add__(self, 0))
            return compute(other, float(_digits(self))) if reflected else compute(float(_digits(self)), other)
        result = plain(self, other)
        if type(other) in _SEQUENCES:  # repeated so often
            self.sizes.ask("same", self.expression, 0, _digits(self))
        if result is NotImplemented or not self.sizes.listens:
            return result
        ours, theirs = self.expression, _expression_of(other)
        left, right = (theirs, ours) if reflected else (ours, theirs)
        if name in ("floordiv", "mod"):
            self.sizes.ask("divided", left, right, None)
        return _sized(result, Computed(name, left, right), self.sizes)

    return method


def _digits(value: int) -> int:
    return int.__add__(value, 0)


def _comparison(name: str) -> Callable[[TrackedSize, Any], Any]:
    plain = getattr(int, f"__{name}__")

    def method(self: TrackedSize, other: Any) -> Any:
        outcome = plain(self, other)
        if outcome is NotImplemented and type(other) is float:
            outcome = COMPARISONS[name](_digits(self), other)
        if outcome is not NotImplemented:
            self.sizes.ask(name, self.expression, _expression_of(other), outcome)
        return outcome

    return method


def _taken(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: TrackedSize, *others: Any) -> Any:
        self.sizes.ask("same", self.expression, 0, _digits(self))
        return plain(_digits(self), *map(plain_size, others))

    return method


for _name in OPERATIONS:
    setattr(TrackedSize, f"__{_name}__", _arithmetic(_name, False))
    setattr(TrackedSize, f"__r{_name}__", _arithmetic(_name, True))
for _name in COMPARISONS:
    setattr(TrackedSize, f"__{_name}__", _comparison(_name))  # defined here, they leave `__hash__` as it is
_TAKEN: Collection[str] = (
    "__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__lshift__", "__rlshift__", "__rshift__", "__rrshift__",
    "__and__", "__rand__", "__or__", "__ror__", "__xor__", "__rxor__", "__invert__", "__abs__", "__round__",
    "__float__", "__int__", "__trunc__", "__floor__", "__ceil__", "__str__", "__repr__", "__format__", "bit_length",
    "to_bytes", "bit_count",
)  # fmt: skip
for _name in _TAKEN:
    setattr(TrackedSize, _name, _taken(_name))
