"""The loop IR: what lowering builds, fusion groups and the code generators read.

`LoopNode` is one loop nest with a define-by-run body; `ExternNode` a call of one ATen operator on buffers;
`ViewNode` a buffer that is a window on another. A `Kernel` is what fusion makes of loop nodes: loop axes, and sweeps of
statements over them. All are frozen: passes return new ones.

Index expressions are SymPy over non-negative integer symbols. Every element offset counts from the start of the
buffer's memory (`Buffer.offset` is already added in what bodies and `store_index` produce).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torchlazy.inductor.ops_handler import Body, ReductionKind
from torchlazy.prims.meta import Dim, TensorMeta

Expr: TypeAlias = sympy.Expr


@dataclass(frozen=True, slots=True)
class Buffer:
    """Named memory with a layout. `offset` in elements; > 0 only for inputs that are windows on larger storages."""

    name: str
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    device: str
    offset: Dim = 0

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(self.shape, self.dtype, self.strides, self.device)

    def element(self, index: tuple[Expr, ...]) -> Expr:
        """The element offset of a logical index."""
        total: Expr = sympy.Integer(0) + self.offset
        for i, stride in zip(index, self.strides, strict=True):
            total = total + i * stride
        return total


@dataclass(frozen=True)
class LoopNode:
    """`outputs[k][idx] = body(ops, idx, ())`, or the reduction of `body(ops, idx, ridx)` over all ridx.

    A pointwise node has `reduction is None`, `reduce_ranges == ()` and one output. Reductions: sum, prod, max, min,
    any, all have one output; argmax and argmin one int64 output, the flat position within `reduce_ranges` of the
    first extremum (NaN counts as the extremum); welford three: mean, m2 (sum of squared deviations), count (float).
    `accumulate_dtype` is the dtype of the accumulator: float32 for halves and float32, int64 for ints, float64.
    Each output's shape is `ranges` (in that order), so the store index is `output.element(idx)`.
    """

    outputs: tuple[Buffer, ...]
    ranges: tuple[Dim, ...]
    body: Body
    reduce_ranges: tuple[Dim, ...] = ()
    reduction: ReductionKind | None = None
    accumulate_dtype: torch.dtype | None = None
    origins: tuple[str, ...] = ()  # "prims.add  # model.py:41", for comments in generated source
    is_late: bool = False  # computes a value again: not before its place in the graph, or it would be held instead
    like: tuple[LoopNode, Mapping[str, str]] | None = field(default=None, compare=False, repr=False)
    """The node that this is under other names, and these by its own: what is known of that is not found out again."""


@dataclass(frozen=True)
class BufferRef:
    """A reference inside an extern call's arguments to a buffer or (scalar=True) to a runtime scalar."""

    name: str
    scalar: bool = False


@dataclass(frozen=True)
class ExternNode:
    """One ATen call. `args`/`kwargs` nest tuples, numbers, dtypes, `BufferRef`s; an output is None where ATen's is."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Buffer | None, ...]
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class ViewNode:
    """`output` reads the memory of buffer `source` with its own shape, strides and offset: no work, no bytes."""

    output: Buffer
    source: str
    origins: tuple[str, ...] = ()


Node: TypeAlias = LoopNode | ExternNode | ViewNode


@dataclass(frozen=True)
class LoopGraph:
    """A whole program before fusion, in an order that respects dependencies.

    `outputs` name buffers (or inputs) in the program's output order; `donations` maps an output's buffer name to the
    input whose memory it shall be written into, because nobody can read that input's old value after the run.
    """

    inputs: tuple[Buffer, ...]
    scalars: tuple[tuple[str, type], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    donations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Axis:
    """One loop of a kernel: `symbol` runs from 0 to `size` - 1."""

    symbol: sympy.Symbol
    size: Dim


@dataclass(frozen=True)
class Statement:
    """One loop node placed on a kernel's axes.

    `index`/`reduce_index` give the node's `ranges`/`reduce_ranges` indices as expressions over the kernel's axes: the
    code generator calls `node.body(handler, index, reduce_index)`. `stored` names the outputs that must reach memory;
    the others are read only later in this kernel, at the same point, and stay in registers.
    """

    node: LoopNode
    index: tuple[Expr, ...]
    reduce_index: tuple[Expr, ...]
    stored: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """Statements run together: once for each point of the parallel axes, or (over_reduce_axes) for each point of the
    reduce axes inside it. Reductions stand only in sweeps over the reduce axes and are readable in later sweeps."""

    over_reduce_axes: bool
    statements: tuple[Statement, ...]


@dataclass(frozen=True)
class Kernel:
    """One generated function: for every point of `axes` (parallel, any order) run the sweeps in order.

    A load of a buffer that an earlier statement of this kernel produced, at the same point, is that statement's
    register: pointwise values live to the end of their sweep, reduction results and values of point sweeps to the end
    of the point. A pointwise value that a later sweep needs stands there again (recomputed) or is stored and loaded.
    `reads` and `writes` are the memory arguments, each once; a buffer that is both read (by `reads`) and written stands
    in both. `aliases` lists (written, read) pairs that share memory by donation: same index read before written.
    """

    axes: tuple[Axis, ...]
    reduce_axes: tuple[Axis, ...]
    sweeps: tuple[Sweep, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    scalars: tuple[tuple[str, type], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    reasons: tuple[str, ...] = ()  # the fusion decisions that made it
    is_late: bool = False  # of a node that is
