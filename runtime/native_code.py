"""C++ of the project's own that works on Python's objects, compiled by the kernels' toolchain when it is first needed.

It calls Python's C functions through addresses that ctypes gives, and so needs no headers of Python's.

Invariant: what calls it has another way to do the same, for where there is no compiler or no global interpreter lock.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torchlazy.runtime.errors import KernelCompileError, ToolchainMissing
from torchlazy.runtime.kernel_cache import open_cache
from torchlazy.runtime.program import KernelSource
from torchlazy.runtime.toolchain_cpp import has_cpp, load

log = logging.getLogger("torchlazy.runtime")


def load_native(name: str, text: str, needed: Sequence[str], otherwise: str) -> int | None:
    """The address of the function `kernel` in `text`; None where it cannot be compiled.

    `needed` are the functions of Python's that it calls. `otherwise` is told where there is a compiler that fails: what
    is done instead.
    """
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()  # else others may change what is looked at
    if not has_lock or not has_cpp() or not all(hasattr(ctypes.pythonapi, function) for function in needed):
        return None
    source = KernelSource("cpp", name, text, pointers=())
    try:
        functions, failed = load([(source, "")], open_cache())
    except (OSError, ToolchainMissing) as error:
        log.warning("%s: %s cannot be built (%s)", otherwise, name, error)
        return None
    if failed:
        log.warning("%s: %s", otherwise, KernelCompileError(source, failed[0].log))
        return None
    return ctypes.cast(functions[source.key], ctypes.c_void_p).value  # type: ignore[arg-type]


def python_addresses(names: Sequence[str]) -> list[int | None]:
    """Where these functions of Python's are."""
    return [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in names]


class _ModuleName(str):
    """What a function in C calls its module: whoever looks for the file of it (torch's own capture) wants a text."""

    kept: Any = None


def native_function(description: int | None, own: bytes, kept: Any) -> Callable[..., Any]:
    """The function in C that a `PyMethodDef` at this address describes. `own` is its `self`; it keeps `kept` alive."""
    module = _ModuleName(__name__)
    module.kept = kept
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    found: Callable[..., Any] = make(description, own, module)
    return found
