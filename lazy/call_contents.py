"""Containers among the arguments of a call, and what the call does to them: a cache that grows, a list of losses.

Invariant: containers are numbered in the order in which the arguments hold them, so that a call of the same structure
has the same ones under the same numbers; what is written down of a call is what each holds afterwards.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torchlazy.lazy.plain_objects import Test, is_object
from torchlazy.lazy.torch_private import flatten_tree, unflatten_tree

_ATOMS = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, bytes, type(None)})
_LISTS = (list, deque)
_DICTS = (dict, OrderedDict, defaultdict)


def containers_in(value: Any, opens: Test) -> list[Any]:
    """The lists, deques, dictionaries and opened objects in the value. Objects stand there once, others as often as
    they come."""
    found: list[Any] = []
    _collect(value, opens, found, set())
    return found


def _collect(value: Any, opens: Test, found: list[Any], seen: set[int]) -> None:
    kind = type(value)
    if kind in _ATOMS:
        return
    items: Iterable[Any]
    if kind in _LISTS:
        items = value
    elif kind in _DICTS:
        items = value.values()
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, opens, found, seen)
        return
    elif id(value) not in seen and opens(value):
        seen.add(id(value))
        items, opens = vars(value).values(), is_object
    else:
        return
    found.append(value)
    for item in items:
        _collect(item, opens, found, seen)


def contents_of(container: Any) -> Any:
    """What the container holds now: a list, or a dictionary of items or attributes."""
    kind = type(container)
    return list(container) if kind in _LISTS else dict(container if kind in _DICTS else vars(container))


def holders_of(containers: Iterable[Any]) -> Iterator[Any]:
    """The very objects that hold what is in the containers: these, or an object's dictionary."""
    for container in containers:
        yield container
        if type(container) not in _LISTS and type(container) not in _DICTS:
            yield vars(container)


def refill(container: Any, contents: Any) -> None:
    """Let the container hold this."""
    kind = type(container)
    if kind in _LISTS:
        container.clear()
        container.extend(contents)
        return
    own = container if kind in _DICTS else vars(container)
    own.clear()
    own.update(contents)


def exchanged(value: Any, leaf_of: Callable[[Any], Any], but: Container[int] = ()) -> Any:
    """The value with other leaves: containers and objects are the same ones and hold others, tuples are made anew.

    `but`: identities of containers that `leaf_of` answers for.
    """
    return _exchanged(value, leaf_of, but, set())


def _exchanged(value: Any, leaf_of: Callable[[Any], Any], but: Container[int], seen: set[int]) -> Any:
    kind = type(value)
    if kind in _ATOMS or id(value) in but:
        return leaf_of(value)
    if isinstance(value, tuple):
        items = [_exchanged(item, leaf_of, but, seen) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return kind(items) if not hasattr(kind, "_fields") else kind(*items)
    if kind not in _LISTS and kind not in _DICTS and not is_object(value):
        leaves, spec = flatten_tree(value)
        if len(leaves) == 1 and leaves[0] is value:
            return leaf_of(value)
        fresh = [_exchanged(leaf, leaf_of, but, seen) for leaf in leaves]
        return value if all(a is b for a, b in zip(fresh, leaves, strict=True)) else unflatten_tree(fresh, spec)
    if id(value) in seen:
        return value
    seen.add(id(value))
    if kind in _LISTS:
        for position, item in enumerate(value):
            fresh = _exchanged(item, leaf_of, but, seen)
            if fresh is not item:
                value[position] = fresh
        return value
    own = value if kind in _DICTS else vars(value)
    for key, item in list(own.items()):
        fresh = _exchanged(item, leaf_of, but, seen)
        if fresh is not item:
            own[key] = fresh
    return value


class ContentsBefore:
    """What the containers among the arguments held before the call."""

    def __init__(self, containers: Sequence[Any]) -> None:
        self.containers = tuple(containers)
        self.numbers = {id(container): number for number, container in enumerate(containers)}
        self._before = [contents_of(container) for container in containers]

    def changes(self) -> Iterator[tuple[int, Any]]:
        """Containers that hold something else now, by number, with what they hold."""
        for number, (container, before) in enumerate(zip(self.containers, self._before, strict=True)):
            now = contents_of(container)
            if not _is_same(before, now):
                yield number, now


def _is_same(before: Any, now: Any) -> bool:
    if len(before) != len(now):
        return False
    if isinstance(now, list):
        return all(a is b for a, b in zip(before, now, strict=True))
    return all(a is b for a, b in zip(before, now, strict=True)) and all(
        a is b for a, b in zip(before.values(), now.values(), strict=True)
    )
