"""Data classes among the arguments and results of compiled calls, as containers of their fields.

Invariant: only objects that are nothing but their fields are opened: instances of the user's own data classes without
slots, whose attributes are the fields and no others. Closing gives a new object of the class with these fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

from torchlazy.lazy.torch_private import register_container


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """An opened object: its class, and the values of its fields by name."""

    kind: type
    values: dict[str, Any]


register_container(
    Fields,
    lambda opened: (list(opened.values.values()), (opened.kind, tuple(opened.values))),
    lambda values, context: Fields(context[0], dict(zip(context[1], values, strict=True))),
)


def opened(value: Any, but: Container[int] = ()) -> Any:
    """The value with data classes in it as `Fields`; the very object where there are none.

    `but`: identities of objects that stay what they are.
    """
    kind = type(value)
    if kind in (list, tuple):
        items = [opened(item, but) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
    if kind is dict:
        found = {key: opened(item, but) for key, item in value.items()}
        return value if all(found[key] is item for key, item in value.items()) else found
    if id(value) in but or not is_plain(value):
        return value
    return Fields(kind, {name: opened(item, but) for name, item in vars(value).items()})


def closed(value: Any) -> Any:
    """The value with new objects in place of `Fields`."""
    kind = type(value)
    if kind is Fields:
        made = object.__new__(value.kind)
        for name, item in value.values.items():
            object.__setattr__(made, name, closed(item))
        return made
    if kind in (list, tuple):
        items = [closed(item) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
    if kind is dict:
        found = {key: closed(item) for key, item in value.items()}
        return value if all(found[key] is item for key, item in value.items()) else found
    return value


def is_plain(value: Any) -> bool:
    """Whether the value is a data class that is nothing but its fields."""
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is None or isinstance(value, (type, Fields)):
        return False
    own = getattr(value, "__dict__", None)
    return type(own) is dict and own.keys() == fields.keys() and not isinstance(value, (list, tuple, dict))
