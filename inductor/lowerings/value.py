"""Values of the graph while it is lowered: either a view of memory, or a recipe that a consumer inlines.

Invariant: a `LoweredValue` never changes. A consumer keeps the value that it was lowered with, so a value that is
realized later (put into a buffer) leaves earlier bodies as they were, and every body loads only what earlier nodes
wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torchlazy.inductor.index import Index, dot
from torchlazy.inductor.ir import Buffer
from torchlazy.inductor.ops_handler import OpsHandler
from torchlazy.prims.meta import Dim, TensorMeta, contiguous_strides
from torchlazy.prims.size_int import hint, same_sizes, surely_equal, surely_less

HALVES = (torch.float16, torch.bfloat16)

Loader: TypeAlias = "Callable[[Scope, Index], Any]"


class Scope:
    """One run of a loop body: its handler, and what it has computed already.

    A value that is inlined along several paths is computed once at each index, so bodies cost what their graph of
    values costs, not what its tree does. What a masked body computes is not known outside of it.
    """

    __slots__ = ("_known", "ops")

    def __init__(self, ops: OpsHandler[Any], known: dict[Any, Any] | None = None) -> None:
        self.ops: Any = ops
        self._known: dict[Any, Any] = {} if known is None else known

    def load(self, value: LoweredValue, index: Index) -> Any:
        """`value` at a logical index."""
        key = (value, index)
        if key not in self._known:
            self._known[key] = value.loader(self, index)
        return self._known[key]

    def masked(self, condition: Any, body: Callable[[Scope], Any], other: float) -> Any:
        """`body` where `condition` holds, else `other`."""
        return self.ops.masked(condition, lambda: body(Scope(self.ops, dict(self._known))), other)


@dataclass(frozen=True, slots=True)
class MemoryView:
    """A logical tensor laid over the memory of buffer `root`; `offset` counts from the start of that memory."""

    root: Buffer
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim

    @property
    def is_whole(self) -> bool:
        """Whether this is exactly the buffer itself."""
        return (
            surely_equal(self.offset, self.root.offset)  # type: ignore[arg-type]
            and same_sizes(self.shape, self.root.shape)  # type: ignore[arg-type]
            and same_layout(self.shape, self.strides, self.root.strides)
        )

    @property
    def is_permuted_whole(self) -> bool:
        """Whether every element of the buffer is seen exactly once."""
        if not surely_equal(self.offset, self.root.offset) or not is_dense(self.shape, self.strides):
            return False
        return is_dense(self.root.shape, self.root.strides) and surely_equal(count(self.shape), count(self.root.shape))


@dataclass(frozen=True, eq=False)
class LoweredValue:
    """A tensor of the graph. `chain` names the graph nodes whose work is inlined in `loader`, `reads` the buffers that
    it loads; `layout` are strides that suit it, None when nothing speaks for any.

    A float32 value may lie in memory as a half where graph passes found that ATen would have rounded it anyway: what
    hands memory to others asks `is_stored_as_described` first."""

    meta: TensorMeta
    loader: Loader
    window: MemoryView | None = None
    chain: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    layout: tuple[Dim, ...] | None = None

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.meta.shape

    @property
    def is_stored_as_described(self) -> bool:
        """Whether it lies in memory with the layout and dtype of its metadata."""
        window = self.window
        if window is None or window.root.dtype != self.meta.dtype:
            return False
        return same_layout(self.shape, window.strides, self.meta.strides)


def window_value(meta: TensorMeta, window: MemoryView) -> LoweredValue:
    """A value that lies in memory."""
    name, strides, offset = window.root.name, window.strides, window.offset

    def loader(scope: Scope, index: Index) -> Any:
        return scope.ops.load(name, dot(index, strides, offset))

    layout = strides if is_dense(window.shape, strides) else None
    return LoweredValue(meta, loader, window, frozenset(), frozenset((name,)), layout)


def buffer_value(buffer: Buffer) -> LoweredValue:
    """A whole buffer as a value."""
    return window_value(buffer.meta, MemoryView(buffer, buffer.shape, buffer.strides, buffer.offset))


def computed(
    meta: TensorMeta, loader: Loader, operands: tuple[LoweredValue, ...], name: str | None = None
) -> LoweredValue:
    """A recipe over `operands`; `name` is the graph node whose work it adds (None for a mere index map)."""
    own = frozenset((name,)) if name is not None else frozenset()
    chain = own.union(*(operand.chain for operand in operands))
    reads: frozenset[str] = frozenset().union(*(operand.reads for operand in operands))
    layout = next((o.layout for o in operands if o.layout is not None and same_sizes(o.meta.shape, meta.shape)), None)
    if layout is None:
        layout = next((found for o in operands if (found := _in_order_of(o, meta.shape)) is not None), None)
    return LoweredValue(meta, loader, None, chain, reads, layout)


def _in_order_of(operand: LoweredValue, shape: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """Strides of `shape` (part of the operand, or the operand and a border) with its dimensions in the order in which
    the operand's lie in memory; None where that is row-major anyway, or unknown."""
    layout, sizes = operand.layout, operand.shape
    if layout is None or len(sizes) != len(shape) or not all(isinstance(dim, int) for dim in (*layout, *shape)):
        return None
    if same_layout(sizes, layout, contiguous_strides(sizes)):
        return None
    outermost = max(map(hint, layout)) + 1  # where a dimension of size 1 lies means nothing
    order = sorted(range(len(shape)), key=lambda d: -(outermost if surely_equal(sizes[d], 1) else hint(layout[d])))
    inner = contiguous_strides(tuple(shape[d] for d in order))
    strides: list[Dim] = [0] * len(shape)
    for d, stride in zip(order, inner, strict=True):
        strides[d] = stride
    return tuple(strides)


def count(shape: tuple[Dim, ...]) -> Dim:
    """The number of elements of a shape."""
    total: Dim = 1
    for size in shape:
        total = total * size
    return total


def same_layout(shape: tuple[Dim, ...], a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    """Whether two stride tuples place all elements alike: the stride of a dimension of size 1 means nothing."""
    if same_sizes(a, b):
        return True
    return 0 in shape or all(surely_equal(n, 1) or surely_equal(x, y) for n, x, y in zip(shape, a, b, strict=True))


def is_dense(shape: tuple[Dim, ...], strides: tuple[Dim, ...]) -> bool:
    """Whether the layout is a permutation of row-major: no gaps, no element twice."""
    if not all(isinstance(dim, int) for dim in (*shape, *strides)):
        return False
    expected = 1
    dims = [(s, n) for s, n in zip(strides, shape, strict=True) if not surely_equal(n, 1)]
    for stride, size in sorted(dims, key=lambda dim: (hint(dim[0]), hint(dim[1]))):
        if not surely_equal(stride, expected):
            return False
        expected = expected * size
    return True


def is_overlapping(shape: tuple[Dim, ...], strides: tuple[Dim, ...]) -> bool:
    """Whether two elements may share memory (an expanded dimension, a sliding window)."""
    reach: Dim = 0
    dims = [(s, n) for s, n in zip(strides, shape, strict=True) if not surely_equal(n, 1)]
    for stride, size in sorted(dims, key=lambda dim: (hint(dim[0]), hint(dim[1]))):
        if not surely_less(reach, stride):
            return True
        reach = reach + stride * (size - 1)
    return False
