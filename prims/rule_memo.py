"""Decompositions remembered within one graph: an ATen call like an earlier one gets copies of that one's primitives.

A model repeats its layers, and an optimizer its update for each parameter, so most calls equal an earlier one in all
that a rule can see: the overload, numbers and flags, and the metadata of the operands and of the wanted result.

Invariant: the graph is the one that running every rule would give, name by name. Whatever a rule might know beyond
that (positions that a pooling left, sizes that are tracked) goes the rule's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.size_int import is_tracked

LONGEST_LIST = 8
"""Lists of more operands than this are those of foreach operators, which are decomposed before the lookup."""

_OWN_META = ("frame", "origin", "stage")


class _NotKnown(Exception):
    """A call whose rule may see more than its key tells."""


@dataclass(frozen=True, slots=True)
class Decomposed:
    """The nodes that a rule made once, on the operands of then; `result` holds nodes, or numbers and None."""

    operands: tuple[fx.Node, ...]
    nodes: tuple[tuple[fx.Node, Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, Any]], ...]
    result: Any


class RuleMemo:
    """The calls of one decomposition, by what their rules can see of them."""

    def __init__(self, graph: fx.Graph) -> None:
        """`graph` is the one to decompose: with tracked sizes, which write down who looked at them, nothing is kept."""
        self._known: dict[Hashable, Decomposed] = {}
        plain: set[int] = set()
        self.is_on = not any(_has_tracked(node, plain) for node in graph.nodes)

    def key_of(
        self, overload: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], wanted: Any
    ) -> tuple[Hashable, tuple[fx.Node, ...]] | None:
        """What the rule can see, and the operands in the order of their first use; None where it may see more."""
        operands: dict[fx.Node, int] = {}
        try:
            seen = (overload, _seen(args, operands), _seen(kwargs, operands), wanted)
        except _NotKnown:
            return None
        return seen, tuple(operands)

    def find(self, key: Hashable) -> Decomposed | None:
        """What became of an equal call."""
        return self._known.get(key)

    def keep(self, key: Hashable, operands: Sequence[fx.Node], created: Iterable[fx.Node], result: Any) -> None:
        """Remember the nodes that a rule has just made, in their order, unless they read others than its operands."""
        inside = dict.fromkeys(operands)
        nodes = []
        for node in created:
            if any(operand not in inside for operand in node.all_input_nodes):
                return
            inside[node] = None
            meta = {name: value for name, value in node.meta.items() if name not in _OWN_META}
            nodes.append((node, node.target, node.args, dict(node.kwargs), meta))
        if all(part in inside for part in _nodes_in(result)):
            self._known[key] = Decomposed(tuple(operands), tuple(nodes), result)  # type: ignore[arg-type]


def replayed(
    known: Decomposed,
    operands: Sequence[fx.Node],
    append: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, Any]], fx.Node],
) -> Any:
    """The result of a known call on other operands; `append` makes one node of (target, args, kwargs, meta)."""
    now: dict[fx.Node, fx.Node] = dict(zip(known.operands, operands, strict=True))
    place = now.__getitem__
    for node, target, args, kwargs, meta in known.nodes:
        now[node] = append(target, *fx.map_arg((args, kwargs), place), meta)
    return _placed(known.result, now)


def _placed(result: Any, now: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(result, fx.Node):
        return now[result]
    if isinstance(result, (tuple, list)):
        return type(result)(_placed(part, now) for part in result)
    return result


def _nodes_in(result: Any) -> list[fx.Node]:
    if isinstance(result, fx.Node):
        return [result]
    return [node for part in result for node in _nodes_in(part)] if isinstance(result, (tuple, list)) else []


def _seen(value: Any, operands: dict[fx.Node, int]) -> Hashable:
    """A hashable form of an argument: 1, 1.0 and True, and 0.0 and -0.0, stay apart."""
    if isinstance(value, fx.Node):
        if value.target is ops.full:  # rules look into constants
            constant = value.kwargs["value"]
            if isinstance(constant, fx.Node):
                raise _NotKnown
            return operands.setdefault(value, len(operands)), value.meta["val"], _seen(constant, operands)
        return operands.setdefault(value, len(operands)), value.meta["val"]
    if isinstance(value, (list, tuple)):
        if len(value) > LONGEST_LIST:
            raise _NotKnown
        return type(value), *[_seen(item, operands) for item in value]
    if isinstance(value, dict):
        return tuple([(name, _seen(item, operands)) for name, item in value.items()])
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, complex):
        return complex, value.real.hex(), value.imag.hex()
    return type(value), value


def _has_tracked(node: fx.Node, plain: set[int]) -> bool:
    """`plain` collects the ids of metadata without tracked sizes: geometries share theirs."""
    value = node.meta.get("val")
    if id(value) not in plain:
        if _is_tracked_in(value):
            return True
        plain.add(id(value))
    return _is_tracked_in(node.args) or _is_tracked_in(node.kwargs)


def _is_tracked_in(value: Any) -> bool:
    if isinstance(value, (fx.Node, int, float)):
        return is_tracked(value)
    if isinstance(value, TensorMeta):
        return any(map(is_tracked, value.shape)) or any(map(is_tracked, value.strides))
    if isinstance(value, (list, tuple)):
        return any(map(_is_tracked_in, value))
    if isinstance(value, dict):
        return any(map(_is_tracked_in, value.values()))
    return is_tracked(value)


__all__ = ["Decomposed", "RuleMemo", "replayed"]
