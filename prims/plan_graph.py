"""The FX graph that the compiler plans with: `torch.fx.Graph`, but quicker to append to.

Recent releases of torch look through the arguments of each new node for symbolic numbers, to warn of them; with five
graphs of 16,000 nodes for a large model, that took a fifth of all planning. Our graphs hold no such numbers.

Invariant: a `PlanGraph` differs from a graph that torch builds in nothing but the time it takes.
"""

from __future__ import annotations

from typing import Any

from torch import fx


class PlanGraph(fx.Graph):
    """`fx.Graph`, whose nodes get their arguments after they were made."""

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
        node = super().create_node(op, target, None, None, name, type_expr)
        # Past `Node.__setattr__`, which sorts the node anew into tables by operator: arguments change none of them.
        if args:
            object.__setattr__(node, "args", args)
        if kwargs:
            object.__setattr__(node, "kwargs", kwargs)
        return node
