"""Slots: places of the state whose value calls replace (`self.hidden = h`, a cache in a dict, a list of last losses).

What a slot holds is to a captured call what an argument is: its facts matter, not its identity, and a replay reads it
anew and leaves the next value there.

Invariant: a slot holds tensors and plain values only, in torch's own containers; what is more than that is walked and
guarded as ever.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.asked_sizes import plain_size
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.torch_private import flatten_tree, unflatten_tree
from torchlazy.lazy.traced_numbers import node_of, plainly

_TENSORS = frozenset({torch.Tensor, LazyTensor})  # leaves that need gradients are no values of slots
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
_LEAVES = _TENSORS | _PLAIN
_KEYS = frozenset({str, int, bool, float, tuple, torch.dtype, torch.device})
_REFILLED = (list, deque, dict)
_LEAF = flatten_tree(0)[1]
_UNREADABLE = (LookupError, AttributeError, ValueError, TypeError, RuntimeError)


@dataclass(frozen=True, eq=False)
class Slot:
    """A named place and how its value is read and replaced. `write` is None where it can only be read. `holder`: a
    container that stays the same object, where the slot is what it holds."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None] | None
    holder: Any = None

    def held(self) -> Any:
        """The value, apart from the container that it is in."""
        return self.read() if self.holder is None else copy.copy(self.holder)

    def can_refill(self) -> bool:
        """Whether it is a place that holds a container, which may stay the same object."""
        return self.holder is None and self.write is not None and isinstance(self.read(), _REFILLED)

    def refill(self, value: Any) -> None:
        """Give the container that is there now what `value` holds."""
        refill(self.read(), value)


def is_simple(value: Any) -> bool:
    """Whether a slot may hold it."""
    if type(value) in _LEAVES:
        return _is_simple_leaf(value)
    return has_plain_keys(value) and all(map(_is_simple_leaf, flatten_tree(value)[0]))


def _is_simple_leaf(leaf: Any) -> bool:
    if type(leaf) in _TENSORS:
        return not leaf.requires_grad or leaf.grad_fn is not None
    return type(plain_size(leaf)) in _PLAIN or node_of(leaf) is not None


def has_plain_keys(value: Any) -> bool:
    """Whether no dict in here has keys (tensors, modules) that are more than names."""
    if isinstance(value, dict):
        return all(type(key) in _KEYS for key in value) and all(map(has_plain_keys, value.values()))
    return not isinstance(value, (list, tuple, deque)) or all(map(has_plain_keys, value))


def is_replaceable(then: Any, now: Any) -> bool:
    """Whether a place that held `then` and now holds `now` looks like one whose value calls replace."""
    if type(now) in _TENSORS:
        return (type(then) in _TENSORS or then is None) and is_simple(now)
    if not isinstance(now, (tuple, list, dict, deque)) or not isinstance(then, (tuple, list, dict, deque)):
        return False
    return is_simple(now) and is_simple(then)


def content_slot(container: Any, name: str) -> Slot:
    """What a list, deque or dict holds; it stays the same object."""
    return Slot(name, lambda: container, lambda value: refill(container, value), holder=container)


def refill(container: Any, value: Any) -> None:
    """Give the container what `value`, one of its kind, holds."""
    if value is container:
        return
    container.clear()
    if isinstance(container, dict):
        container.update(value)
    else:
        container.extend(value)


def copy_of(container: Any) -> Any:
    """The contents of a container as they are now, to compare with later."""
    return list(container.items()) if isinstance(container, dict) else list(container)


class Slots:
    """The slots of one captured call, with what they held when it began."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        flat = [_flat(slot.read()) for slot in slots]
        self.leaves: tuple[Any, ...] = tuple(leaf for leaves, _ in flat for leaf in leaves)
        self.names: tuple[str, ...] = tuple(
            f"{slot.name} #{number}" for slot, (leaves, _) in zip(slots, flat, strict=True)
            for number in range(len(leaves))
        )  # fmt: skip
        self._specs = [spec for _, spec in flat]
        self._forms = [(len(leaves), spec) for leaves, spec in flat]
        self._readers = [slot.read for slot in slots]

    def now(self) -> list[Any] | None:
        """What the slots hold now, flat; None where it has another structure."""
        found: list[Any] = []
        for read, spec in zip(self._readers, self._specs, strict=True):
            try:
                value = read()
            except _UNREADABLE:
                return None
            if type(value) in _LEAVES:
                if spec is not _LEAF:
                    return None
                found.append(value)
                continue
            leaves, structure = flatten_tree(value)
            if structure != spec:
                return None
            found += leaves
        return found

    def exchange(self, others: dict[int, Any]) -> None:
        """Put other leaves in the place of those with these identities: plain numbers for traced ones."""
        for slot in self.slots:
            leaves, spec = _flat(slot.read())
            if any(id(leaf) in others for leaf in leaves):
                _write(slot, unflatten_tree([others.get(id(leaf), leaf) for leaf in leaves], spec))

    def fill(self, leaves: Sequence[Any]) -> None:
        """Put these leaves, flat, into slots of the structure that they had when the call began."""
        rest = list(leaves)
        for slot, spec in zip(self.slots, self._specs, strict=True):
            then = _flat(slot.read())[0]
            fresh, rest = rest[: len(then)], rest[len(then) :]
            if any(a is not b for a, b in zip(then, fresh, strict=True)):
                _write(slot, unflatten_tree(fresh, spec))

    def stored(self, filled: Sequence[Any]) -> set[str]:
        """The names of the slots that hold something else than the varying numbers that they were filled with."""
        found: set[str] = set()
        rest = list(zip(filled, self.leaves, strict=True))
        for slot, (count, spec) in zip(self.slots, self._forms, strict=True):
            own, rest = rest[:count], rest[count:]
            if all(traced is number for traced, number in own):
                continue
            now, structure = _flat(slot.read())
            if structure != spec or any(a is not b for a, (b, number) in zip(now, own, strict=True) if b is not number):
                found.add(slot.name)
        return found

    def forget(self) -> None:
        """Let go of what the slots held when the call began."""
        self.leaves = ()


def _write(slot: Slot, fresh: Any) -> None:
    if slot.write is None:
        return
    value = slot.read()
    if isinstance(value, _REFILLED):  # the very container may be known elsewhere
        refill(value, fresh)
    else:
        slot.write(fresh)


def _flat(value: Any) -> tuple[list[Any], Any]:
    return ([value], _LEAF) if type(value) in _LEAVES else flatten_tree(value)


def without_traced(value: Any) -> Any:
    """The value with plain numbers in place of traced ones."""
    if node_of(value) is not None:
        return plainly(value)
    if type(value) in (list, tuple, dict, deque, OrderedDict, defaultdict):
        leaves, spec = flatten_tree(value)
        if any(node_of(leaf) is not None for leaf in leaves):
            return unflatten_tree([plainly(leaf) for leaf in leaves], spec)
    return value
