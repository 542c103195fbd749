"""Objects among the arguments and results of compiled calls, flattened as containers of their attributes.

Invariant: only objects that consist of their attributes are flattened: of Python classes without slots and finalizers,
and of no library whose state guards do not see. Unflattening gives new objects of the classes with these attributes
and runs none of their code; an object that occurs twice is one object again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import sys
import types
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torchlazy.lazy.numbers.questions import TrackedSize
from torchlazy.lazy.torch_private.dispatch import flatten_tree, unflatten_tree
from torchlazy.lazy.trace.library_code import is_library


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A flattened object: its class, the names of its attributes, and the structure of the list of their values."""

    kind: type
    names: tuple[str, ...]
    within: Spec


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """Another occurrence of the flattened object of this number."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A structure with objects in it: torch's spec, and for each of its leaves what it is (None: a leaf)."""

    spec: Any
    parts: tuple[Made | Again | None, ...]


Spec: TypeAlias = Any  # torch's spec where there are no objects, else an `Opened`
Test: TypeAlias = Callable[[Any], bool]


def flatten_open(value: Any, opens: Test | None = None, is_leaf: Test | None = None) -> tuple[list[Any], Spec]:
    """The leaves of nested containers and objects, and their structure, which hashes.

    `opens`: which objects to flatten, those within others aside (None: all that can be); `is_leaf`: what stays whole.
    """
    leaves: list[Any] = []
    spec = _flatten(value, opens or is_object, is_leaf, leaves, {})
    return leaves, spec


def _flatten(value: Any, opens: Test, is_leaf: Test | None, leaves: list[Any], seen: dict[int, int]) -> Spec:
    flat, spec = flatten_tree(value, is_leaf)
    start = len(leaves)
    parts: list[Made | Again | None] = []
    for leaf in flat:
        if type(leaf) in _ATOMS or not opens(leaf) or (is_leaf is not None and is_leaf(leaf)):
            leaves.append(leaf)
            parts.append(None)
        elif id(leaf) in seen:
            parts.append(Again(seen[id(leaf)]))
        else:
            seen[id(leaf)] = len(seen)
            own = vars(leaf)
            parts.append(Made(type(leaf), tuple(own), _flatten(list(own.values()), is_object, is_leaf, leaves, seen)))
    return spec if len(leaves) - start == len(flat) and not any(parts) else Opened(spec, tuple(parts))


def unflatten_open(leaves: Sequence[Any], spec: Spec) -> Any:
    """New nested containers and objects of this structure, with these leaves."""
    return unflatten_tree(leaves, spec) if type(spec) is not Opened else _close(spec, iter(leaves), [])


def _close(spec: Spec, leaves: Iterator[Any], made: list[Any]) -> Any:
    if type(spec) is not Opened:
        return unflatten_tree([next(leaves) for _ in range(spec.num_leaves)], spec)
    values: list[Any] = []
    for part in spec.parts:
        if part is None:
            values.append(next(leaves))
        elif type(part) is Again:
            values.append(made[part.number])
        else:
            assert isinstance(part, Made)
            found: Any = part.kind() if part.kind in NAMESPACES else object.__new__(part.kind)
            made.append(found)
            values.append(found)
            found.__dict__.update(zip(part.names, _close(part.within, leaves, made), strict=True))
    return unflatten_tree(values, spec.spec)


def kinds_in(spec: Spec) -> set[type]:
    """The classes of the objects in a structure that are in no other object."""
    return {part.kind for part in spec.parts if isinstance(part, Made)} if type(spec) is Opened else set()


# ---- which objects


def is_object(value: Any) -> bool:
    """Whether the value is an object that consists of its attributes."""
    kind: Any = type(value)
    if _is_open_kind(kind) and type(getattr(value, "__dict__", None)) is dict:
        return True
    return is_data(value)


def is_data(value: Any) -> bool:
    """Whether it is an object of a data class with its fields and no other attributes."""
    kind = type(value)
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is None or issubclass(kind, (type, list, tuple, dict)) or hasattr(kind, "__del__"):
        return False
    own = getattr(value, "__dict__", None)
    return type(own) is dict and own.keys() == fields.keys()


class _Plain:
    """The smallest object with attributes."""


_SIZE = _Plain.__basicsize__
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_BASES = frozenset({"abc", "typing", "collections.abc", "_collections_abc"})  # modules of bases without state
_ATOMS = frozenset(
    {
        torch.Tensor,
        torch.nn.Parameter,
        int,
        float,
        bool,
        str,
        bytes,
        complex,
        type(None),
        torch.dtype,
        torch.device,
        type,
        TrackedSize,
    }
)


@functools.lru_cache(maxsize=4096)
def _is_open_kind(kind: type) -> bool:
    if kind in NAMESPACES:
        return True
    if type(kind) is not type and not is_library(type(kind)) and type(kind).__module__ != "abc":
        return False  # a metaclass of the user's may count its instances
    if not kind.__dictoffset__ or kind.__basicsize__ > _SIZE or hasattr(kind, "__del__"):
        return False
    return all(base is object or base.__module__ in _BASES or not is_library(base) for base in kind.__mro__)


# ---- whether they are new


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples, dictionaries and data classes."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, dict):
        items: Sequence[Any] = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        items = value if isinstance(value, (list, tuple)) else ()
    for item in items:
        yield from tensors_in(item)


def is_held_elsewhere(value: Any, but: Container[int], holders: Sequence[Any] = ()) -> bool:
    """Whether anything outside of `value`, a call's result, holds an object that is flattened in it: then it existed
    before the call, or is kept. `but`: identities of what is not flattened; `holders` are known to hold objects."""
    inside: dict[int, Any] = {}
    objects = []
    pending = [value]
    while pending:
        item = pending.pop()
        if id(item) in inside or id(item) in but or type(item) in _ATOMS:
            continue
        if is_object(item):
            objects.append(item)
        elif _is_leaf(item):
            continue
        inside[id(item)] = item
        own = getattr(item, "__dict__", None)
        if type(own) is dict:
            inside[id(own)] = own
            pending += own.values()
        pending += gc.get_referents(item)
    if not objects:
        return False
    asked = tuple(objects)  # Python 3.13 finds it among the referrers
    allowed = {*inside, id(inside), id(objects), id(asked), id(pending), *map(id, holders)}
    found = gc.get_referrers(*asked)
    return any(id(holder) not in allowed and not isinstance(holder, types.FrameType) for holder in found)


def _is_leaf(value: Any) -> bool:
    leaves, _ = flatten_tree(value)
    return len(leaves) == 1 and leaves[0] is value


def is_named(value: Any) -> bool:
    """Whether it is a class or a function that its module has under its qualified name."""
    if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return False
    found: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value
