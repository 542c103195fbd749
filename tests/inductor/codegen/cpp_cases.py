"""Builds kernels by hand, compiles their C++ with one small g++ call, and runs them on tensors.

The product's toolchain is not used here: a broken cache or loader must not hide what the generator does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchlazy.inductor.codegen.cpp import PRELUDES, emit
from torchlazy.inductor.codegen.kernel import EmittedKernel
from torchlazy.inductor.index import axis, axis_index
from torchlazy.inductor.ir import Axis, Buffer, Kernel, LoopNode, Statement, Sweep
from torchlazy.prims.meta import contiguous_strides
from torchlazy.runtime.program.program import KernelSource
from torchlazy.runtime.toolchains import toolchain_cpp

# Another instruction set can be tried on one machine: TORCHLAZY_TEST_MARCH=haswell pytest ...
MARCH = os.environ.get("TORCHLAZY_TEST_MARCH", "native")
FLAGS = (
    "-O3", f"-march={MARCH}", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-ffp-contract=off",
    "-w",
)  # fmt: skip
HAS_COMPILER = shutil.which("g++") is not None
_folder = tempfile.TemporaryDirectory(prefix="torchlazy-test-cpp-")


def buffer(
    name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, strides: Sequence[int] | None = None
) -> Buffer:
    """A buffer, contiguous unless told."""
    return Buffer(name, dtype, tuple(shape), tuple(strides or contiguous_strides(tuple(shape))), "cpu")


@dataclass
class KernelBuilder:
    """Statements over x axes of sizes `xs` and reduce axes of sizes `rs`; `sweep` starts a sweep."""

    xs: tuple[int, ...]
    rs: tuple[int, ...] = ()
    scalars: tuple[tuple[str, type], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    reads: dict[str, Buffer] = field(default_factory=dict)
    writes: dict[str, Buffer] = field(default_factory=dict)
    sweeps: list[tuple[bool, list[Statement]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x, self.r = axis_index("x", self.xs), axis_index("r", self.rs)
        if self.xs == (1,):
            self.x = (axis("x0", 1),)

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, strides: Any = None) -> Buffer:
        self.reads[name] = buffer(name, shape, dtype, strides)
        return self.reads[name]

    def sweep(self, over_reduce_axes: bool) -> KernelBuilder:
        self.sweeps.append((over_reduce_axes, []))
        return self

    def point(self, out: Buffer, body: Callable[..., Any], stored: bool = True, index: Any = None) -> Buffer:
        """A pointwise statement: `body(ops, index)` at x, or at (x, r) in a sweep over the reduce axes."""
        if not self.sweeps:
            self.sweep(False)
        index = index if index is not None else (*self.x, *self.r) if self.sweeps[-1][0] else self.x
        node = LoopNode((out,), out.shape, lambda ops, i, r: body(ops, i))
        return self._add(Statement(node, tuple(index), (), (out.name,) if stored else ()))[0]

    def reduce(
        self, outs: Sequence[Buffer], kind: Any, body: Callable[..., Any], stored: bool = True,
        accumulate: torch.dtype = torch.float32,
    ) -> tuple[Buffer, ...]:  # fmt: skip
        node = LoopNode(tuple(outs), self.xs, body, self.rs, kind, accumulate)
        return self._add(Statement(node, self.x, self.r, tuple(o.name for o in outs) if stored else ()))

    def _add(self, statement: Statement) -> tuple[Buffer, ...]:
        self.sweeps[-1][1].append(statement)
        self.writes |= {out.name: out for out in statement.node.outputs if out.name in statement.stored}
        return statement.node.outputs

    def build(self) -> Kernel:
        axes = tuple(Axis(axis(f"x{n}", size), size) for n, size in enumerate(self.xs))
        reduce_axes = tuple(Axis(axis(f"r{n}", size), size) for n, size in enumerate(self.rs))
        sweeps = tuple(Sweep(over, tuple(statements)) for over, statements in self.sweeps)
        return Kernel(axes, reduce_axes, sweeps, tuple(self.reads.values()), tuple(self.writes.values()), self.scalars,
                      self.aliases)  # fmt: skip


@functools.cache
def _library(text: str) -> ctypes.CDLL:
    path = Path(_folder.name, hashlib.sha256(text.encode()).hexdigest()[:24])
    path.with_suffix(".cpp").write_text(text)
    flags, libraries = toolchain_cpp._ways_to_link(("g++",))[0]
    command = ["g++", *FLAGS, *flags, str(path.with_suffix(".cpp")), "-o", str(path.with_suffix(".so")), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr[:4000]}\n{text[-4000:]}"
    return ctypes.CDLL(str(path.with_suffix(".so")))


def compile_all(sources: Sequence[KernelSource]) -> list[Any]:
    """One translation unit for all sources; the functions in their order."""
    parts = ["#include <cstdint>", PRELUDES["cpp"]]
    for number, source in enumerate(sources):
        assert source.text.count(" kernel(") == 1, "the entry stands once, as ` kernel(`"
        parts.append(f"namespace n{number} {{\n{source.text.replace(' kernel(', f' kernel{number}(')}}}")
    library = _library("\n".join(parts))
    functions = []
    for number, source in enumerate(sources):
        function = getattr(library, f"kernel{number}")
        scalars = [ctypes.c_double if kind is float else ctypes.c_int64 for kind in source.scalars]
        if source.foreach:
            function.argtypes = [ctypes.c_void_p, ctypes.c_int64, *scalars]
        else:
            function.argtypes = [ctypes.c_void_p] * len(source.pointers) + scalars + [ctypes.c_int64] * source.sizes
        functions.append(function)
    return functions


def call(
    function: Any, emitted: EmittedKernel, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any] | None = None
) -> int:
    """Run one compiled kernel on tensors by buffer name."""
    scalars = scalars or {}
    arguments = [tensors[name].data_ptr() for name in emitted.buffers]
    return function(*arguments, *(scalars[name] for name in emitted.scalars), *emitted.sizes)


def storage(meta: Buffer) -> torch.Tensor:
    """Fresh memory with the buffer's layout, filled with junk."""
    result = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype)
    return result.fill_(0 if meta.dtype is torch.bool else 77)


def run(
    kernel: Kernel, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any] | None = None, status: int = 0
) -> dict[str, torch.Tensor]:
    """Emit, compile, run; the written tensors by name."""
    return run_all([(kernel, inputs, scalars or {})], status)[0]


def run_all(
    jobs: Sequence[tuple[Kernel, Mapping[str, torch.Tensor], Mapping[str, Any]]], status: int = 0
) -> list[dict[str, torch.Tensor]]:
    """Like `run` for many kernels with one compilation."""
    emitted = [emit(kernel) for kernel, _, _ in jobs]
    functions = compile_all([e.source for e in emitted])
    results = []
    for (kernel, inputs, scalars), e, function in zip(jobs, emitted, functions, strict=True):
        tensors = dict(inputs)
        for written, read in kernel.aliases:
            tensors[written] = tensors[read]
        for meta in kernel.writes:
            tensors.setdefault(meta.name, storage(meta))
        got = call(function, e, tensors, scalars)
        assert got == status, f"status {got}, wanted {status}"
        results.append({meta.name: tensors[meta.name] for meta in kernel.writes})
    return results


def bits_of(value: float | int) -> int:
    """The raw 64-bit pattern of a row scalar."""
    return struct.unpack("<q", struct.pack("<d", value))[0] if isinstance(value, float) else value
