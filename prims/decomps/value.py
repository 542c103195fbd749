"""Formulas as algebra: a `Value` is a node of the prims graph under construction with Python's operators on it.

Invariant: every method appends prims only (never ATen), operands of one operator have one dtype, shapes broadcast as
torch's do by explicit `reshape` and `expand`, and a number operand becomes a constant of the other operand's dtype.
Half precision never computes: `compute` widens it to float32 and the rule narrows its result at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, MetaError, NotApplicable
from torchlazy.prims.meta import Dim, TensorMeta, product
from torchlazy.prims.promotion import broadcast_shapes, compute_dtype

# A literal, or the node of a runtime scalar: a number that is an input of the program.
Number: TypeAlias = "bool | int | float | Node"


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The result dtype of `sum` and `prod` when none is asked for: int64 for every integer and bool."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def canonical_axis(axis: int, rank: int) -> int:
    """`axis` counted from the front; rank 0 takes 0 and -1, as torch does."""
    return axis % max(rank, 1)


def canonical_axes(axes: int | Sequence[int] | None, rank: int, *, empty_means_all: bool = True) -> tuple[int, ...]:
    """Sorted axes counted from the front; None (and, for most ATen ops, the empty list) means all of them."""
    if axes is None or (empty_means_all and not isinstance(axes, int) and len(axes) == 0):
        return tuple(range(rank))
    listed = (axes,) if isinstance(axes, int) else axes
    return tuple(sorted(canonical_axis(axis, rank) for axis in listed)) if rank else ()


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor node and the builder that its consumers are appended with."""

    b: Builder
    node: Node

    @property
    def meta(self) -> TensorMeta:
        return self.b.meta(self.node)

    @property
    def shape(self) -> tuple[Dim, ...]:
        return tuple(self.meta.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    def _wrap(self, node: Node) -> Value:
        return Value(self.b, node)

    def _unary(self, prim: P.Prim) -> Value:
        return self._wrap(self.b.prim(prim, self.node))

    def _binary(self, prim: P.Prim, other: Value | Number, *, swapped: bool = False) -> Value:
        other = self.like(other)
        if other.dtype != self.dtype:
            raise MetaError(f"{prim.__name__}: operands of {self.dtype} and {other.dtype} meet in a rule; convert one")
        shape = broadcast_shapes((self.shape, other.shape))
        left, right = self.broadcast(shape), other.broadcast(shape)
        if swapped:
            left, right = right, left
        return self._wrap(self.b.prim(prim, left.node, right.node))

    def like(self, other: Value | Number) -> Value:
        """`other` itself, or the number as a constant of this value's shape, dtype and device."""
        return other if isinstance(other, Value) else self._wrap(self.b.full_like(self.node, other))

    # arithmetic
    def __add__(self, other: Value | Number) -> Value:
        return self._binary(P.add, other)

    def __radd__(self, other: Number) -> Value:
        return self._binary(P.add, other, swapped=True)

    def __sub__(self, other: Value | Number) -> Value:
        return self._binary(P.sub, other)

    def __rsub__(self, other: Number) -> Value:
        return self._binary(P.sub, other, swapped=True)

    def __mul__(self, other: Value | Number) -> Value:
        return self._binary(P.mul, other)

    def __rmul__(self, other: Number) -> Value:
        return self._binary(P.mul, other, swapped=True)

    def __truediv__(self, other: Value | Number) -> Value:
        return self._binary(P.div, other)

    def __rtruediv__(self, other: Number) -> Value:
        return self._binary(P.div, other, swapped=True)

    def __pow__(self, other: Value | Number) -> Value:
        return self._binary(P.pow, other)

    def __neg__(self) -> Value:
        return self._unary(P.neg)

    def __abs__(self) -> Value:
        return self._unary(P.abs)

    def maximum(self, other: Value | Number) -> Value:
        return self._binary(P.maximum, other)

    def minimum(self, other: Value | Number) -> Value:
        return self._binary(P.minimum, other)

    # elementary functions
    def exp(self) -> Value:
        return self._unary(P.exp)

    def expm1(self) -> Value:
        return self._unary(P.expm1)

    def log(self) -> Value:
        return self._unary(P.log)

    def log1p(self) -> Value:
        return self._unary(P.log1p)

    def sqrt(self) -> Value:
        return self._unary(P.sqrt)

    def rsqrt(self) -> Value:
        return self._unary(P.rsqrt)

    def floor(self) -> Value:
        return self._unary(P.floor)

    def sigmoid(self) -> Value:
        """1 / (1 + exp(-x))"""
        return 1.0 / ((-self).exp() + 1.0)

    def isnan(self) -> Value:
        return self._unary(P.isnan)

    def isinf(self) -> Value:
        return self._unary(P.isinf)

    # comparisons and choice (methods, so that `==` keeps its Python meaning)
    def eq(self, other: Value | Number) -> Value:
        return self._binary(P.eq, other)

    def ne(self, other: Value | Number) -> Value:
        return self._binary(P.ne, other)

    def lt(self, other: Value | Number) -> Value:
        return self._binary(P.lt, other)

    def le(self, other: Value | Number) -> Value:
        return self._binary(P.le, other)

    def gt(self, other: Value | Number) -> Value:
        return self._binary(P.gt, other)

    def ge(self, other: Value | Number) -> Value:
        return self._binary(P.ge, other)

    def both(self, other: Value) -> Value:
        """Logical and of two bool values."""
        return self._binary(P.bitwise_and, other)

    def either(self, other: Value) -> Value:
        """Logical or of two bool values."""
        return self._binary(P.bitwise_or, other)

    def where(self, chosen: Value | Number, otherwise: Value | Number) -> Value:
        """`chosen` where this bool value holds, else `otherwise`; at least one of the two is a Value."""
        if isinstance(chosen, Value):
            otherwise = chosen.like(otherwise)
        else:
            assert isinstance(otherwise, Value), "where: both branches are numbers and have no dtype"
            chosen = otherwise.like(chosen)
        shape = broadcast_shapes((self.shape, chosen.shape, otherwise.shape))
        operands = (part.broadcast(shape).node for part in (self, chosen, otherwise))
        return self._wrap(self.b.prim(P.where, *operands))

    # dtype and shape
    def to(self, dtype: torch.dtype) -> Value:
        return self._wrap(self.b.convert(self.node, dtype))

    def reshape(self, shape: Sequence[Dim]) -> Value:
        return self._wrap(self.b.reshape(self.node, tuple(shape)))

    def permute(self, dims: Sequence[int]) -> Value:
        return self._wrap(self.b.permute(self.node, tuple(dims)))

    def unsqueeze(self, axis: int) -> Value:
        return self._wrap(self.b.unsqueeze(self.node, axis))

    def broadcast(self, shape: Sequence[Dim]) -> Value:
        return self._wrap(self.b.broadcast(self.node, tuple(shape)))

    def pad(self, low: Sequence[Dim], high: Sequence[Dim], value: bool | int | float) -> Value:
        return self._wrap(self.b.prim(P.pad, self.node, low=tuple(low), high=tuple(high), value=value))

    def slice(self, starts: Sequence[Dim], stops: Sequence[Dim], steps: Sequence[int]) -> Value:
        attributes = {"starts": tuple(starts), "stops": tuple(stops), "steps": tuple(steps)}
        return self._wrap(self.b.prim(P.slice, self.node, **attributes))

    def narrow(self, axis: int, start: Dim, length: Dim) -> Value:
        """`length` elements from `start` on along one axis."""
        return self._wrap(self.b.slice(self.node, axis, start, start + length))

    # reductions
    def _reduce(self, prim: P.Prim, axes: Sequence[int], keepdim: bool) -> Value:
        reduced = self if len(axes) == 0 else self._wrap(self.b.prim(prim, self.node, axes=tuple(axes)))
        return reduced.reshape(self.kept_shape(axes)) if keepdim else reduced

    def kept_shape(self, axes: Sequence[int]) -> tuple[Dim, ...]:
        """This shape with the reduced axes as 1."""
        return tuple(1 if axis in axes else size for axis, size in enumerate(self.shape))

    def count(self, axes: Sequence[int]) -> Dim:
        """The number of elements that a reduction over `axes` puts together."""
        return product([self.shape[axis] for axis in axes])

    def sum(self, axes: Sequence[int], *, keepdim: bool = False) -> Value:
        return self._reduce(P.sum, axes, keepdim)

    def prod(self, axes: Sequence[int], *, keepdim: bool = False) -> Value:
        return self._reduce(P.prod, axes, keepdim)

    def mean(self, axes: Sequence[int], *, keepdim: bool = False) -> Value:
        return self.sum(axes, keepdim=keepdim) / self.count(axes)

    def amax(self, axes: Sequence[int], *, keepdim: bool = False) -> Value:
        return self._reduce(P.amax, axes, keepdim)

    def amin(self, axes: Sequence[int], *, keepdim: bool = False) -> Value:
        return self._reduce(P.amin, axes, keepdim)

    def any(self, axes: Sequence[int], *, keepdim: bool = False) -> Value:
        return self._reduce(P.any, axes, keepdim)

    def all(self, axes: Sequence[int], *, keepdim: bool = False) -> Value:
        return self._reduce(P.all, axes, keepdim)


def value(b: Builder, node: Node, dtype: torch.dtype | None = None) -> Value:
    """A node as a Value, converted to `dtype` when one is given; complex numbers are left to ATen."""
    wrapped = Value(b, node)
    if wrapped.dtype.is_complex:
        raise NotApplicable("complex dtype")
    return wrapped if dtype is None else wrapped.to(dtype)


def compute(b: Builder, node: Node) -> Value:
    """A node in the dtype that ATen computes in."""
    return value(b, node, compute_dtype(b.meta(node).dtype))


def iota(b: Builder, length: Dim, device: str, *, dtype: torch.dtype = torch.int64) -> Value:
    """0, 1, ... length - 1."""
    return Value(b, b.prim(P.iota, length=length, start=0, step=1, dtype=dtype, device=device))


def welford(x: Value, axes: Sequence[int], *, keepdim: bool = False) -> tuple[Value, Value]:
    """The mean and the sum of squared distances from it."""
    if len(axes) == 0:
        return x, x - x  # a NaN or an infinity leaves NaN, as it does over a longer axis
    mean, m2, _ = x.b.prim(P.welford, x.node, axes=tuple(axes))
    parts = (Value(x.b, mean), Value(x.b, m2))
    if not keepdim:
        return parts
    shape = x.kept_shape(axes)
    return parts[0].reshape(shape), parts[1].reshape(shape)
