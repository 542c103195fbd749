"""Arguments and results of an exported function: nested containers flattened into leaves and a plain description.

Invariant: a `Tree` names containers of Python alone, so that a process without the model's classes can make them: a
named tuple is a tuple, an object with named fields (a dataclass, a `ModelOutput`) a dict.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_CONSTANTS = (int, float, str, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Tree:
    """`kind` is "leaf" (a tensor), "constant", "tuple", "list", "dict" or "ordered" (an OrderedDict).

    `keys` are a dict's keys, `value` a constant.
    """

    kind: str
    children: tuple[Tree, ...] = ()
    keys: tuple[Any, ...] = ()
    value: Any = None


class NotPlain(TypeError):
    """A value that no container or constant of an exported function can be; `place` is the way to it."""

    def __init__(self, place: str, value: Any) -> None:
        super().__init__(f"{place or 'the value'} is a {type(value).__name__}")


def flatten_plain(value: Any, place: str = "") -> tuple[list[tuple[str, torch.Tensor]], Tree]:
    """The tensors of `value`, each with the way to it ("batch['ids'][0]"), and its description; or NotPlain."""
    leaves: list[tuple[str, torch.Tensor]] = []

    def walk(item: Any, at: str) -> Tree:
        if isinstance(item, torch.Tensor):
            leaves.append((at, item))
            return Tree("leaf")
        if isinstance(item, _CONSTANTS):
            return Tree("constant", value=item)
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return Tree("tuple", tuple(walk(getattr(item, f), f"{at}.{f}") for f in item._fields))
        if isinstance(item, (list, tuple)):
            kind = "list" if isinstance(item, list) else "tuple"
            return Tree(kind, tuple(walk(v, f"{at}[{i}]") for i, v in enumerate(item)))
        if type(item) in (dict, OrderedDict):
            kind = "dict" if type(item) is dict else "ordered"
            return Tree(kind, tuple(walk(v, f"{at}[{k!r}]") for k, v in item.items()), _plain_keys(item, at))
        if isinstance(item, Mapping) and all(isinstance(k, str) for k in item):
            return _record(dict(item), at, walk)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return _record({f.name: getattr(item, f.name) for f in dataclasses.fields(item)}, at, walk)
        raise NotPlain(at, item)

    tree = walk(value, place)
    return leaves, tree


def _record(fields: dict[str, Any], at: str, walk: Callable[[Any, str], Tree]) -> Tree:
    return Tree("dict", tuple(walk(v, f"{at}.{k}") for k, v in fields.items()), tuple(fields))


def _plain_keys(item: dict[Any, Any], at: str) -> tuple[Any, ...]:
    for key in item:
        if not isinstance(key, (str, int)):
            raise NotPlain(f"a key of {at or 'a dict'}", key)
    return tuple(item)


def unflatten_plain(tree: Tree, leaves: Iterator[Any], constant: Callable[[Any], Any] = lambda value: value) -> Any:
    """The value that `tree` describes, its leaves taken from `leaves` in order, its constants through `constant`."""
    if tree.kind == "leaf":
        return next(leaves)
    if tree.kind == "constant":
        return constant(tree.value)
    parts = [unflatten_plain(child, leaves, constant) for child in tree.children]
    if tree.kind == "tuple":
        return tuple(parts)
    if tree.kind == "list":
        return parts
    found = zip(tree.keys, parts, strict=True)
    return dict(found) if tree.kind == "dict" else OrderedDict(found)
