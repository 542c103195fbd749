"""Passes over prims graphs: Graph -> Graph, each small, each with its algebra as docstring.

Invariant: a pass returns a new graph that computes the same values (bit for bit, except that "fused" precision leaves
out roundings to half) with the same placeholders and outputs, whose results lie in memory as before: a node that would
give way to one of another layout stays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import is_same_layout
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.promotion import HALVES, is_integral

Precision = Literal["fused", "eager"]
Pass = Callable[[fx.Graph], fx.Graph]


class Rewriter:
    """The graph that a fold appends to, with nodes of the new graph."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def prim(self, like: fx.Node, prim: ops.Prim, *operands: fx.Node, **attrs: Any) -> fx.Node:
        """A primitive in the place of `like`: its frame and origin, and its layout."""
        node = self.graph.call_function(prim, operands, attrs)
        node.meta.update(like.meta)
        return node


# A fold sees a node of the new graph, just appended, and returns what takes its place, or None.
Fold = Callable[[Rewriter, fx.Node], "fx.Node | None"]


def _rewrite(graph: fx.Graph, fold: Fold | None = None, keep: Callable[[fx.Node], bool] | None = None) -> fx.Graph:
    """A copy of the graph with `fold` tried on every primitive, and without the nodes that `keep` refuses."""
    new = Rewriter()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "placeholder" and keep is not None and not keep(node):
            continue
        copy = new.graph.node_copy(node, env.__getitem__)
        if fold is not None and node.op == "call_function" and isinstance(node.target, ops.Prim):
            replacement = fold(new, copy)
            if replacement is not None:
                copy = replacement
        env[node] = copy
    return new.graph


def _val(node: fx.Node) -> TensorMeta:
    return node.meta["val"]


def _is(node: Any, prim: ops.Prim) -> bool:
    return isinstance(node, fx.Node) and node.target is prim


def _arg(node: fx.Node, position: int = 0) -> fx.Node:
    operand = node.args[position]
    assert isinstance(operand, fx.Node), f"{node} is no verified primitive"
    return operand


def _can_stand_for(x: fx.Node, node: fx.Node) -> fx.Node | None:
    """x where it is laid out like `node`, which it equals; None where the copy shall stay."""
    a, b = _val(x), _val(node)
    same = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and is_same_layout(a, b)
    return x if same else None


def _constant(node: Any) -> Any:
    """The number of a `full`; None for anything else."""
    if not _is(node, ops.full):
        return None
    value = node.kwargs["value"]
    return None if isinstance(value, fx.Node) else value


# --- dead code and common subexpressions ---


def remove_dead_code(graph: fx.Graph) -> fx.Graph:
    """x unused -> nothing (unless it draws random numbers: dropping it would shift the generator)"""
    live: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        random = isinstance(node.target, ops.Prim) and ops.Kind.EXTERN in node.target.kinds and (
            ops.Kind.RANDOM in node.target.kinds or ops.Kind.COLLECTIVE in node.target.kinds
        )  # fmt: skip
        if node.op == "output" or random or node in live:
            live[node] = None
            live.update(dict.fromkeys(node.all_input_nodes))
    return _rewrite(graph, keep=lambda node: node in live)


def share_common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """f(x), f(x) -> f(x) once; random bits of one seed and stream are a pure function, random externs are not"""
    known: dict[Any, fx.Node] = {}
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copy = new.node_copy(node, env.__getitem__)
        key = _key(copy)
        if key is not None:
            if key in known:
                new.erase_node(copy)
                copy = known[key]
            known[key] = copy
        env[node] = copy
    return new


def _key(node: fx.Node) -> Any:
    if node.op != "call_function":
        return None
    if isinstance(node.target, ops.Prim):
        if {ops.Kind.EXTERN, ops.Kind.RANDOM} <= node.target.kinds or ops.Kind.COLLECTIVE in node.target.kinds:
            return None
    elif node.target is not operator.getitem:
        return None
    return node.target, _frozen(node.args), _frozen(node.kwargs), node.meta["val"]


def _frozen(value: Any) -> Any:
    """A hashable form in which 1, 1.0 and True, and 0.0 and -0.0, stay apart, and a NaN equals itself."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, float):
        return float, value.hex()
    return type(value), value


# --- folds: one rewriting rule each ---


def fold_identity_convert(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """convert(x; dtype of x) -> x, where the layout is the same"""
    is_identity = _is(node, ops.convert) and _val(node).dtype == _val(_arg(node)).dtype
    return _can_stand_for(_arg(node), node) if is_identity else None


def _is_widening(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every number of `source` is one of `target`."""
    if source == target:
        return True
    if torch.bool in (source, target):
        return source == torch.bool
    if is_integral(source) and is_integral(target):
        low, high = torch.iinfo(source), torch.iinfo(target)
        return high.min <= low.min and low.max <= high.max
    if source.is_floating_point and target.is_floating_point:
        a, b = torch.finfo(source), torch.finfo(target)
        return a.eps >= b.eps and a.max <= b.max and a.smallest_normal >= b.smallest_normal
    return False


def fold_convert_chain(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """convert(convert(x; wide); dtype) -> convert(x; dtype), where x's dtype is contained in the wide one"""
    if not (_is(node, ops.convert) and _is(_arg(node), ops.convert)):
        return None
    inner = _arg(node)
    x = _arg(inner)
    target = _val(node).dtype
    if not _is_widening(_val(x).dtype, _val(inner).dtype):
        return None
    if target == _val(x).dtype:
        return _can_stand_for(x, node)
    return new.prim(node, ops.convert, x, dtype=target)


def fold_rounding_to_half(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """convert(convert(x: float32; half); float32) -> x: the rounding between two fused operations is left out"""
    if not (_is(node, ops.convert) and _is(_arg(node), ops.convert)):
        return None
    inner = _arg(node)
    x = _arg(inner)
    if _val(inner).dtype not in HALVES or _val(node).dtype != torch.float32:
        return None
    return _can_stand_for(x, node) if _val(x).dtype == torch.float32 else None


def fold_constant_convert(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """convert(full(v; dtype); other) -> full(v; other), where v survives the first dtype unrounded"""
    if not _is(node, ops.convert):
        return None
    source = _arg(node)
    value = _constant(source)
    if value is None:
        return None
    meta, target = _val(source), _val(node).dtype
    exact = torch.full((), value, dtype=_number_dtype(value)).to(meta.dtype)
    as_number = exact.item()
    if target.is_floating_point or target == torch.bool or is_integral(meta.dtype):
        return new.prim(node, ops.full, shape=meta.shape, value=as_number, dtype=target, device=meta.device)
    return None


def _number_dtype(value: Any) -> torch.dtype:
    return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64


def fold_constant_operands(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """f(full(v), full(w)) -> full(f(v, w)), computed by the eager reference"""
    prim = node.target
    if not isinstance(prim, ops.Prim) or ops.Kind.POINTWISE not in prim.kinds or prim in (ops.convert, ops.bitcast):
        return None
    operands = [_arg(node, i) for i in range(len(node.args))]
    numbers = [_constant(operand) for operand in operands]
    if any(number is None for number in numbers):
        return None
    scalars = [
        torch.full((), v, dtype=_number_dtype(v)).to(_val(x).dtype) for v, x in zip(numbers, operands, strict=True)
    ]
    try:
        value = prim(*scalars).item()
    except (RuntimeError, ZeroDivisionError):
        return None  # it raises when the program runs, as in ATen
    meta = _val(node)
    return new.prim(node, ops.full, shape=meta.shape, value=value, dtype=meta.dtype, device=meta.device)


def fold_view_of_constant(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """expand, reshape, permute, slice or flip of full(v) -> full(v)"""
    views = (ops.expand, ops.reshape, ops.permute, ops.slice, ops.flip)
    if node.target in views and _is(_arg(node), ops.full):
        return new.prim(node, ops.full, **{**_arg(node).kwargs, "shape": _val(node).shape})
    return None


def fold_reshape(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """reshape(reshape(x)) -> reshape(x); reshape to its own shape -> x"""
    if not _is(node, ops.reshape):
        return None
    x = _arg(node)
    while _is(x, ops.reshape):
        x = _arg(x)
    if _val(x).shape == _val(node).shape:
        return _can_stand_for(x, node)
    return new.prim(node, ops.reshape, x, shape=_val(node).shape) if x is not _arg(node) else None


def fold_permute(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """permute(permute(x; p); q) -> permute(x; p[q]); the identity -> x"""
    if not _is(node, ops.permute):
        return None
    x, dims = _arg(node), cast("tuple[int, ...]", node.kwargs["dims"])
    if _is(x, ops.permute):
        inner = cast("tuple[int, ...]", x.kwargs["dims"])
        x, dims = _arg(x), tuple(inner[d] for d in dims)
    if dims == tuple(range(len(dims))):
        return _can_stand_for(x, node)
    return new.prim(node, ops.permute, x, dims=dims) if x is not _arg(node) else None


def fold_expand(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """expand(expand(x)) -> expand(x); expand to its own shape -> x"""
    if not _is(node, ops.expand):
        return None
    x = _arg(node)
    if _is(x, ops.expand):
        x = _arg(x)
    if _val(x).shape == _val(node).shape:
        return _can_stand_for(x, node)
    return new.prim(node, ops.expand, x, shape=_val(node).shape) if x is not _arg(node) else None


def fold_neutral_element(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """x * 1, 1 * x, x / 1, x - 0 -> x, and x + 0 for integers; for floats only + -0.0 keeps a -0.0"""
    if node.target not in (ops.add, ops.sub, ops.mul, ops.div):
        return None
    left, right = _arg(node), _arg(node, 1)
    for x, other, swapped in ((left, right, False), (right, left, True)):
        value = _constant(other)
        if value is None or isinstance(value, bool) or (swapped and node.target in (ops.sub, ops.div)):
            continue
        if _is_neutral(node.target, value, is_integral(_val(node).dtype)):
            return _can_stand_for(x, node)
    return None


def _is_neutral(target: Any, value: float, integral: bool) -> bool:
    if target in (ops.mul, ops.div):
        return value == 1
    if value != 0:
        return False
    negative = float(value).hex().startswith("-")
    if integral:
        return True
    return negative if target is ops.add else not negative


def fold_double_negation(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """-(-x) -> x, ~~x -> x"""
    if node.target in (ops.neg, ops.bitwise_not) and _is(_arg(node), node.target):
        return _can_stand_for(_arg(_arg(node)), node)
    return None


def fold_where(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """where(true, x, y) -> x, where(false, x, y) -> y, where(c, x, x) -> x"""
    if not _is(node, ops.where):
        return None
    condition, x, y = _arg(node), _arg(node, 1), _arg(node, 2)
    value = _constant(condition)
    if value is not None:
        return _can_stand_for(x if value else y, node)
    return _can_stand_for(x, node) if x is y else None


FOLDS: tuple[Fold, ...] = (
    fold_identity_convert, fold_convert_chain, fold_constant_convert, fold_constant_operands, fold_view_of_constant,
    fold_reshape, fold_permute, fold_expand, fold_neutral_element, fold_double_negation, fold_where,
)  # fmt: skip


def fold(graph: fx.Graph, folds: tuple[Fold, ...] = FOLDS) -> fx.Graph:
    """Every node replaced by the first fold that applies, again and again until none does."""

    def first(new: Rewriter, node: fx.Node) -> fx.Node | None:
        current: fx.Node = node
        changed = True
        while changed and current.op == "call_function":
            changed = False
            for one in folds:
                replacement = one(new, current)
                if replacement is not None:
                    current, changed = replacement, True
                    break
        return current

    return _rewrite(graph, first)


def run_passes(graph: fx.Graph, precision: Precision = "fused") -> fx.Graph:
    """The column of passes between decomposition and lowering."""
    folds = (fold_rounding_to_half, *FOLDS) if precision == "fused" else FOLDS
    graph = remove_dead_code(graph)
    graph = fold(graph, folds)
    graph = share_common_subexpressions(graph)
    graph = fold(graph, folds)
    return remove_dead_code(graph)


__all__ = ["FOLDS", "Precision", "fold", "remove_dead_code", "run_passes", "share_common_subexpressions"]
