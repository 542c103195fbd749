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
from torchlazy.prims.passes.one_hot import fold_sum_of_one_hot
from torchlazy.prims.passes.rounding import roundings_to_keep
from torchlazy.prims.plan_graph import PlanGraph
from torchlazy.prims.promotion import HALVES, is_integral
from torchlazy.prims.size_int import is_tracked

Precision = Literal["fused", "eager"]


class Rewriter:
    """The graph that a fold appends to, with nodes of the new graph."""

    def __init__(self) -> None:
        self.graph = PlanGraph()

    def prim(self, like: fx.Node, prim: ops.Prim, *operands: fx.Node, **attrs: Any) -> fx.Node:
        """A primitive in the place of `like`: its frame and origin, and its layout."""
        node = self.graph.call_function(prim, operands, attrs)
        node.meta.update(like.meta)
        return node


# meta key: the half that a float32 value may be stored in, see run_passes.
MEMORY_DTYPE = "memory_dtype"
# meta key: this convert from a half is read by a comparison or another jump, its rounding stays.
_STAYS_ROUNDED = "stays_rounded"
_A_CAST = "aten._to_copy.default"  # origin of converts that the program, or autocast for it, writes

# A fold sees a node of the new graph, just appended, and returns what takes its place, or None.
Fold = Callable[[Rewriter, fx.Node], "fx.Node | None"]


def _rewrite(
    graph: fx.Graph,
    *,
    folds: tuple[Fold, ...] = (),
    share: bool = False,
    live: dict[fx.Node, None] | None = None,
    memory_dtypes: dict[fx.Node, torch.dtype] | None = None,
    rounded: frozenset[fx.Node] = frozenset(),
) -> fx.Graph:
    """One copy of the graph: of each live node the copy, or what the folds make of it, or an equal node made before.

    One sweep in order is enough for all: a node is folded after its operands took their final form.
    """
    new = Rewriter()
    env: dict[fx.Node, fx.Node] = {}
    known: dict[Any, fx.Node] = {}
    concerned: dict[Any, tuple[Fold, ...]] = {}
    for node in graph.nodes:
        if live is not None and node not in live:
            continue
        copy = new.graph.node_copy(node, env.__getitem__)
        if memory_dtypes is not None and node in memory_dtypes:
            copy.meta[MEMORY_DTYPE] = memory_dtypes[node]
        if node in rounded:
            copy.meta[_STAYS_ROUNDED] = True
        copy = _folded(new, copy, folds, concerned)
        env[node] = _shared(copy, known) if share else copy
    return new.graph


def _folded(new: Rewriter, node: fx.Node, folds: tuple[Fold, ...], known: dict[Any, tuple[Fold, ...]]) -> fx.Node:
    """What is left of a node when no fold applies any more. `known`: of these folds those that concern a primitive."""
    changed = True
    while changed and node.op == "call_function" and isinstance(node.target, ops.Prim):
        changed = False
        concerned = known.get(node.target)
        if concerned is None:
            concerned = known[node.target] = tuple(one for one in folds if _concerns(one, node.target))
        for one in concerned:
            replacement = one(new, node)
            if replacement is not None:
                node, changed = replacement, True
                break
    return node


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
    """The number of a `full`; None for anything else, and for one that changes with the sizes."""
    if not _is(node, ops.full):
        return None
    value = node.kwargs["value"]
    return None if isinstance(value, fx.Node) or is_tracked(value) else value


# --- dead code and common subexpressions ---


def _live(graph: fx.Graph) -> dict[fx.Node, None]:
    """What outputs need, and calls with an effect of their own: a random draw moves the generator on."""
    live: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if node.op in ("output", "placeholder") or _has_effect(node) or node in live:
            live[node] = None
            live.update(dict.fromkeys(node.all_input_nodes))
    return live


def _has_effect(node: fx.Node) -> bool:
    kinds = node.target.kinds if isinstance(node.target, ops.Prim) else frozenset()
    return ops.Kind.EXTERN in kinds and (ops.Kind.RANDOM in kinds or ops.Kind.COLLECTIVE in kinds)


def remove_dead_code(graph: fx.Graph) -> fx.Graph:
    """x unused -> nothing (unless it draws random numbers: dropping it would shift the generator)"""
    return _rewrite(graph, live=_live(graph))


def share_common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """f(x), f(x) -> f(x) once; random bits of one seed and stream are a pure function, random externs are not"""
    return _rewrite(graph, share=True)


def _shared(node: fx.Node, known: dict[Any, fx.Node]) -> fx.Node:
    key = _key(node)
    if key is None:
        return node
    first = known.setdefault(key, node)
    if first is not node and first.meta.get(MEMORY_DTYPE) != node.meta.get(MEMORY_DTYPE):
        first.meta.pop(MEMORY_DTYPE, None)  # one of the two is read unrounded
    return first


def _key(node: fx.Node) -> Any:
    if node.op != "call_function":
        return None
    if _has_effect(node) or not (isinstance(node.target, ops.Prim) or node.target is operator.getitem):
        return None
    return node.target, _frozen(node.args), _frozen(node.kwargs), node.meta["val"]


_AS_IT_IS = frozenset({fx.Node, int, str, torch.dtype, type(None)})


def _frozen(value: Any) -> Any:
    """A hashable form in which 1, 1.0 and True, and 0.0 and -0.0, stay apart, and a NaN equals itself."""
    if type(value) in _AS_IT_IS:
        return value  # equal ones are of one type
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, float) and not is_tracked(value):
        return float, value.hex()
    if isinstance(value, complex):
        return complex, value.real.hex(), value.imag.hex()
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
    """convert(convert(x: float32; half); float32) -> x: the rounding between two fused operations is left out, but for
    that which the program itself asks for"""
    if not (_is(node, ops.convert) and _is(_arg(node), ops.convert)) or _STAYS_ROUNDED in node.meta:
        return None
    inner = _arg(node)
    if inner.meta.get("origin") == _A_CAST:
        return None
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


_WITH_ATTRIBUTES = (ops.convert, ops.bitcast, ops.checked)


def fold_constant_operands(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """f(full(v), full(w)) -> full(f(v, w)), computed by the eager reference"""
    prim = node.target
    if not isinstance(prim, ops.Prim) or ops.Kind.POINTWISE not in prim.kinds or prim in _WITH_ATTRIBUTES:
        return None
    if prim.overload is not None or any(_constant(operand) is None for operand in node.args):
        return None
    operands = [_arg(node, i) for i in range(len(node.args))]
    numbers = [_constant(operand) for operand in operands]
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
    if len(_val(x).shape) == len(_val(node).shape) and _val(x).shape == _val(node).shape:
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
    if len(_val(x).shape) == len(_val(node).shape) and _val(x).shape == _val(node).shape:
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


def fold_checked(new: Rewriter, node: fx.Node) -> fx.Node | None:
    """checked(x, true) -> x"""
    return _can_stand_for(_arg(node), node) if _is(node, ops.checked) and _constant(_arg(node, 1)) is True else None


FOLDS: tuple[Fold, ...] = (
    fold_identity_convert, fold_convert_chain, fold_constant_convert, fold_constant_operands, fold_view_of_constant,
    fold_reshape, fold_permute, fold_expand, fold_neutral_element, fold_double_negation, fold_where,
    fold_checked, fold_sum_of_one_hot,
)  # fmt: skip


# The primitives that a fold looks at; a fold that is not named here looks at all.
_CONCERNED: dict[Fold, frozenset[ops.Prim]] = {
    fold_rounding_to_half: frozenset({ops.convert}),
    fold_identity_convert: frozenset({ops.convert}),
    fold_convert_chain: frozenset({ops.convert}),
    fold_constant_convert: frozenset({ops.convert}),
    fold_view_of_constant: frozenset({ops.expand, ops.reshape, ops.permute, ops.slice, ops.flip}),
    fold_reshape: frozenset({ops.reshape}),
    fold_permute: frozenset({ops.permute}),
    fold_expand: frozenset({ops.expand}),
    fold_neutral_element: frozenset({ops.add, ops.sub, ops.mul, ops.div}),
    fold_double_negation: frozenset({ops.neg, ops.bitwise_not}),
    fold_where: frozenset({ops.where}),
    fold_checked: frozenset({ops.checked}),
    fold_sum_of_one_hot: frozenset({ops.sum}),
}


def _concerns(one: Fold, prim: ops.Prim) -> bool:
    if one is fold_constant_operands:
        return ops.Kind.POINTWISE in prim.kinds
    return one not in _CONCERNED or prim in _CONCERNED[one]


def fold(graph: fx.Graph, folds: tuple[Fold, ...] = FOLDS) -> fx.Graph:
    """Every node replaced by the first fold that applies, again and again until none does."""
    return _rewrite(graph, folds=folds)


# --- the column ---


def _memory_dtypes(graph: fx.Graph) -> dict[fx.Node, torch.dtype]:
    """convert(x: float32; half) with no other reader of x: x may be stored as that half, as ATen would"""
    found: dict[fx.Node, torch.dtype] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not node.users or getattr(node.meta["val"], "dtype", None) != torch.float32:
            continue
        dtypes = {_val(user).dtype if _is(user, ops.convert) else None for user in node.users}
        dtype = dtypes.pop()
        if dtype is not None and dtype in HALVES and not dtypes:
            found[node] = dtype
    return found


def erase_dead_code(graph: fx.Graph) -> None:
    """`remove_dead_code` on a graph that nobody else holds yet: without another copy of it."""
    live = _live(graph)
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)


def run_passes(graph: fx.Graph, precision: Precision = "fused") -> fx.Graph:
    """The passes between decomposition and lowering, all in one sweep: copying a graph is what costs.

    "fused" leaves out the rounding of a half between two operations that end up in one kernel; a value that is read
    unrounded only because of that has meta "memory_dtype", the half it may be stored in. What comparisons see is
    rounded (prims/passes/rounding.py), and so is what the program casts.
    """
    live = _live(graph)
    if precision == "fused":
        folds = (fold_rounding_to_half, *FOLDS)
        rounded = roundings_to_keep(graph)
        new = _rewrite(graph, folds=folds, share=True, live=live, memory_dtypes=_memory_dtypes(graph), rounded=rounded)
    else:
        new = _rewrite(graph, folds=FOLDS, share=True, live=live)
    erase_dead_code(new)
    return new


__all__ = [
    "FOLDS", "MEMORY_DTYPE", "Precision", "erase_dead_code", "fold", "remove_dead_code", "run_passes",
    "share_common_subexpressions",
]  # fmt: skip
