"""Products: the matrix products stay single library calls, what is only a sum of products becomes one.

Invariant: `mm`, `bmm`, `mv`, and `addmm`, `baddbmm`, `addmv` with their bias are extern contractions, handed over as
they are: libraries scale and add the bias in the epilogue. A rule applies where no bias is read or no matrix is.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims.attrs import Dims
from torchlazy.prims.builder import Builder, ExternByChoice, rule
from torchlazy.prims.decomps.indexing import index_along
from torchlazy.prims.decomps.value import Number, Value, canonical_axis, compute, iota, sum_dtype, value
from torchlazy.prims.promotion import broadcast_shapes, compute_dtype

aten = torch.ops.aten

_LIBRARY = "a contraction: the vendor library's kernel, with scale and bias in its epilogue"


def _is(number: Number, expected: int) -> bool:
    """Whether a literal factor has that value; a runtime scalar never does."""
    return not isinstance(number, Node) and number == expected


def _scaled(b: Builder, x: Node, alpha: Number) -> Node:
    """alpha * x; integers are scaled by what is whole of it"""
    if _is(alpha, 1):
        return x
    if not b.dtype(x).is_floating_point and not b.dtype(x).is_complex:
        if isinstance(alpha, Node):
            raise ExternByChoice(_LIBRARY)
        alpha = int(alpha)
    return b.aten(aten.mul.Scalar, x, alpha)


def _without_bias(b: Builder, product: P.Prim, left: Node, right: Node, alpha: Number) -> Node:
    """alpha * product(left, right): beta = 0 means that the bias is not even read"""
    return _scaled(b, b.prim(product, left, right), alpha)


@rule(aten.addmm.default)
def addmm(b: Builder, bias: Node, left: Node, right: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    """beta * bias + alpha * left @ right"""
    if _is(beta, 0):
        return _without_bias(b, P.prim_by_name("mm"), left, right, alpha)
    raise ExternByChoice(_LIBRARY)


@rule(aten.baddbmm.default)
def baddbmm(b: Builder, bias: Node, left: Node, right: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    """beta * bias + alpha * left @ right, for each matrix of the batch"""
    if _is(beta, 0):
        return _without_bias(b, P.prim_by_name("bmm"), left, right, alpha)
    raise ExternByChoice(_LIBRARY)


@rule(aten.addbmm.default)
def addbmm(b: Builder, bias: Node, left: Node, right: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    """beta * bias + alpha * sum over the batch of left @ right: one product of [n, batch * m] and [batch * m, p]"""
    batch, n, m = b.shape(left)
    p = b.shape(right)[2]
    joined = b.reshape(b.permute(left, (1, 0, 2)), (n, batch * m))
    stacked = b.reshape(right, (batch * m, p))
    return b.apply(aten.addmm.default, (bias, joined, stacked), {"beta": beta, "alpha": alpha}, b.wanted)


@rule(aten.addr.default)
def addr(b: Builder, bias: Node, left: Node, right: Node, *, beta: Number = 1, alpha: Number = 1) -> Node | None:
    """beta * bias + alpha * left[:, None] * right[None, :], rounded once"""
    dtypes = {b.dtype(node) for node in (bias, left, right)}
    if len(dtypes) != 1 or not b.dtype(bias).is_floating_point:
        return None
    column, row = compute(b, left).unsqueeze(1), compute(b, right).unsqueeze(0)
    outer = column * row
    outer = outer if _is(alpha, 1) else outer * alpha
    if _is(beta, 0):
        return outer.to(b.dtype(bias)).node
    base = compute(b, bias)
    return ((base if _is(beta, 1) else base * beta) + outer).to(b.dtype(bias)).node


@rule(aten.dot.default, aten.vdot.default)
def dot(b: Builder, left: Node, right: Node) -> Node | None:
    """sum(left * right): reads each element once, so it is as fast as the library's and fuses with its producers"""
    dtype = b.dtype(left)
    if b.dtype(right) != dtype:
        return None
    accumulated = compute_dtype(sum_dtype(dtype))
    x, y = value(b, left, accumulated), value(b, right, accumulated)
    return (x * y).sum((0,)).to(dtype).node


@rule(aten.outer.default)
def outer(b: Builder, left: Node, right: Node) -> Node:
    """left[:, None] * right[None, :]"""
    column, row = value(b, left).unsqueeze(1), value(b, right).unsqueeze(0)
    return b.aten(aten.mul.Tensor, column.node, row.node)


@rule(aten.trace.default)
def trace(b: Builder, x: Node) -> Node:
    """The sum of the diagonal"""
    v = compute(b, x)
    count = min(v.shape)  # type: ignore[type-var]
    places = iota(b, count, v.meta.device)
    total = sum_dtype(b.dtype(x))
    return index_along(v.to(compute_dtype(total)), [places, places], 0).sum((0,)).to(total).node


@rule(aten.linalg_cross.default)
def cross(b: Builder, x: Node, y: Node, *, dim: int = -1) -> Node | None:
    """x[1] * y[2] - x[2] * y[1], and so on around"""
    wanted = b.wanted
    if b.dtype(x) != b.dtype(y):
        return None
    shape = broadcast_shapes((b.shape(x), b.shape(y)))
    left, right = compute(b, x).broadcast(shape), compute(b, y).broadcast(shape)
    axis = canonical_axis(dim, len(shape))

    def part(v: Value, i: int) -> Value:
        return v.narrow(axis, i % 3, 1)

    parts = [part(left, i + 1) * part(right, i + 2) - part(left, i + 2) * part(right, i + 1) for i in range(3)]
    return b.convert(b.prim(P.cat, *(each.node for each in parts), axis=axis), wanted.dtype)


@rule("affine_grid_generator.default")
def affine_grid(b: Builder, theta: Node, size: Dims, align_corners: bool) -> Node | None:
    """The places of an output, in [-1, 1] of its operand: (x, y, 1) theta^T, or (x, y, z, 1) theta^T"""
    dtype, meta = b.dtype(theta), b.meta(theta)
    n = len(size) - 2
    if dtype not in (torch.float32, torch.float64) or not all(isinstance(s, int) for s in (*size, *meta.shape)):
        return None
    spatial = tuple(size[2:])
    columns = []
    for d in reversed(range(n)):
        steps = spatial[d]
        options = {"dtype": dtype, "device": torch.device(meta.device)}
        line = Value(b, b.aten(aten.linspace.default, -1, 1, steps, **options)) if steps > 1 else None
        if line is None:
            line = Value(b, b.full((1,), 0, dtype, meta.device))
        elif not align_corners:
            line = line * ((steps - 1) / steps)
        turned = line.reshape(tuple(steps if i == d else 1 for i in range(n)))
        columns.append(turned.broadcast(spatial).unsqueeze(n).node)
    columns.append(b.full((*spatial, 1), 1, dtype, meta.device))
    base = b.prim(P.cat, *columns, axis=n)
    count = 1
    for s in spatial:
        count = count * s  # type: ignore[assignment]
    base = b.broadcast(b.reshape(base, (1, count, n + 1)), (size[0], count, n + 1))
    grid = b.prim(P.prim_by_name("bmm"), base, b.permute(theta, (0, 2, 1)))
    return b.reshape(grid, (size[0], *spatial, n))
