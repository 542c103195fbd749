"""Whether code is the program's own or a library's, in which nothing is guarded.

Invariant: answers depend on module names and the places of their files alone.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from pathlib import Path
from typing import Any

_INSTALLED_LIBRARIES = frozenset({"torch", "numpy", "torchlazy", "triton", "sympy"})
_LIBRARIES = frozenset(sys.stdlib_module_names) | _INSTALLED_LIBRARIES
_STANDARD = Path(os.__file__).parent  # the standard library's folder
_MADE_AT_RUN_TIME = 1 << 9  # the flag of heap types: classes that are no part of the interpreter
INSTALLED = ("site-packages", "dist-packages")  # libraries name JSON for their own files


def is_library(kind: type) -> bool:
    """Whether the class belongs to a library, in which nothing is guarded."""
    name = getattr(kind, "__module__", "builtins")
    if name == "builtins" and kind.__flags__ & _MADE_AT_RUN_TIME:  # by code that `exec` ran without a `__name__`
        return False
    return is_library_name(name)


def is_library_function(function: types.FunctionType) -> bool:
    """Whether the function belongs to such a library. Builtins are no Python functions: one whose module is "builtins",
    or that names none, was made by code that `exec` ran without a `__name__`."""
    name: Any = function.__module__
    return isinstance(name, str) and name != "builtins" and is_library_name(name)


@functools.lru_cache(maxsize=65536)
def is_library_name(name: Any) -> bool:
    """Whether a module of this name belongs to such a library."""
    return not isinstance(name, str) or _is_library_package(name.partition(".")[0])


@functools.cache
def is_installed(module: Any) -> bool:
    """Whether the module of this name is an installed package's, not of the program itself."""
    file = getattr(sys.modules.get(module) if isinstance(module, str) else None, "__file__", None)
    return file is not None and any(part in file for part in INSTALLED)


@functools.cache
def _is_library_package(name: str) -> bool:
    """A file of the user's may have the name of a standard library module (`test.py`) and then shadows it."""
    if name not in _LIBRARIES:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return name in _INSTALLED_LIBRARIES or file is None or Path(file).is_relative_to(_STANDARD)


__all__ = ["INSTALLED", "is_installed", "is_library", "is_library_function", "is_library_name"]
