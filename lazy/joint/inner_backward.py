"""Keeps graphs and `grad`s intact while a backward is only recorded, ahead of the call's own backward.

Python code in a backward (the user's functions, hooks) may run torch's engine itself: on a graph that it kept, which
eager's one backward frees, or through leaves, whose `grad` it adds to.

Invariant: afterwards graphs are intact, and leaves have the gradients that they had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def retain_graphs() -> Iterator[None]:
    """Inside, no run of torch's engine frees its graph. `torch.autograd.backward` and `grad` both call this function,
    and torch has no public hook before both."""
    module: Any = torch.autograd
    run = module._engine_run_backward

    def keeping(outputs: Any, gradients: Any, retain_graph: bool, *args: Any, **kwargs: Any) -> Any:
        return run(outputs, gradients, True, *args, **kwargs)

    module._engine_run_backward = keeping
    try:
        yield
    finally:
        module._engine_run_backward = run


@contextlib.contextmanager
def without_gradients(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, the leaves begin with no gradient; afterwards they have those that they had."""
    kept = gradients_of(leaves)
    try:
        _set(leaves, [None] * len(leaves))
        yield
    finally:
        _set(leaves, kept)


def gradients_of(leaves: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The leaves' `grad`, read without a mode seeing it as a read of the program."""
    with torch._C.DisableTorchFunction():
        return [None if leaf is None else leaf.grad for leaf in leaves]


def _set(leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    with torch._C.DisableTorchFunction():
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def nodes_of(nodes: Iterable[Any]) -> Iterator[Any]:
    """These nodes of a graph, and all that their gradients flow to, each once."""
    pending, seen = list(nodes), set()
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        yield current
        pending += [following for following, _ in current.next_functions]


def nodes_from(node: Any) -> set[Any]:
    """The nodes of a graph: this one, and all that its gradient flows to."""
    return set(nodes_of([node]))


__all__ = ["gradients_of", "nodes_from", "nodes_of", "retain_graphs", "without_gradients"]
