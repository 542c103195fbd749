"""What the recorded backward of a captured call does to state; garbage collection before the call's last cut.

Hooks of modules and tensors, and backward functions of the user's, run once to be recorded; no replay runs them again.

A captured call leaves garbage in cycles of objects (nodes that know their parents, functions that name themselves). It
is unreachable but lives until Python's collector runs, and no two calls leave the same alive: so it is collected first.

Invariant: a backward that changes state that guards see leaves no template, and the state is as it was before. A call's
last cut computes only reachable values, whenever the collector ran.
"""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torchlazy.lazy.compiled.capture.autograd_facts import UNKNOWN_GRAPH, graph_of
from torchlazy.lazy.compiled.guards.reached import Reached, copy_of, refill
from torchlazy.lazy.compiled.guards.values import same_or_equal
from torchlazy.lazy.compiled.template.objects import flatten_open
from torchlazy.lazy.joint.inner_backward import nodes_of
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LazyTensor


def runs_python(value: Any) -> bool:
    """Whether the graph of a tensor in `value` has a node that runs Python: module hooks are such, too."""
    leaves, _ = flatten_open(value)
    graphs = [graph_of(leaf) for leaf in leaves if isinstance(leaf, LazyTensor)]
    nodes = nodes_of([graph for graph in graphs if graph not in (None, UNKNOWN_GRAPH)])
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)


class BackwardEffects:
    """The state before a backward is recorded; `reach` finds what there is of it."""

    def __init__(self, reach: Callable[[], Reached]) -> None:
        self._reach, self._before = reach, reach()
        self._values = [list(place.read()) for place in self._before.places]
        self._slots = [slot.read() if slot.holder is None else slot.holder for slot in self._before.slots]
        in_slots = [(held, slot.name) for held, slot in zip(self._slots, self._before.slots, strict=True)]
        holders = [(held, name) for held, name in in_slots if isinstance(held, _HOLDERS)]
        containers = (*self._before.containers, *self._before.appended, *holders)
        self._contents = [(container, name, copy_of(container)) for container, name in containers]

    def refuse(self, refuse: Callable[[str], None]) -> None:
        """Report what the backward changed, and put it back."""
        changed = [*self._in_containers(), *self._in_slots(), *self._in_places()]
        after = {name for place in self._reach().places for name in place.names}
        before = {name for place in self._before.places for name in place.names}
        changed += sorted(after - before)
        if changed:
            refuse(
                f"a result needs a gradient, and the backward changes {changed[0]} (in a hook, or in the backward of a "
                "torch.autograd.Function), which a replay would not"
            )

    def _in_containers(self) -> list[str]:
        changed = []
        for container, name, was in self._contents:
            if not _is_same(copy_of(container), was):
                refill(container, was)
                changed.append(name)
        return changed

    def _in_slots(self) -> list[str]:
        changed = []
        for slot, held in zip(self._before.slots, self._slots, strict=True):
            if slot.holder is None and slot.read() is not held and slot.write is not None:
                slot.write(held)
                changed.append(slot.name)
        return changed

    def _in_places(self) -> list[str]:
        changed = []
        for place, values in zip(self._before.places, self._values, strict=True):
            now = list(place.read())
            for position, (name, value) in enumerate(zip(place.names, values, strict=True)):
                if position < len(now) and not same_or_equal(now[position], value):
                    changed.append(name)
                    if place.store is not None:
                        place.store(position, value)
        return changed


_HOLDERS = (dict, list, collections.deque)


def _is_same(now: Any, was: Any) -> bool:
    return len(now) == len(was) and all(map(_is_item, now, was))


def _is_item(now: Any, was: Any) -> bool:
    if type(now) is tuple and type(was) is tuple and len(now) == len(was) == 2:  # of a dict
        return same_or_equal(now[0], was[0]) and now[1] is was[1]
    return now is was


def collector_runs() -> int:
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
    for generation in range(1 if collector_runs() == runs else 3):
        waiting = (ref() for ref in recorder._written)
        if not any(storage is not None and storage.dirty and id(storage) not in known for storage in waiting):
            return
        gc.collect(generation)
