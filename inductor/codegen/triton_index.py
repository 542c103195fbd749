"""Axes of a Triton kernel: which order they run in, and index expressions rewritten over the flat block index.

Invariant: the flat index of a group of axes (`xindex` for the parallel ones, `rindex` for the reduced ones) is
row-major over `FlatAxes.axes`; neighbouring axes that an expression uses like one axis are merged, so a contiguous
access is `xindex` itself and pays for no division.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import sympy
from torchlazy.inductor.index import axis, bounds, stride_of
from torchlazy.inductor.ir import Axis, Expr, Kernel
from torchlazy.inductor.ops_handler import MEMORY_OPS, POINTWISE_OPS
from torchlazy.inductor.size_symbol import SizeSymbol
from torchlazy.prims.size_int import hint, integer_of, is_tracked, surely_at_least, surely_equal

INT32_LIMIT = 2**31 - 2**21  # room for the lanes of the last block, which run past the end under a mask


@dataclass(frozen=True, slots=True)
class Access:
    """One load or store of a buffer, in which sweep it stands, and how many values deep in `masked` bodies."""

    name: str
    index: Expr
    is_store: bool
    sweep: int
    over_reduce_axes: bool


@dataclass
class AccessRecorder:
    """An ops handler that notes memory accesses, names of ops and index expressions; values are None."""

    accesses: list[Access] = field(default_factory=list)
    op_counts: dict[str, int] = field(default_factory=dict)
    sweep: int = 0
    over_reduce_axes: bool = False
    fresh: int = 0

    def __getattr__(self, op: str) -> Any:
        if op not in POINTWISE_OPS and op not in MEMORY_OPS:
            raise AttributeError(op)

        def note(*args: object) -> None:
            self.op_counts[op] = self.op_counts.get(op, 0) + 1

        return note

    def load(self, name: str, index: Expr) -> None:
        self.accesses.append(Access(name, sympy.sympify(index), False, self.sweep, self.over_reduce_axes))

    def store(self, name: str, index: Expr, value: object) -> None:
        self.accesses.append(Access(name, sympy.sympify(index), True, self.sweep, self.over_reduce_axes))

    def indirect(self, value: object, size: Expr, what: str) -> sympy.Symbol:
        self.fresh += 1
        return sympy.Symbol(f"indirect_unknown{self.fresh}", integer=True, nonnegative=True)

    def masked(self, condition: object, body: Any, other: object) -> None:
        body()


def record_accesses(kernel: Kernel) -> AccessRecorder:
    """Every access of the kernel in order, stores of `stored` outputs included."""
    recorder = AccessRecorder()
    for number, sweep in enumerate(kernel.sweeps):
        recorder.sweep, recorder.over_reduce_axes = number, sweep.over_reduce_axes
        for statement in sweep.statements:
            statement.node.body(recorder, statement.index, statement.reduce_index)
            for output in statement.node.outputs:
                if output.name in statement.stored:
                    recorder.store(output.name, output.element(statement.index), None)
    return recorder


def sized(expr: Expr, axes: Sequence[Axis]) -> Expr:
    """`expr` over symbols that know their range, so that `index.bounds` can tell how far it reaches."""
    known = {a.symbol: axis(a.symbol.name, a.size) for a in axes if isinstance(a.symbol, sympy.Symbol)}
    return expr.xreplace(known)


def reach(expr: Expr, axes: Sequence[Axis]) -> int | None:
    """The greatest absolute value that `expr` or a sum inside it takes; None where it is unknown."""
    low, high = bounds(sized(expr, axes))
    if low is None or high is None:
        return None
    inner = [reach(arg, axes) for arg in expr.args if not expr.is_Mul]
    if any(value is None for value in inner):
        return None
    return _largest([low, high, *(value for value in inner if value is not None)])


def _largest(values: Sequence[int]) -> int:
    """The greatest absolute value; of tracked sizes the one that is greatest now, if it is sure to be, else a sum."""
    sizes = [value if surely_at_least(value, 0) else -value if surely_at_least(0, value) else abs(value)
             for value in values]  # fmt: skip
    best = max(sizes, key=hint)
    if any(map(is_tracked, sizes)) and not all(surely_at_least(best, size) for size in sizes):
        return sum(sizes)
    return best


def needs_int64(kernel: Kernel, accesses: Sequence[Access]) -> bool:
    """Whether an element offset or a flat index of this kernel does not fit 32 bits."""
    axes = (*kernel.axes, *kernel.reduce_axes)
    counts = [1, 1]
    for side, group in enumerate((kernel.axes, kernel.reduce_axes)):
        for a in group:
            counts[side] *= integer_of(a.size)
    if any(count >= INT32_LIMIT for count in counts):
        return True
    extents: dict[str, int] = {}
    for buffer in (*kernel.reads, *kernel.writes):
        pairs = zip(buffer.shape, buffer.strides, strict=True)
        steps = [(integer_of(size) - 1) * integer_of(stride) for size, stride in pairs]
        extents[buffer.name] = integer_of(buffer.offset) + sum(step for step in steps if not surely_at_least(0, step))
    if any(extent >= INT32_LIMIT for extent in extents.values()):
        return True
    return any((reach(access.index, axes) or 0) >= INT32_LIMIT for access in accesses)


def unit_symbols(axes: Sequence[Axis]) -> frozenset[Expr]:
    """Symbols of the axes that `order_axes` drops: they are always 0."""
    return frozenset(a.symbol for a in axes if surely_equal(a.size, 1))  # type: ignore[arg-type]


def order_axes(axes: Sequence[Axis], accesses: Sequence[Access]) -> tuple[Axis, ...]:
    """The axes sorted by falling stride in the access that uses most of them, so that the last one is contiguous.

    Where no access has a stride for each axis the given order stays. Axes of size 1 are dropped.
    """
    long = tuple(a for a in axes if not surely_equal(a.size, 1))  # type: ignore[arg-type]
    best: list[int] | None = None
    for access in accesses:
        strides = [stride_of(access.index, a.symbol) for a in long]
        if all(isinstance(s, int) and hint(s) > 0 for s in strides):
            best = [hint(s) for s in strides if s is not None]
            break
    if best is None:
        return long
    order = sorted(range(len(long)), key=lambda i: -best[i])
    return tuple(long[i] for i in order)


@dataclass(frozen=True)
class FlatAxes:
    """Axes in running order behind one flat index; `prefix` is x or r. Symbols in `unit` belong to axes of size 1.

    With `block` points a program, from a multiple of `block` on, an axis is one number in a program where the axes
    inside of it span whole blocks: it is computed from the program's first point, and loads along it are shared.
    """

    prefix: str
    axes: tuple[Axis, ...]
    unit: frozenset[Expr] = frozenset()
    block: int = 0  # 0: not known, or steps of a loop

    @property
    def flat(self) -> str:
        return f"{self.prefix}index"

    @property
    def start(self) -> str:
        """The program's first point."""
        return f"{self.prefix}start"

    def _is_uniform(self, inner: int) -> bool:
        """Whether an axis is one number in a program, if the axes inside of it have `inner` points."""
        return self.block > 1 and not is_tracked(inner) and inner % self.block == 0

    @property
    def has_uniform_axis(self) -> bool:
        """Whether an axis is one number in a program."""
        inner, found = 1, False
        for a in reversed(self.axes[1:]):
            inner *= integer_of(a.size)
            found = found or self._is_uniform(inner)
        return found

    def varies(self, symbols: Set[Any]) -> bool:
        """Whether rewritten index text over `symbols` differs from point to point of a program."""
        inner = 1
        names = {getattr(symbol, "name", "") for symbol in symbols}
        if self.flat in names:
            return True
        for last in reversed(range(len(self.axes))):
            ending = {f"{self.prefix}{last}", *(f"{self.prefix}{first}to{last}" for first in range(last))}
            if ending & names and not self._is_uniform(inner):
                return True
            inner *= integer_of(self.axes[last].size)
        return False

    @property
    def numel(self) -> int:
        total = 1
        for a in self.axes:
            total *= integer_of(a.size)
        return total

    def rewrite(self, expr: Expr) -> tuple[Expr, dict[sympy.Symbol, str]]:
        """`expr` over merged symbols, and the definition of each as text over the flat index."""
        definitions: dict[sympy.Symbol, str] = {}
        if self.unit & expr.free_symbols:
            expr = expr.xreplace(dict.fromkeys(self.unit, sympy.S.Zero))
        if not any(a.symbol in expr.free_symbols for a in self.axes):
            return expr, definitions
        linear, rest = self._split(expr)
        total = rest.xreplace({a.symbol: self._symbol(i, i, definitions) for i, a in enumerate(self.axes)
                               if a.symbol in rest.free_symbols})  # fmt: skip
        last = len(self.axes) - 1
        while last >= 0:
            first = last
            step = linear[last]
            span = step * integer_of(self.axes[last].size)
            while first > 0 and not surely_equal(step, 0) and surely_equal(linear[first - 1], span):
                first -= 1
                span = span * integer_of(self.axes[first].size)
            if not surely_equal(step, 0):
                total = total + step * self._symbol(first, last, definitions)
            last = first - 1
        return total, definitions

    def _split(self, expr: Expr) -> tuple[list[int], Expr]:
        """The integer coefficient of each axis in the top sum, and what is left."""
        linear = [0] * len(self.axes)
        position = {a.symbol: i for i, a in enumerate(self.axes)}
        rest: list[Expr] = []
        for term in sympy.Add.make_args(expr):
            coefficient, base = term.as_coeff_Mul()
            number: int | None = int(coefficient) if coefficient.is_Integer else None
            if number is not None and base.is_Mul:
                for size in [factor for factor in base.args if isinstance(factor, SizeSymbol)]:
                    number = number * size.number
                base = sympy.Mul(*(factor for factor in base.args if not isinstance(factor, SizeSymbol)))
            if base in position and number is not None:
                linear[position[base]] += number
            else:
                rest.append(term)
        return linear, sympy.Add(*rest)

    def _symbol(self, first: int, last: int, definitions: dict[sympy.Symbol, str]) -> sympy.Symbol:
        """The symbol that counts axes first..last as one, noting how it is computed."""
        inner = span = 1
        for a in self.axes[last + 1 :]:
            inner *= integer_of(a.size)
        for a in self.axes[first : last + 1]:
            span *= integer_of(a.size)
        if first == 0 and surely_equal(inner, 1):
            return sympy.Symbol(self.flat, integer=True, nonnegative=True)
        name = f"{self.prefix}{first}" if first == last else f"{self.prefix}{first}to{last}"
        flat = self.start if self._is_uniform(inner) else self.flat
        text = flat if surely_equal(inner, 1) else f"({flat} // {inner})"
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        definitions[symbol] = text if first == 0 else f"{text} % {span}"
        return symbol


def contiguous_side(
    x: Sequence[Axis], r: Sequence[Axis], accesses: Sequence[Access], element_size: dict[str, int]
) -> str:
    """ "r" where most bytes that the reduction sweeps move lie along the reduced axes, else "x".

    What an access moves is the number of elements that it touches: statistics of rows or weights of columns are served
    by the cache, and have next to no say beside an operand that moves along all axes.
    """
    weight = {"x": 0, "r": 0}
    for access in accesses:
        steps = {}
        touched = element_size.get(access.name, 4)
        for side, axes in (("x", x), ("r", r)):
            strides = [stride_of(access.index, a.symbol) for a in axes]
            steps[side] = min((hint(s) for s in strides if isinstance(s, int) and hint(s) > 0), default=None)
            for a in axes:
                touched *= max(1, hint(integer_of(a.size))) if a.symbol in access.index.free_symbols else 1
        if steps["r"] is not None and (steps["x"] is None or steps["r"] < steps["x"]):
            weight["r"] += touched
        elif steps["x"] is not None and steps["r"] is not None:
            weight["x"] += touched
    return "r" if weight["r"] >= weight["x"] else "x"


def element_sizes(kernel: Kernel) -> dict[str, int]:
    """Bytes of one element of each memory argument."""
    return {buffer.name: buffer.dtype.itemsize for buffer in (*kernel.reads, *kernel.writes)}
