"""The FX graph that the compiler plans with: `torch.fx.Graph`, but quicker to append to.

Recent releases of torch look through the arguments of each new node for symbolic numbers, to warn of them, and read
each name by a regular expression; with five graphs of 16,000 nodes for a large model, that took a fifth of all
planning. Our graphs hold no such numbers, and their names are those of their targets, counted.

Invariant: a `PlanGraph` differs from a graph that torch builds in nothing but the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


class PlanGraph(fx.Graph):
    """`fx.Graph`, whose nodes are made and named in fewer steps."""

    def create_node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> fx.Node:
        """As `fx.Graph.create_node`."""
        if not _IS_KNOWN or self.owning_module is not None:
            node = super().create_node(op, target, None, None, name, type_expr)
            # Past `Node.__setattr__`, which sorts the node anew into tables by operator: arguments change none of them.
            if args:
                object.__setattr__(node, "args", args)
            if kwargs:
                object.__setattr__(node, "kwargs", kwargs)
            return node
        space = self._graph_namespace
        name = self._new_name(target) if name is None else self._name_again(name)
        node = fx.Node(self, name, op, target, args or (), kwargs or {}, type_expr)
        space._obj_to_name[node] = name
        self._insert(node)
        self._find_nodes_lookup_table.insert(node)
        self._len += 1
        return node

    def node_copy(self, node: fx.Node, arg_transform: Callable[[fx.Node], Any] = lambda x: x) -> fx.Node:
        """As `fx.Graph.node_copy`."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), arg_transform)
        copy = self.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        copy.meta.update(node.meta)  # `copy.meta = ...` would sort the node anew, as above
        return copy

    def _new_name(self, target: Any) -> str:
        """The name of a new call of `target`: its own name, and a number where that is taken."""
        base = _BASES.get(target)
        if base is None:
            base = _BASES[target] = self._target_to_str(target)
        space = self._graph_namespace
        number, taken = space._base_count.get(base), space._used_names
        if number is None or base not in taken:  # torch says whether that is a legal name
            return space.create_name(base, None)
        while (name := f"{base}_{(number := number + 1)}") in taken:
            pass
        taken.add(name)
        space._base_count[base] = number
        return name

    def _name_again(self, name: str) -> str:
        """A name that another graph has given, kept where it is free."""
        space = self._graph_namespace
        base, _, number = name.rpartition("_")
        if name in space._used_names or not base or not number.isdecimal():
            return space.create_name(name, None)
        space._used_names.add(name)
        space._base_count[base] = int(number)
        return name


_BASES: dict[Any, str] = {}


def _is_known() -> bool:
    """Whether this release of torch keeps a graph's names and nodes where `PlanGraph` writes them."""
    graph = fx.Graph()
    space = getattr(graph, "_graph_namespace", None)
    return all(hasattr(graph, part) for part in ("_insert", "_find_nodes_lookup_table", "_len")) and all(
        hasattr(space, part) for part in ("_obj_to_name", "_used_names", "_base_count")
    )


_IS_KNOWN = _is_known()
