"""Leaves of autograd that a compiled call makes, and leaves behind together with a graph by them.

Invariant: the caller's gradient of such a graph arrives in the leaf that the caller has: it is handed out as it is, not
as an ordinary tensor in its place, and a replay, whose results have another graph, does not serve the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchlazy.lazy.recorded_backward import nodes_from
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.untold_graphs import UNTOLD, graph_of


def leaves_begun(values: Iterable[Any]) -> frozenset[int]:
    """The tensors among the values, by identity, that are leaves of the graphs of others."""
    tensors = [value for value in values if isinstance(value, LazyTensor) and value.requires_grad]
    graphs = [(tensor, graph_of(tensor)) for tensor in tensors]
    leaves = {id(tensor) for tensor, graph in graphs if graph is None}
    if not leaves:
        return frozenset()
    nodes = {node for _, graph in graphs if graph not in (None, UNTOLD) for node in nodes_from(graph)}
    return frozenset(leaves.intersection(id(getattr(node, "variable", None)) for node in nodes))


__all__ = ["leaves_begun"]
