"""How a kernel's loops become C++ loops: which axis is the vector, what one task is, how reductions are cut.

Invariant: a plan depends on the kernel alone, never on the machine, so that equal kernels have equal text. The evidence
for each number stands beside it; `benchmarks/cpp_kernels.py` shows them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import sympy
from torchlazy.inductor.analyses import Facts, analyse
from torchlazy.inductor.index import AxisSymbol, axis, dot, stride_of, substitute
from torchlazy.inductor.ir import Kernel, Statement
from torchlazy.prims.size_int import hint, integer_of, is_tracked, surely_equal

# Elements of the vector axis in one task of a pointwise kernel; 16 KiB of float32 a pointer stays in the first cache.
GRID_TILE = 4096
# Vectors of one tile, with accumulators in memory: 64 x 64 bytes read from each row keep a core's prefetchers busy.
COLUMN_VECTORS = 64
COLUMN_ELEMENTS = 16 * COLUMN_VECTORS
# A reduction of this many elements is cut in chunks: summed apart, added pairwise (as accurate as ATen's cascade).
CHUNKED_REDUCTION = 1 << 17
CHUNK_ELEMENTS = 1 << 15
MOST_CHUNKS = 512
# Rows of CASCADED_ROW elements and more, along a vector axis of CASCADED_AXIS at least, are added in blocks: a sum of
# 30000 nearly equal float32 products was 2e-6 off without, and is within three times ATen's error with them.
CASCADED_ROW = 4096
CASCADED_AXIS = 1024
CASCADE_BLOCK = 2048
# Where loads run along another axis than stores, that axis is tiled inside the vector axis, and squares of L x L
# elements are turned in registers (transpose of 2048 x 2048: 9 times eager's time without, 0.6 with).
INNER_TILE = 64
# With fewer tasks than this, threads share the chunks of each reduction instead of the tasks.
FEW_TASKS = 32
# Columns are cut finer than COLUMN_ELEMENTS until there are this many tasks, but not below 8 lines of cache a row.
ENOUGH_TASKS = 16
NARROW_COLUMNS = 128
# A scalar operation costs as much as this many lanes of a vector one.
SCALAR_WORK = 8
# Less work than this is for one thread (`worth_threads` in cpp_reduce.h, which says what showed it).
SHARED_WORK = 1 << 18
# A vector axis shorter than this leaves most lanes idle.
SHORT_AXIS = 8
# By the stride of a load along the vector axis; loads of any other stride gather.
_READ_SCORES: dict[object, float] = {0: 0.5, 1: 2.0}

Mode = Literal["grid", "rows", "columns"]


@dataclass(frozen=True, slots=True)
class PlacedStatement:
    """A statement whose indices use the plan's canonical axes."""

    statement: Statement
    index: tuple[sympy.Expr, ...]
    reduce_index: tuple[sympy.Expr, ...]
    facts: Facts


@dataclass(frozen=True, slots=True)
class CppSweep:
    over_reduce_axes: bool
    statements: tuple[PlacedStatement, ...]


@dataclass(frozen=True)
class CppLoopPlan:
    """`grid`: no reduction, `vector` is a parallel axis. `rows`: `vector` is a reduce axis, tasks are single points.
    `columns`: `vector` is a parallel axis, a task is a tile of it, accumulators are arrays. `vector` None: scalars.

    `outer` are the axes that number the tasks; `reduce_axes` in loop order, the vector one last. `chunk_axis` is the
    reduce axis that is cut into `chunks` pieces of `chunk_size`; `split`: threads share chunks, tasks run one by one.
    """

    mode: Mode
    vector: AxisSymbol | None
    outer: tuple[AxisSymbol, ...]
    reduce_axes: tuple[AxisSymbol, ...]
    sweeps: tuple[CppSweep, ...]
    flat: bool = False
    tile: int = 1  # elements of the vector axis in one task (grid, columns)
    inner: AxisSymbol | None = None  # grid: a parallel axis that is looped over, INNER_TILE long, inside the vectors
    chunk_axis: AxisSymbol | None = None
    chunk_size: int = 0
    chunks: int = 1
    split: bool = False

    @property
    def is_chunked(self) -> bool:
        return is_tracked(self.chunks) or self.chunks > 1

    @property
    def tiles(self) -> int:
        return -(-self.vector.size // self.tile) if self.vector is not None and self.mode != "rows" else 1

    @property
    def tasks(self) -> int:
        return prod(axis_.size for axis_ in self.outer) * self.inner_tiles * self.tiles

    @property
    def inner_tiles(self) -> int:
        return -(-self.inner.size // INNER_TILE) if self.inner is not None else 1


def plan_kernel(kernel: Kernel) -> CppLoopPlan:
    """Choose the loops of `kernel`."""
    axes = _canonical("x", kernel.axes)
    if len(axes) == 1 and not kernel.reduce_axes and axes[0] == 0 and _is_flat_point(kernel):
        axes = (axis("x0", 1),)  # the same text as any other size
    reduce_axes = _canonical("r", kernel.reduce_axes)
    mapping = {old.symbol: new for old, new in zip((*kernel.axes, *kernel.reduce_axes), (*axes, *reduce_axes))}
    sweeps = tuple(
        CppSweep(sweep.over_reduce_axes, tuple(_place(statement, mapping) for statement in sweep.statements))
        for sweep in kernel.sweeps
    )
    parallel = tuple(a for a in axes if isinstance(a, AxisSymbol))
    reduced = tuple(a for a in reduce_axes if isinstance(a, AxisSymbol))
    if not any(sweep.over_reduce_axes for sweep in sweeps):
        return _plan_grid(parallel, sweeps)
    return _plan_reduction(parallel, reduced, sweeps)


def _canonical(prefix: str, axes: tuple) -> tuple[sympy.Expr, ...]:
    """x0, x1 ...: an axis of one point is the number 0."""
    return tuple(
        sympy.S.Zero if surely_equal(a.size, 1) else axis(f"{prefix}{n}", integer_of(a.size))
        for n, a in enumerate(axes)
    )


def _is_flat_point(kernel: Kernel) -> bool:
    """Whether a kernel of one point still stores along its axis, as its longer relatives do."""
    symbol = kernel.axes[0].symbol
    return all(
        stride_of(dot(statement.index, output.strides, output.offset), symbol) == 1
        for sweep in kernel.sweeps
        for statement in sweep.statements
        for output in statement.node.outputs
        if output.name in statement.stored
    )


def _place(statement: Statement, mapping: dict[sympy.Symbol, sympy.Expr]) -> PlacedStatement:
    index = tuple(substitute(sympy.sympify(e), mapping) for e in statement.index)
    reduce_index = tuple(substitute(sympy.sympify(e), mapping) for e in statement.reduce_index)
    return PlacedStatement(statement, index, reduce_index, analyse(statement.node, index, reduce_index))


def _score(candidate: AxisSymbol, sweeps: tuple[CppSweep, ...], inside_reduction: bool) -> float:
    """How well loads and stores run along `candidate`: neighbours count for, scattered elements against."""
    score = 0.0 if hint(candidate.size) >= SHORT_AXIS else -4.0
    for sweep in sweeps:
        if inside_reduction and not sweep.over_reduce_axes:
            continue
        for placed in sweep.statements:
            for read in placed.facts.reads:
                stride = stride_of(read.index, candidate)
                score += _READ_SCORES.get(stride, -2.0)
            for output in placed.statement.node.outputs:
                if output.name in placed.statement.stored and placed.statement.node.reduction is None:
                    store = dot(placed.index, output.strides, output.offset)
                    score += 3.0 if stride_of(store, candidate) == 1 else -3.0
    return score


def _plan_grid(parallel: tuple[AxisSymbol, ...], sweeps: tuple[CppSweep, ...]) -> CppLoopPlan:
    if not parallel:
        return CppLoopPlan("rows", None, (), (), sweeps)
    best = max(range(len(parallel)), key=lambda n: (_score(parallel[n], sweeps, False), n))
    vector = parallel[best]
    outer = parallel[:best] + parallel[best + 1 :]
    if outer and hint(vector.size) < SHORT_AXIS // 2:
        return CppLoopPlan("rows", None, parallel, (), sweeps)
    tile = vector.size if hint(vector.size) <= 2 * GRID_TILE else GRID_TILE
    inner = _crossing_axis(vector, outer, sweeps)
    if inner is not None:
        tile = INNER_TILE if is_tracked(tile) else min(tile, INNER_TILE)
        outer = tuple(a for a in outer if a != inner)
        return CppLoopPlan("grid", vector, outer, (), sweeps, tile=tile, inner=inner)
    return CppLoopPlan("grid", vector, outer, (), sweeps, flat=not outer, tile=tile)


def _crossing_axis(
    vector: AxisSymbol, outer: tuple[AxisSymbol, ...], sweeps: tuple[CppSweep, ...]
) -> AxisSymbol | None:
    """The axis along which a load is contiguous that jumps along `vector`, if there is one."""
    for sweep in sweeps:
        for placed in sweep.statements:
            for read in placed.facts.reads:
                if stride_of(read.index, vector) in (0, 1):
                    continue
                for candidate in outer:
                    if hint(candidate.size) >= SHORT_AXIS and stride_of(read.index, candidate) == 1:
                        return candidate
    return None


def _plan_reduction(
    parallel: tuple[AxisSymbol, ...], reduced: tuple[AxisSymbol, ...], sweeps: tuple[CppSweep, ...]
) -> CppLoopPlan:
    ordered = any(p.statement.node.reduction in ("argmax", "argmin") for s in sweeps for p in s.statements)
    rows = reduced[-1:] if ordered else reduced
    candidates = [(_score(a, sweeps, True), 1, n, a) for n, a in enumerate(rows)]
    candidates += [(_score(a, sweeps, True), 0, n, a) for n, a in enumerate(parallel)]
    if not candidates:
        return CppLoopPlan("rows", None, (), (), sweeps)
    _, is_reduced, _, vector = max(candidates, key=lambda c: c[:3])
    reduce_size = prod(hint(a.size) for a in reduced)
    if is_reduced:
        outer, tile, tasks = parallel, 1, prod(hint(a.size) for a in parallel)
        loops = (*(a for a in reduced if a != vector), vector)
        each = reduce_size
    else:
        outer = tuple(a for a in parallel if a != vector)
        columns = hint(vector.size)
        tile = min(columns, COLUMN_ELEMENTS)
        if is_tracked(vector.size):  # accumulators are arrays of one tile: its size is a number
            tile = min(-(-columns // 64) * 64, COLUMN_ELEMENTS)
        points = prod(hint(a.size) for a in outer)
        if reduce_size * tile < CHUNKED_REDUCTION:  # longer ones are shared by chunks
            while tile > NARROW_COLUMNS and points * -(-columns // tile) < ENOUGH_TASKS:
                tile = -(-tile // 2 // 64) * 64
        tasks = points * -(-columns // tile)
        loops, each = reduced, reduce_size * tile
    chosen = vector if hint(vector.size) >= SHORT_AXIS else None
    if chosen is None and not is_reduced:  # all axes short: plain loops over points
        outer, loops, tile, each = parallel, reduced, 1, reduce_size
        is_reduced = 1
    plan = CppLoopPlan("rows" if is_reduced else "columns", chosen, outer, loops, sweeps, tile=tile)
    long = each >= CHUNKED_REDUCTION or (not is_reduced and reduce_size >= 4096)
    if not loops or not long:
        return plan
    chunk_axis = max(loops, key=lambda a: hint(a.size))
    length = hint(chunk_axis.size)
    elements = each // length  # of one step of the chunk axis
    size = max(1, -(-CHUNK_ELEMENTS // elements), -(-length // MOST_CHUNKS))
    size = -(-size // 1024) * 1024 if chunk_axis == chosen else size
    if -(-length // size) < 2:
        return plan
    chunks = -(-chunk_axis.size // size)
    return CppLoopPlan(
        plan.mode, chosen, outer, loops, sweeps, tile=tile, chunk_axis=chunk_axis, chunk_size=size, chunks=chunks,
        split=tasks < FEW_TASKS and each >= CHUNKED_REDUCTION,
    )  # fmt: skip
