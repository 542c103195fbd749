"""Arguments and results of an exported function: nested containers flattened into leaves and a plain description.

Invariant: a `Tree` is data with a form in JSON; unflattening needs no class of the model's code. What
was an object with named fields (a dataclass, a `ModelOutput`) comes back as a `Record`, a namedtuple as a namedtuple.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_CONSTANTS = (int, float, str, bool, type(None), torch.dtype, torch.device)


class Record(OrderedDict[str, Any]):
    """Named results: by name as keys or attributes, by position as a tuple of the values."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


@dataclass(frozen=True, slots=True)
class Tree:
    """`kind` is "leaf" (a tensor), "constant", "tuple", "list", "dict", "namedtuple" or "record".

    `keys` are the keys or field names, `name` a namedtuple's or record's class, `value` a constant.
    """

    kind: str
    children: tuple[Tree, ...] = ()
    keys: tuple[Any, ...] = ()
    name: str = ""
    value: Any = None


class NotPlain(TypeError):
    """A value that no container or constant of an exported function can be; `place` is the way to it."""

    def __init__(self, place: str, value: Any) -> None:
        super().__init__(f"{place or 'the value'} is a {type(value).__name__}")
        self.place = place
        self.value = value


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
            fields = tuple(item._fields)
            children = tuple(walk(getattr(item, f), f"{at}.{f}") for f in fields)
            return Tree("namedtuple", children, fields, type(item).__name__)
        if isinstance(item, (list, tuple)):
            kind = "list" if isinstance(item, list) else "tuple"
            return Tree(kind, tuple(walk(v, f"{at}[{i}]") for i, v in enumerate(item)))
        if type(item) in (dict, OrderedDict):
            return Tree("dict", tuple(walk(v, f"{at}[{k!r}]") for k, v in item.items()), _plain_keys(item, at))
        if isinstance(item, Mapping) and all(isinstance(k, str) for k in item):
            return _record(item, dict(item), at, walk)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            fields_of = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
            return _record(item, fields_of, at, walk)
        raise NotPlain(at, item)

    tree = walk(value, place)
    return leaves, tree


def _record(item: Any, fields: dict[str, Any], at: str, walk: Callable[[Any, str], Tree]) -> Tree:
    children = tuple(walk(v, f"{at}.{k}") for k, v in fields.items())
    return Tree("record", children, tuple(fields), type(item).__name__)


def _plain_keys(item: dict[Any, Any], at: str) -> tuple[Any, ...]:
    for key in item:
        if not isinstance(key, (str, int)):
            raise NotPlain(f"a key of {at or 'a dict'}", key)
    return tuple(item)


def unflatten_plain(
    tree: Tree, leaves: Iterator[torch.Tensor], constant: Callable[[Any], Any] = lambda value: value
) -> Any:
    """The value that `tree` describes, its tensors taken from `leaves` in order, its constants through `constant`."""
    if tree.kind == "leaf":
        return next(leaves)
    if tree.kind == "constant":
        return constant(tree.value)
    parts = [unflatten_plain(child, leaves, constant) for child in tree.children]
    if tree.kind == "tuple":
        return tuple(parts)
    if tree.kind == "list":
        return parts
    if tree.kind == "dict":
        return dict(zip(tree.keys, parts, strict=True))
    if tree.kind == "namedtuple":
        return namedtuple(tree.name, tree.keys, rename=True)(*parts)  # type: ignore[misc]
    return Record(zip(tree.keys, parts, strict=True))


def differing(have: Tree, want: Tree, place: str) -> str:
    """How a value differs from what was exported, in words; empty if its structure and constants are the same."""
    if (have.kind, want.kind) != ("constant", "constant") and have.kind != want.kind:
        return f"{place} is a {_noun(have)}, it was a {_noun(want)} at the export"
    if have.kind == "constant":
        same = type(have.value) is type(want.value) and (have.value == want.value or have.value is want.value)
        is_nan = have.value != have.value and want.value != want.value
        return "" if same or is_nan else f"{place} is {have.value!r}, it was {want.value!r} at the export"
    if have.keys != want.keys and set(have.keys) == set(want.keys):
        return f"{place} has the keys {list(have.keys)}, in the order {list(want.keys)} at the export"
    if have.keys != want.keys:
        return f"{place} has the keys {list(have.keys)}, {list(want.keys)} at the export"
    if len(have.children) != len(want.children):
        return f"{place} has {len(have.children)} items, {len(want.children)} at the export"
    for position, (mine, theirs) in enumerate(zip(have.children, want.children, strict=True)):
        found = differing(mine, theirs, _child_place(want, position, place))
        if found:
            return found
    return ""


def _child_place(tree: Tree, position: int, place: str) -> str:
    if tree.kind == "dict":
        return f"{place}[{tree.keys[position]!r}]"
    return f"{place}.{tree.keys[position]}" if tree.keys else f"{place}[{position}]"


def _noun(tree: Tree) -> str:
    nouns = {"leaf": "tensor", "constant": type(tree.value).__name__, "record": tree.name, "namedtuple": tree.name}
    return nouns.get(tree.kind, tree.kind)
