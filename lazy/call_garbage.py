"""What a captured call leaves behind in cycles of objects (nodes that know their parents, functions that name
themselves): collected before its last cut. Nobody can reach it, but it lives until Python's collector runs, and no two
calls leave the same alive.

Invariant: the values that a call's last cut computes are those that somebody can reach, whenever the collector ran.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torchlazy.lazy.plain_objects import flatten_open
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.tensor import LazyTensor


def collections() -> int:
    """How often Python's collector has run."""
    return sum(generation["collections"] for generation in gc.get_stats())


def collect_garbage(
    recorder: Recorder, before: Iterable[int], kept: Any, tensors: Iterable[torch.Tensor], runs: int
) -> None:
    """Run Python's collector if values wait to be computed that are neither memory from before the call (`before`, by
    identity) nor in what the call leaves (`kept`, and the gradients of `tensors`): the young objects first, and older
    ones while values still wait. It had run so often (`runs`) before the call: if not since, all of them are young."""
    known = set(before)
    for leaf in flatten_open(kept)[0]:
        if isinstance(leaf, LazyTensor):
            known.add(id(leaf._storage_))
    for tensor in tensors:
        grad = tensor.grad if tensor.is_leaf else None
        if isinstance(grad, LazyTensor):
            known.add(id(grad._storage_))
    for generation in range(1 if collections() == runs else 3):
        waiting = (ref() for ref in recorder._written)
        if not any(storage is not None and storage.dirty and id(storage) not in known for storage in waiting):
            return
        gc.collect(generation)
