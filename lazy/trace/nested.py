"""Functions over nested lists and tuples, as operators take and give them.

Written once here: a local function that calls itself is a reference cycle, and what it has seen, memory of tensors
among it, stays until Python's collector runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_nested(function: Callable[[Any], Any], value: Any, made: type | None = None) -> Any:
    """`value` with `function` of each leaf in its place, in containers of their own types or of the type `made`. What
    is of a subclass of these two is a leaf."""
    kind = type(value)
    if kind is list or kind is tuple:
        return (made or kind)([map_nested(function, item, made) for item in value])
    return function(value)
