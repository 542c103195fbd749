"""What a loop body reads and how much it computes, found by running it under a handler.

Invariant: an analysis runs a body once on symbols of its own and has no other effect; the symbols it used come back
with the result, so that index expressions can be compared or substituted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import sympy
import torch
from torchlazy.inductor.index import AxisSymbol, Index, axis, axis_index
from torchlazy.inductor.ir import LoopNode
from torchlazy.inductor.ops_handler import POINTWISE_OPS
from torchlazy.prims.meta import Dim

T = TypeVar("T")

# fmt: off
# Ops that cost an order of magnitude more than an addition: polynomial approximations, or several dependent divisions.
HEAVY_OPS = frozenset((
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
    "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "pow", "atan2", "hypot", "nextafter",
    "remainder", "fmod", "floor_div", "random_bits",
))
# fmt: on
# Divisions and roots: a few times an addition, cheap to vectorise.
MEDIUM_OPS = frozenset(("div", "reciprocal", "sqrt", "rsqrt", "trunc_div"))


def work_of(op: str) -> int:
    """The cost of one scalar op in additions; a rough scale, the same for every target."""
    return 60 if op == "random_bits" else 15 if op in HEAVY_OPS else 4 if op in MEDIUM_OPS else 1


class UniformHandler(Generic[T]):
    """An `OpsHandler` whose pointwise ops all go through `pointwise(name, operands)`."""

    def pointwise(self, op: str, operands: tuple[T, ...]) -> T:
        """One op of `POINTWISE_OPS`."""
        raise NotImplementedError


def _method(op: str) -> Callable[..., Any]:
    def method(self: UniformHandler[Any], *operands: Any) -> Any:
        return self.pointwise(op, operands)

    method.__name__ = op
    return method


for _op in POINTWISE_OPS:
    setattr(UniformHandler, _op, _method(_op))


@dataclass(frozen=True, slots=True)
class BufferRead:
    """One load. `indirect`: the index depends on loaded data; `guarded`: it happens under `masked` only."""

    name: str
    index: sympy.Expr
    indirect: bool = False
    guarded: bool = False


@dataclass(frozen=True)
class Facts:
    """What one run of a node's body showed.

    `index` and `reduce_index` are the expressions the body was called with (0 for an axis of size 1). `reads` are
    distinct, in the order of their first load; `writes` pair each output with its store index. `ops` counts op names.
    """

    index: Index
    reduce_index: Index
    reads: tuple[BufferRead, ...]
    writes: tuple[tuple[str, sympy.Expr], ...]
    scalars: tuple[str, ...]
    ops: dict[str, int]

    @property
    def work(self) -> int:
        """Cost of one point of the body, in additions."""
        return sum(count * work_of(op) for op, count in self.ops.items())

    @property
    def heavy(self) -> int:
        """How many ops of one point are transcendental or alike."""
        return sum(count for op, count in self.ops.items() if op in HEAVY_OPS)

    @property
    def read_names(self) -> tuple[str, ...]:
        """The buffers read, each once."""
        return tuple(dict.fromkeys(read.name for read in self.reads))


class ReadsWrites(UniformHandler[None]):
    """Collects loads, scalars and op counts; a value is nothing."""

    def __init__(self) -> None:
        self.reads: dict[BufferRead, None] = {}
        self.scalars: dict[str, None] = {}
        self.ops: dict[str, int] = {}
        self._indirect: set[sympy.Symbol] = set()
        self._depth = 0

    def _count(self, op: str) -> None:
        self.ops[op] = self.ops.get(op, 0) + 1

    def pointwise(self, op: str, operands: tuple[Any, ...]) -> None:
        self._count(op)

    def load(self, name: str, index: sympy.Expr) -> None:
        indirect = bool(self._indirect) and not self._indirect.isdisjoint(index.free_symbols)
        self.reads[BufferRead(name, index, indirect, self._depth > 0)] = None

    def store(self, name: str, index: sympy.Expr, value: Any) -> None:
        raise AssertionError("bodies return their value; the code generator stores it")

    def scalar(self, name: str, dtype: torch.dtype) -> None:
        self.scalars[name] = None

    def constant(self, value: float, dtype: torch.dtype) -> None:
        return None

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> None:
        self._count("index_expr")

    def indirect(self, value: Any, size: sympy.Expr, what: str) -> sympy.Expr:
        self._count("indirect")
        symbol = axis(f"indirect{len(self._indirect)}", size)
        self._indirect.add(symbol)
        return symbol

    def masked(self, condition: Any, body: Callable[[], Any], other: float) -> None:
        self._count("masked")
        self._depth += 1
        body()
        self._depth -= 1

    def to_dtype(self, value: Any, dtype: torch.dtype) -> None:
        self._count("to_dtype")

    def bitcast(self, value: Any, dtype: torch.dtype) -> None:
        self._count("bitcast")

    def random_bits(self, seed: Any, stream: Any, counter: Any) -> None:
        self._count("random_bits")


def node_index(node: LoopNode) -> tuple[Index, Index]:
    """The canonical symbols i0.. and r0.. of a node's ranges and reduce ranges."""
    return axis_index("i", node.ranges), axis_index("r", node.reduce_ranges)


def analyse(node: LoopNode, index: Index | None = None, reduce_index: Index | None = None) -> Facts:
    """Run the body of `node` (on its canonical symbols, unless told others) and tell what it did."""
    own_index, own_reduce_index = node_index(node)
    index = own_index if index is None else index
    reduce_index = own_reduce_index if reduce_index is None else reduce_index
    handler = ReadsWrites()
    node.body(handler, index, reduce_index)
    writes = tuple((output.name, output.element(index)) for output in node.outputs)
    return Facts(index, reduce_index, tuple(handler.reads), writes, tuple(handler.scalars), handler.ops)


def size_of(symbol: sympy.Symbol) -> Dim | None:
    """How far an axis symbol runs; None for a plain symbol."""
    return symbol.size if isinstance(symbol, AxisSymbol) else None
