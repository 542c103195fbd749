"""Leaves of autograd that a compiled call makes, and leaves behind together with a graph by them.

Invariant: the caller's gradient of such a graph arrives in the leaf that the caller has: it is handed out as it is, not
as an ordinary tensor in its place, and a replay, whose results have another graph, does not serve the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchlazy.lazy.recorded_backward import nodes_from
from torchlazy.lazy.tensor import LazyTensor


def leaves_begun(values: Iterable[Any]) -> frozenset[int]:
    """The tensors among the values, by identity, that are leaves of the graphs of others."""
    tensors = [value for value in values if isinstance(value, LazyTensor) and value.requires_grad]
    leaves = {id(tensor) for tensor in tensors if tensor.is_leaf}
    if not leaves:
        return frozenset()
    nodes = {node for tensor in tensors if not tensor.is_leaf for node in nodes_from(tensor.grad_fn)}
    return frozenset(leaves.intersection(id(getattr(node, "variable", None)) for node in nodes))


__all__ = ["leaves_begun"]
