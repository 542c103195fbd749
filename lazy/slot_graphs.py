"""Tensors in slots that carry the graph of an earlier call (a hidden state that is detached where it is next used).

Invariant: a template is made only where no gradient of the call flows through such a graph, which is another one at
each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torchlazy.lazy.plain_objects import flatten_open
from torchlazy.lazy.recorded_backward import nodes_of
from torchlazy.lazy.untold_graphs import UNTOLD, graph_of


class SlotGraphs:
    """Watches the graphs of these tensors while a call runs."""

    def __init__(self, leaves: Iterable[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        self.nodes: list[tuple[torch.Tensor, Any]] = [(tensor, tensor.grad_fn) for tensor in tensors]
        self._is_used = False
        self._hooks = [node.register_prehook(self._note) for _, node in self.nodes]

    def _note(self, gradients: Any) -> None:
        self._is_used = True

    def refuse_used(self, refuse: Callable[[str], None], kept: Any) -> None:
        """No template where a backward ran through one of the graphs, or one of what the call leaves behind may."""
        for hook in self._hooks:
            hook.remove()
        if not self.nodes:
            return
        own = {id(tensor) for tensor, _ in self.nodes}
        made = [x for x in flatten_open(kept)[0] if isinstance(x, torch.Tensor) and id(x) not in own]
        ours = {node for _, node in self.nodes}
        graphs = [graph for graph in map(graph_of, made) if graph is not UNTOLD]
        if self._is_used or any(node in ours for node in nodes_of(graphs)):
            refuse("gradients flow into what an earlier call left in its state")


__all__ = ["SlotGraphs"]
