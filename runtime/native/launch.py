"""Launching Triton's compiled kernels: one native function that calls the driver, in place of Triton's launcher.

Triton's own launcher is a Python function around a C function that parses its arguments by a format: two to five
microseconds beside the driver's call. Ours takes a stream, addresses and numbers, puts them where the driver reads
them, and calls it, with the interpreter's lock given up meanwhile as Triton does.

Invariant: it launches what Triton's launcher would, with the same arguments; kernels that want more than a grid, a
block and shared memory (clusters, scratch memory, cooperative or dependent launches) are left to Triton's.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchlazy.runtime.native.code import NativeCode, native_function, python_addresses, text_of

_PYTHON = (
    "PyLong_AsUnsignedLongLong", "PyLong_AsLongLong", "PyFloat_AsDouble", "PyErr_Occurred", "PyErr_SetString",
    "PyObject_Vectorcall", "PyEval_SaveThread", "PyEval_RestoreThread", "Py_IncRef",
)  # fmt: skip
_DRIVER = ("cuLaunchKernel", "cuGetErrorString")
MOST_PARAMETERS = 120
_WARP = 32
_PLAIN = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
          "profile_scratch_size": 0}  # fmt: skip
_EXTRAS = ("tensordesc_meta", "instrumentation_mode")


@dataclass(frozen=True)
class LaunchShape:
    """What a launcher of one variant is made of. It takes the stream, `pointers` addresses, the scalars, and the sizes
    where these change from run to run.

    `fixed` are addresses behind the pointers, `sizes` those that are always the same. `xblock` is 0 where `grid` is the
    number of programs, else it is the first size in pieces of `xblock`. `unaligned` is called with the same arguments
    where an address is no multiple of 16; None where addresses do not matter. `kept` lives as long as the launcher.
    """

    pointers: int
    fixed: tuple[int, ...]
    scalars: tuple[type, ...]
    sizes: tuple[int, ...]
    moving_sizes: int
    grid: int
    xblock: int
    unaligned: Callable[..., int] | None
    kept: tuple[Any, ...] = ()


@dataclass(frozen=True)
class DriverLaunch:
    """How the driver launches a variant: `driver` is where cuLaunchKernel and cuGetErrorString are, `function` the
    kernel's handle, `threads` and `shared` the size of a block and its bytes of shared memory."""

    driver: tuple[int, ...]
    function: int
    threads: int
    shared: int
    shape: LaunchShape


def driver_launch(compiled: Any, shape: LaunchShape) -> DriverLaunch | None:
    """Of a loaded `triton.compiler.CompiledKernel`; None where Triton's launcher has to launch it."""
    metadata, function = compiled.metadata, compiled.function
    is_plain = all(getattr(metadata, name, plain) == plain for name, plain in _PLAIN.items())
    is_plain = is_plain and not any(getattr(metadata, name, None) for name in _EXTRAS)
    driver = _driver()
    if driver is None or not is_plain or type(function) is not int:
        return None
    return DriverLaunch(driver, function, _WARP * metadata.num_warps, metadata.shared, shape)


def native_launcher(compiled: Any, shape: LaunchShape) -> Callable[..., int] | None:
    """The launcher of a loaded `triton.compiler.CompiledKernel`; None where Triton's has to launch it."""
    found = driver_launch(compiled, shape)
    return None if found is None else launcher_of(found.driver, found.function, found.threads, found.shared, shape)


def launcher_of(
    driver: Sequence[int], function: int, threads: int, shared: int, shape: LaunchShape
) -> Callable[..., int] | None:
    """A launcher that calls `driver[0]`, cuLaunchKernel, and asks `driver[1]`, cuGetErrorString, where that fails."""
    counts = (shape.pointers, len(shape.fixed), len(shape.scalars), len(shape.sizes), shape.moving_sizes)
    found = _loaded() if sum(counts) <= MOST_PARAMETERS else None
    if found is None:
        return None
    zero, error = 0, RuntimeError
    objects = (id(shape.unaligned) if shape.unaligned is not None else 0, id(zero), id(error))
    words = (
        *python_addresses(_PYTHON), *driver, *objects, function, shape.grid, shape.xblock, threads, shared, *counts,
        *shape.fixed, *shape.sizes, *(kind is float for kind in shape.scalars),
    )  # fmt: skip
    packed = b"".join(struct.pack("=q" if word < 0 else "=Q", word) for word in words)  # type: ignore[operator]
    return native_function(found, packed, (shape, zero, error))


@functools.cache
def _driver() -> tuple[int, ...] | None:
    """Where the driver's functions are."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _DRIVER]
    except (OSError, AttributeError):
        return None
    return tuple(address for address in functions if address is not None)


CODE = NativeCode(
    "native_launch",
    lambda: text_of("launch.cpp"),
    (*_PYTHON, "PyCFunction_NewEx"),
    "kernels are launched by Triton's launcher",
)


@functools.cache
def _loaded() -> int | None:
    """Where the function is described; None where it cannot be compiled."""
    address = CODE.wait()
    if address is None:
        return None
    # Where bytes have what is in them: their size of nothing, but for the zero at the end.
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)(address)(bytes.__basicsize__ - 1)  # type: ignore[no-any-return]
