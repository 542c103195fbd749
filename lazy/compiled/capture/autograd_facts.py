"""Facts about the autograd graphs around a captured call that decide whether it can have a template.

- Views whose `grad_fn` torch refuses to give: one of several that an operator made (`chunk`, `unbind`), when the memory
  was written to without autograd.
- Tensors in slots that carry the graph of an earlier call (a hidden state that is detached where it is next used).
- Results whose graph is freed: the call that made them ran its own backward.
- Leaves that a compiled call makes, and leaves behind together with a graph that uses them.

Invariant: each of them behaves as in eager. A view without `grad_fn` is handed to the caller, raises at the first
operator that needs its graph, and leaves no template. A template is made only where no gradient of the call flows
through the graph of an earlier call, which is another one at each call. A backward through a freed graph raises. A
gradient arrives in the leaf that the caller has: the graph is handed out as it is, not as an ordinary tensor in its
place, and a replay, whose results have another graph, does not serve the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torchlazy.lazy.compiled.template.objects import flatten_open
from torchlazy.lazy.joint.inner_backward import nodes_from, nodes_of
from torchlazy.lazy.record.tensor import LazyTensor

UNKNOWN_GRAPH = object()


def graph_of(tensor: torch.Tensor) -> Any:
    """The node that made the tensor, None for a leaf; `UNKNOWN_GRAPH` where torch raises."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return UNKNOWN_GRAPH


class SlotGraphs:
    """Watches the graphs of what places of the state hold, and of arguments, while a call runs."""

    def __init__(self, leaves: Iterable[Any], arguments: Iterable[Any]) -> None:
        self.nodes: list[tuple[torch.Tensor, Any]] = _graphs_of(leaves)
        self._used = ""
        self._hooks = [
            node.register_prehook(partial(self._note, "what an earlier call left in its state"))
            for _, node in self.nodes
        ]
        self._hooks += [
            node.register_prehook(partial(self._note, "what made an argument")) for _, node in _graphs_of(arguments)
        ]

    def _note(self, into: str, gradients: Any) -> None:
        self._used = self._used or into

    def refuse_used(self, refuse: Callable[[str], None], kept: Any) -> None:
        """No template where a backward ran through one of the graphs, or may run from what the call leaves behind."""
        for hook in self._hooks:
            hook.remove()
        if self._used:
            refuse(f"gradients flow into {self._used}")
        if not self.nodes:
            return
        own = {id(tensor) for tensor, _ in self.nodes}
        made = [x for x in flatten_open(kept)[0] if isinstance(x, torch.Tensor) and id(x) not in own]
        ours = {node for _, node in self.nodes}
        graphs = [graph for graph in map(graph_of, made) if graph is not UNKNOWN_GRAPH]
        if any(node in ours for node in nodes_of(graphs)):
            refuse("gradients flow into what an earlier call left in its state")


def _graphs_of(values: Iterable[Any]) -> list[tuple[torch.Tensor, Any]]:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    found = [(tensor, graph_of(tensor)) for tensor in tensors]
    return [(tensor, node) for tensor, node in found if node is not None and node is not UNKNOWN_GRAPH]


def with_freed_graph(value: torch.Tensor) -> torch.Tensor:
    """`value`, as the result of a graph that is freed."""
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


def graph_leaves_in(values: Iterable[Any]) -> frozenset[int]:
    """The tensors among the values, by identity, that are leaves of the graphs of others."""
    tensors = [value for value in values if isinstance(value, LazyTensor) and value.requires_grad]
    graphs = [(tensor, graph_of(tensor)) for tensor in tensors]
    leaves = {id(tensor) for tensor, graph in graphs if graph is None}
    if not leaves:
        return frozenset()
    nodes = {node for _, graph in graphs if graph not in (None, UNKNOWN_GRAPH) for node in nodes_from(graph)}
    return frozenset(leaves.intersection(id(getattr(node, "variable", None)) for node in nodes))


__all__ = ["UNKNOWN_GRAPH", "SlotGraphs", "graph_leaves_in", "graph_of"]
