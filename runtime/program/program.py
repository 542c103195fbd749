"""A compiled program as data: what to launch, on which memory, in which order.

Invariant: a `Program` needs no compiler to load or run. Values have names; inputs and scalars are bound by position at
each run, every other name is made by exactly one step before it is read, and freed after its last reader.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torchlazy.prims.meta import TensorMeta

Language = Literal["cpp", "numba", "triton"]

VALUE_CHECK = "value: "
"""Entries of `index_checks` that begin so are checks of numbers: what follows is the text of a RuntimeError."""


@dataclass(frozen=True)
class KernelSource:
    """Generated source of one kernel, with nothing in it of the program that it was made for.

    The function `entry` takes, in order: one address (int) per entry of `pointers` (dtype of the memory), one number
    per entry of `scalars` (float as double, int and bool as int64), then `sizes` int64 loop bounds. With `foreach` it
    takes instead the address of an int64 table and its number of rows, then the shared scalars; a row holds the
    pointers, the sizes, then `row_scalars` values as raw 64-bit patterns. CPU functions return 0, or the 1-based
    position in `index_checks` of the indirect access that was out of range. `options` are launch facts of the language
    (Triton: block sizes, num_warps, num_stages). A Triton kernel whose sizes change from run to run says in `dynamic`
    of which type they are, and in `aligned_sizes` which of them are multiples of 16 whatever they are.
    """

    language: Language
    entry: str
    text: str
    pointers: tuple[torch.dtype, ...]
    scalars: tuple[type, ...] = ()
    sizes: int = 0
    foreach: bool = False
    row_scalars: tuple[type, ...] = ()
    index_checks: tuple[str, ...] = ()
    options: tuple[tuple[str, int], ...] = ()
    dynamic: str = ""
    aligned_sizes: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Content hash: equal kernels share one compiled function, in memory and on disk."""
        facts = repr((self.language, self.entry, self.pointers, self.scalars, self.sizes, self.foreach,
                      self.row_scalars, self.options))  # fmt: skip
        if self.dynamic:
            facts += repr((self.dynamic, self.aligned_sizes))
        return hashlib.sha256((facts + "\n" + self.text).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Allocate:
    """Fresh memory for `name`; `reuse` names a dead value of the same program whose bytes it takes over."""

    name: str
    meta: TensorMeta
    reuse: str | None = None


@dataclass(frozen=True, slots=True)
class Reinterpret:
    """`name` is a window on `source`: as_strided with the storage offset `offset` in elements of `meta.dtype`."""

    name: str
    source: str
    meta: TensorMeta
    offset: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Run kernel number `kernel` on the memory of `buffers` (element 0 of the storage window that the name denotes)."""

    kernel: int
    buffers: tuple[str, ...]
    scalars: tuple[str, ...]
    sizes: tuple[int, ...]


ForeachRow: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]
"""Buffers, sizes and row scalars of one row of a foreach kernel."""


@dataclass(frozen=True, slots=True)
class ForeachLaunch:
    """Run one foreach kernel over several rows."""

    kernel: int
    rows: tuple[ForeachRow, ...]
    scalars: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A value (or with scalar=True a runtime scalar) in the arguments of an extern call."""

    name: str
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class ExternCall:
    """Call an ATen overload by name ("aten.mm.default"); a result of other strides than `metas` is copied into them."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[str | None, ...]
    metas: tuple[TensorMeta | None, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """`names` are read no more; their memory may be reused at once."""

    names: tuple[str, ...]


Step: TypeAlias = Allocate | Reinterpret | Launch | ForeachLaunch | ExternCall | Free


@dataclass(frozen=True)
class Program:
    """Steps from inputs to outputs. `donations` maps an output's position to the position of the input that it
    overwrites: that output *is* the input's memory after the run.

    A program for all sizes has `symbols`, its last scalars; `sizes` are the names in its steps and what they stand for,
    and it is right for symbols that fulfil `guards` (runtime/program/symbolic.py)."""

    inputs: tuple[tuple[str, TensorMeta], ...]
    scalars: tuple[tuple[str, type], ...]
    kernels: tuple[KernelSource, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    output_metas: tuple[TensorMeta, ...]
    donations: tuple[tuple[int, int], ...] = ()
    notes: tuple[tuple[str, Any], ...] = field(default=())
    symbols: tuple[str, ...] = ()
    sizes: tuple[tuple[str, Any], ...] = ()
    guards: tuple[tuple[str, Any], ...] = ()
