"""Gradients of padding by reflection and by repetition: border gradients folded back onto the elements they copy.

Invariant: everything is slices, reversals and zero padding of the gradient, added, so it fuses; nothing is written at
computed positions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce

from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.pooling import is_concrete
from torchlazy.prims.decomps.value import Value, compute
from torchlazy.prims.meta import Dim

# A border up to this wide is summed by additions, a wider one by a reduction. On a GPU every point of the loop pays for
# the additions, though few need them: (64, 64, 112, 112) bfloat16 with borders of 3 took 1468 us instead of 119.
MAX_UNROLLED_BORDER = 8
MAX_UNROLLED_BORDER_CUDA = 1


def _placed(part: Value, axis: int, low: int, size: int) -> Value:
    """`part` in a line of `size` zeros along one axis, from `low` on."""
    high = size - low - part.shape[axis]  # type: ignore[operator]
    lows, highs = (tuple(amount if i == axis else 0 for i in range(part.rank)) for amount in (low, high))
    return part.pad(lows, highs, 0.0)


def _reflected(grad: Value, axis: int, low: int, size: int, high: int) -> list[Value]:
    """The left border lies reversed over 1 .. low, the right one over size - 1 - high .. size - 2."""
    parts = []
    for start, length, place in ((0, low, 1), (low + size, high, size - 1 - high)):
        if length:
            border = grad.narrow(axis, start, length)
            border = Value(grad.b, grad.b.prim(P.flip, border.node, axes=(axis,)))
            parts.append(_placed(border, axis, place, size))
    return parts


def _repeated(grad: Value, axis: int, low: int, size: int, high: int) -> list[Value]:
    """The left border adds to the first element, the right one to the last."""
    parts = []
    most = MAX_UNROLLED_BORDER_CUDA if grad.meta.device.startswith("cuda") else MAX_UNROLLED_BORDER
    for start, length, place in ((0, low, 0), (low + size, high, size - 1)):
        if length > most:
            parts.append(_placed(grad.narrow(axis, start, length).sum((axis,), keepdim=True), axis, place, size))
        elif length:
            total = reduce(operator.add, (grad.narrow(axis, start + i, 1) for i in range(length)))
            parts.append(_placed(total, axis, place, size))
    return parts


Borders = Callable[[Value, int, int, int, int], list[Value]]


def _fold(grad: Value, axis: int, low: int, size: int, high: int, borders: Borders) -> Value:
    """The gradient along one axis; negative amounts cut off, so nothing comes back there."""
    if low < 0 or high < 0:
        lows, highs = (tuple(max(-a, 0) if i == axis else 0 for i in range(grad.rank)) for a in (low, high))
        grad = grad.pad(lows, highs, 0.0)
    low, high = max(low, 0), max(high, 0)
    return reduce(operator.add, borders(grad, axis, low, size, high), grad.narrow(axis, low, size))


def _register(name: str, borders: Borders) -> None:
    @rule(f"{name}_pad1d_backward.default", f"{name}_pad2d_backward.default", f"{name}_pad3d_backward.default")
    def pad_backward(b: Builder, grad: Node, x: Node, padding: Sequence[Dim]) -> Node | None:
        g, shape = compute(b, grad), b.shape(x)
        if not is_concrete(*shape, *padding):
            return None
        for i in range(len(padding) // 2):
            axis = g.rank - 1 - i
            low, high = padding[2 * i], padding[2 * i + 1]
            if (low, high) != (0, 0):
                g = _fold(g, axis, low, shape[axis], high, borders)  # type: ignore[arg-type]
        return g.to(b.dtype(x)).node


_register("reflection", _reflected)
_register("replication", _repeated)
