"""Products: the matrix products stay single library calls, what is only a sum of products becomes one.

Invariant: `mm`, `bmm`, `mv`, and `addmm`, `baddbmm`, `addmv` with their bias are extern contractions, handed over as
they are: libraries scale and add the bias in the epilogue. A rule applies where no bias is read or no matrix is.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torchlazy.prims import builder
from torchlazy.prims.builder import Builder, ExternByChoice, rule
from torchlazy.prims.decomps.value import Number, compute, sum_dtype, value
from torchlazy.prims.promotion import compute_dtype

aten = torch.ops.aten

_LIBRARY = "a contraction: the vendor library's kernel, with scale and bias in its epilogue"
_OWN_KERNEL = "ATen's kernel does more than elementwise work; no primitive expresses it"

# Why the linear-algebra operators without a rule have none.
EXTERN_REASONS: dict[torch._ops.OpOverload, str] = {
    aten.mm.default: _LIBRARY,
    aten.bmm.default: _LIBRARY,
    aten._grouped_mm.default: _LIBRARY,
    aten.mv.default: _LIBRARY,
    aten.addmv.default: _LIBRARY,
    aten._addmm_activation.default: _LIBRARY,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _LIBRARY,
    aten._scaled_dot_product_flash_attention.default: _LIBRARY,
    aten._scaled_dot_product_efficient_attention.default: _LIBRARY,
    aten._scaled_dot_product_cudnn_attention.default: _LIBRARY,
    aten.trace.default: _OWN_KERNEL,
    aten.linalg_cross.default: _OWN_KERNEL,
    aten._cdist_forward.default: _OWN_KERNEL,
}
builder.EXTERN_REASONS.update(EXTERN_REASONS)


def _is(number: Number, expected: int) -> bool:
    """Whether a literal factor has that value; a runtime scalar never does."""
    return not isinstance(number, Node) and number == expected


def _scaled(b: Builder, x: Node, alpha: Number) -> Node:
    return x if _is(alpha, 1) else b.aten(aten.mul.Scalar, x, alpha)


def _without_bias(b: Builder, product: torch._ops.OpOverload, left: Node, right: Node, alpha: Number) -> Node:
    """alpha * product(left, right): beta = 0 means that the bias is not even read"""
    return _scaled(b, b.extern(product, left, right), alpha)


@rule(aten.addmm.default)
def addmm(b: Builder, bias: Node, left: Node, right: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    """beta * bias + alpha * left @ right"""
    if _is(beta, 0):
        return _without_bias(b, aten.mm.default, left, right, alpha)
    raise ExternByChoice(_LIBRARY)


@rule(aten.baddbmm.default)
def baddbmm(b: Builder, bias: Node, left: Node, right: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    """beta * bias + alpha * left @ right, for each matrix of the batch"""
    if _is(beta, 0):
        return _without_bias(b, aten.bmm.default, left, right, alpha)
    raise ExternByChoice(_LIBRARY)


@rule(aten.addbmm.default)
def addbmm(b: Builder, bias: Node, left: Node, right: Node, *, beta: Number = 1, alpha: Number = 1) -> Node:
    """beta * bias + alpha * sum over the batch of left @ right: one product of [n, batch * m] and [batch * m, p]"""
    batch, n, m = b.shape(left)
    p = b.shape(right)[2]
    joined = b.reshape(b.permute(left, (1, 0, 2)), (n, batch * m))
    stacked = b.reshape(right, (batch * m, p))
    return b.aten(aten.addmm.default, bias, joined, stacked, beta=beta, alpha=alpha)


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
