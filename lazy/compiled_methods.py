"""Compiled methods: one compiled callable for each object, kept by the object, or by the class of a class method.

Invariant: what is kept stays behind when the object is copied or saved.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any


class KeptMethods(dict[Any, Any]):
    """The compiled methods of an object. They stay behind when it is copied or saved."""

    def __deepcopy__(self, memo: Any) -> KeptMethods:
        return KeptMethods()

    def __reduce__(self) -> Any:
        return KeptMethods, ()


def name_of_decorated(compiled: Any, function: Any) -> str:
    """The name under which a compiled callable is saved, as functions are: where it was decorated in its definition."""
    name = getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(getattr(function, "__module__", ""))
    for part in name.split("."):
        found = getattr(found, part, None)
    return str(name) if found is compiled else ""


KEPT_BY_CLASSES: weakref.WeakKeyDictionary[type, KeptMethods] = weakref.WeakKeyDictionary()

__all__ = ["KEPT_BY_CLASSES", "KeptMethods", "name_of_decorated"]
