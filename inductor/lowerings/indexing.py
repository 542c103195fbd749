"""Indexed reads: `gather` and `index`.

Invariant: an index value becomes a symbol through `ops.indirect`, which wraps negative positions and rejects those out
of range; the source is then loaded like anything else. Where negative positions are out of range they become the size,
which is; on devices that cannot raise they are left as they are.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torchlazy.inductor.index import Index
from torchlazy.inductor.lowerings.context import Context, Rule
from torchlazy.inductor.lowerings.value import LoweredValue, Scope, computed


def _position(scope: Scope, indices: LoweredValue, at: Index, size: Any, what: str, wrap: bool) -> sympy.Expr:
    value = scope.load(indices, at)
    if indices.meta.dtype != torch.int64:
        value = scope.ops.to_dtype(value, torch.int64)
    if not wrap and indices.meta.device == "cpu":
        negative = scope.ops.lt(value, scope.ops.constant(0, torch.int64))
        value = scope.ops.where(negative, scope.ops.index_expr(sympy.sympify(size), torch.int64), value)
    return scope.ops.indirect(value, sympy.sympify(size), what)


def _what(node: fx.Node, dim: int, size: Any) -> str:
    frame = node.meta.get("frame")
    name = node.target.__name__  # type: ignore[union-attr]
    return f"{name}: dimension {dim} of size {size}" + (f" at {frame}" if frame else "")


def lower_gather(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """x[..., index[...], ...] along one axis."""
    x, indices = operands
    axis: int = node.kwargs["axis"]  # type: ignore[assignment]
    what, wrap = _what(node, axis, x.shape[axis]), bool(node.kwargs.get("wrap", True))

    def loader(scope: Scope, index: Index) -> Any:
        position = _position(scope, indices, index, x.shape[axis], what, wrap)
        return scope.load(x, (*index[:axis], position, *index[axis + 1 :]))

    return computed(node.meta["val"], loader, (x, indices), node.name)


def lower_index(context: Context, node: fx.Node, operands: tuple[LoweredValue, ...]) -> LoweredValue:
    """Adjacent dimensions of x replaced by the shape of the indices."""
    x, *indices = operands
    dims: tuple[int, ...] = tuple(node.kwargs["dims"])  # type: ignore[arg-type]
    first, rank = dims[0], len(indices[0].shape)
    texts, wrap = [_what(node, d, x.shape[d]) for d in dims], bool(node.kwargs.get("wrap", True))

    def loader(scope: Scope, index: Index) -> Any:
        at = index[first : first + rank]
        positions = [
            _position(scope, each, at, x.shape[d], text, wrap)
            for each, d, text in zip(indices, dims, texts, strict=True)
        ]
        return scope.load(x, (*index[:first], *positions, *index[first + rank :]))

    return computed(node.meta["val"], loader, operands, node.name)


RULES: dict[str, Rule] = {"gather": lower_gather, "index": lower_index}
