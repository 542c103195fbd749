"""Which backward calls of one graph leave each other's be: eager frees nodes one by one, a joint's call has one node.

A backward without `retain_graph` frees the nodes that it runs through. Those that saved a tensor raise if another one
runs through them; the others, such as those of `x.sum()` or `x + 1`, do not.

Invariant: a backward of a joint's call raises where the graph that was recorded would have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations_with_replacement
from typing import Any

import torch
from torchlazy.lazy.joint.inner_backward import holds_saved, nodes_of
from torchlazy.lazy.torch_private.saved import graph_is_kept, saved


def freed_apart(tensors: Sequence[torch.Tensor], ends: Collection[Any]) -> list[frozenset[int]] | None:
    """For each tensor the nodes, by number, that its backward frees for others, up to the nodes `ends`; None where a
    backward by any of the tensors frees nodes of all."""
    numbers: dict[Any, int | None] = {}  # None: the node saves nothing
    found: list[frozenset[int]] = []
    for tensor in tensors:
        nodes = list(nodes_of([tensor.grad_fn], ends))
        for node in nodes:
            if node not in numbers:
                numbers[node] = len(numbers) if _is_freed_by_a_backward(node) else None
        found.append(frozenset(n for n in map(numbers.__getitem__, nodes) if n is not None))
    pairs = combinations_with_replacement(dict.fromkeys(found), 2)
    return None if all(one & other for one, other in pairs) else found


def _is_freed_by_a_backward(node: Any) -> bool:
    return type(node).__name__ == "CopySlices" or holds_saved(node) is not None


class Kept:
    """What the backward of a call reads, where a backward by some results leaves it to those by others. Results are
    held detached: their graph leads back to who holds this."""

    def __init__(self, apart: Sequence[frozenset[int]], tensors: Sequence[torch.Tensor | None]) -> None:
        self._apart = apart
        self._freed: frozenset[int] = frozenset()
        self.tensors = [None if tensor is None else saved(tensor) for tensor in tensors]

    def read(self, tangents: Iterable[int]) -> list[torch.Tensor | None] | None:
        """For a backward by the results of these tangents; None where what it reads is freed."""
        nodes = frozenset[int]().union(*(self._apart[number] for number in tangents))
        if nodes & self._freed:
            return None
        found = [None if tensor is None else tensor.unpack() for tensor in self.tensors]
        if not graph_is_kept():
            self._freed |= nodes
            if all(own & self._freed for own in self._apart):
                self.tensors.clear()
        return found


__all__ = ["Kept", "freed_apart"]
