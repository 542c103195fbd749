"""Results whose graph is used up: the call that made them ran its own backward.

Invariant: a backward through such a result is the error that it is in eager.
"""

from __future__ import annotations

from typing import Any

import torch


def with_freed_graph(value: torch.Tensor) -> torch.Tensor:
    """`value`, as the result of a graph that is no more."""
    anchor = torch.empty((), requires_grad=True)
    return _FreedGraph.apply(anchor, value)  # type: ignore[no-any-return,no-untyped-call]


class _FreedGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()  # unlike a view, nothing to record

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time: the compiled call ran its own backward and freed the "
            "graph of this result. Call backward outside of it only, or keep the graph with retain_graph=True."
        )
