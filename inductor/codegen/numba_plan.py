"""How a kernel's axes become the loops of a Numba kernel.

Invariant: tasks are independent and numbered; a task's loops run in the order of memory. A plan depends on the kernel
alone, so equal kernels have equal text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import sympy
from torchlazy.inductor.index import AxisSymbol, axis, dot, stride_of, substitute
from torchlazy.inductor.ir import Axis, Kernel, Statement
from torchlazy.prims.size_int import hint, integer_of, surely_equal

# With fewer tasks than this, the axis that memory runs along numbers tasks too, instead of being a loop in each.
_FEW_TASKS = 16


@dataclass(frozen=True, slots=True)
class NumbaStatement:
    """A statement whose indices use the plan's canonical axes."""

    statement: Statement
    index: tuple[sympy.Expr, ...]
    reduce_index: tuple[sympy.Expr, ...]


@dataclass(frozen=True, slots=True)
class NumbaSweep:
    over_reduce_axes: bool
    statements: tuple[NumbaStatement, ...]


@dataclass(frozen=True)
class NumbaLoopPlan:
    """`numbered` axes number the tasks; `inner` is a loop within a pointwise task; `reduced` loops of reduce sweeps.

    `flat`: one pointwise axis, whose size is an argument of the kernel.
    """

    numbered: tuple[AxisSymbol, ...]
    inner: AxisSymbol | None
    reduced: tuple[AxisSymbol, ...]
    sweeps: tuple[NumbaSweep, ...]
    flat: bool

    @property
    def tasks(self) -> int:
        return prod(symbol.size for symbol in self.numbered)

    def decode(self) -> list[str]:
        """Statements that give the numbered axes their values in task number `task`."""
        lines, step = [], 1
        for position, symbol in reversed(list(enumerate(self.numbered))):
            text = "task" if surely_equal(step, 1) else f"task // {step}"
            if position > 0:
                text += f" % {symbol.size}"
            lines.append(f"{symbol.name} = {text}")
            step *= symbol.size
        return lines


def plan_kernel(kernel: Kernel) -> NumbaLoopPlan:
    """Choose the loops of `kernel`."""
    axes = _canonical("x", kernel.axes)
    pointwise = not any(sweep.over_reduce_axes for sweep in kernel.sweeps)
    if len(axes) == 1 and axes[0] == 0 and pointwise and _stores_along(kernel, kernel.axes[0].symbol):
        axes = (axis("x0", 1),)  # the same text as any other size
    reduced = _canonical("r", kernel.reduce_axes)
    pairs = zip((*kernel.axes, *kernel.reduce_axes), (*axes, *reduced), strict=True)
    mapping = {old.symbol: new for old, new in pairs}
    sweeps = tuple(
        NumbaSweep(sweep.over_reduce_axes, tuple(_place(statement, mapping) for statement in sweep.statements))
        for sweep in kernel.sweeps
    )
    parallel = tuple(symbol for symbol in axes if isinstance(symbol, AxisSymbol))
    loops = tuple(symbol for symbol in reduced if isinstance(symbol, AxisSymbol))
    if pointwise and len(parallel) > 1:
        inner = max(reversed(parallel), key=lambda symbol: _stores(sweeps, symbol))
        outer = tuple(symbol for symbol in parallel if symbol is not inner)
        if prod(hint(symbol.size) for symbol in outer) >= _FEW_TASKS:
            return NumbaLoopPlan(outer, inner, loops, sweeps, flat=False)
        return NumbaLoopPlan((*outer, inner), None, loops, sweeps, flat=False)
    return NumbaLoopPlan(parallel, None, loops, sweeps, flat=pointwise and len(parallel) == 1)


def _canonical(prefix: str, axes: Sequence[Axis]) -> tuple[sympy.Expr, ...]:
    """x0, x1 ...: an axis of one point is the number 0."""
    return tuple(
        sympy.S.Zero if surely_equal(a.size, 1) else axis(f"{prefix}{n}", integer_of(a.size))
        for n, a in enumerate(axes)
    )


def _place(statement: Statement, mapping: dict[sympy.Symbol, sympy.Expr]) -> NumbaStatement:
    return NumbaStatement(
        statement,
        tuple(substitute(sympy.sympify(expr), mapping) for expr in statement.index),
        tuple(substitute(sympy.sympify(expr), mapping) for expr in statement.reduce_index),
    )


def _stores(sweeps: Sequence[NumbaSweep], symbol: sympy.Symbol) -> int:
    """How many stores run along `symbol`, neighbour after neighbour."""
    return sum(
        stride_of(dot(placed.index, output.strides, output.offset), symbol) == 1
        for sweep in sweeps
        for placed in sweep.statements
        for output in placed.statement.node.outputs
        if output.name in placed.statement.stored
    )


def _stores_along(kernel: Kernel, symbol: sympy.Symbol) -> bool:
    """Whether a kernel of one point still stores along its axis, as its longer relatives do."""
    return all(
        stride_of(dot(statement.index, output.strides, output.offset), symbol) == 1
        for sweep in kernel.sweeps
        for statement in sweep.statements
        for output in statement.node.outputs
        if output.name in statement.stored
    )
