"""Numba kernels: a Python file in the cache folder, compiled for one signature, once in each process.

Numba's own disk cache is off: it unpickles what it finds, and we load no pickle. So each process compiles anew, when a
program is loaded; a compile worker has compiled it before only to see that it can be. Numba serves machines without a
C++ compiler; C++ kernels do stay on disk.

Invariant: a source's text defines one plain function `kernel` over ints and floats. What the prelude defines is in its
globals; the prelude is a module of its own, executed once a process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchlazy.runtime.errors import KernelCompileError, ToolchainMissing
from torchlazy.runtime.program.program import KernelSource
from torchlazy.runtime.toolchains.kernel_cache import KernelCache

log = logging.getLogger("torchlazy.runtime")

_FORMAT = "numba-1"
Function = Callable[..., int]


@functools.cache
def has_numba() -> bool:
    """Whether numba can be imported."""
    return importlib.util.find_spec("numba") is not None


def load(
    group: Sequence[tuple[KernelSource, str]], cache: KernelCache
) -> tuple[dict[str, Function], list[KernelCompileError]]:
    """Functions by source key, and the sources that did not compile; `group` pairs each source with its prelude."""
    if not has_numba():
        raise ToolchainMissing("a numba kernel is to be loaded and numba is not installed: pip install numba")
    functions: dict[str, Function] = {}
    failures: list[KernelCompileError] = []
    for source, prelude in group:
        key = _disk_key(source, prelude)
        if key not in cache.memory:
            try:
                cache.memory[key] = _compile(source, prelude, key, cache)
            except Exception as error:  # Numba's errors have many bases; each means that this source is at fault
                failures.append(KernelCompileError(source, f"{type(error).__name__}: {error}"))
                continue
        functions[source.key] = cache.memory[key]
    return functions, failures


def _compile(source: KernelSource, prelude: str, key: str, cache: KernelCache) -> Function:
    import numba

    namespace = _prelude_namespace(prelude, cache) if prelude else {}
    path = cache.source_file("numba", key, source.text)
    module = _execute(f"torchlazy_kernel_{key}", path, namespace)
    kernel = getattr(module, source.entry)
    number = {float: numba.float64, int: numba.int64, bool: numba.int64}
    scalars = [number[kind] for kind in source.scalars]
    if source.foreach:
        parameters = [numba.int64, numba.int64, *scalars]
    else:
        parameters = [numba.int64] * len(source.pointers) + scalars + [numba.int64] * source.sizes
    compiled = numba.njit(
        numba.int64(*parameters),
        parallel="prange(" in source.text,  # automatic parallelisation is slow to compile, and finds nothing else
        nogil=True,
        error_model="numpy",
        cache=False,  # it is made of pickles
    )(kernel)
    function = _with_table_address(compiled) if source.foreach else compiled
    return _one_at_a_time(function) if _needs_lock() else function


def _with_table_address(compiled: Function) -> Function:
    """Foreach tables come as bytes or as an address; compiled code knows addresses only."""

    def launch(table: bytes | int, rows: int, *scalars: float) -> int:
        if isinstance(table, bytes):
            return compiled(ctypes.cast(ctypes.c_char_p(table), ctypes.c_void_p).value, rows, *scalars)
        return compiled(table, rows, *scalars)

    return launch


@functools.cache
def _needs_lock() -> bool:
    """Numba's last-resort threading layer aborts the process when two threads enter it; the others are safe."""
    return all(
        importlib.util.find_spec(f"numba.np.ufunc.{pool}") is None for pool in ("tbbpool", "omppool")
    )  # fmt: skip


_lock = threading.Lock()


def _one_at_a_time(function: Function) -> Function:
    def launch(*args: Any) -> int:
        with _lock:
            return function(*args)

    return launch


_preludes: dict[str, dict[str, Any]] = {}


def _prelude_namespace(prelude: str, cache: KernelCache) -> dict[str, Any]:
    digest = hashlib.sha256(prelude.encode()).hexdigest()
    if digest not in _preludes:
        module = _execute(f"torchlazy_prelude_{digest}", cache.source_file("numba", digest, prelude), {})
        _preludes[digest] = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return _preludes[digest]


def _execute(name: str, path: Path, namespace: dict[str, Any]) -> types.ModuleType:
    """A module made of the file, with `namespace` among its globals; registered, as tracebacks and Numba look there."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(namespace)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _disk_key(source: KernelSource, prelude: str) -> str:
    import numba

    digest = hashlib.sha256(prelude.encode()).hexdigest()
    return hashlib.sha256("\n".join((_FORMAT, source.key, digest, numba.__version__)).encode()).hexdigest()
