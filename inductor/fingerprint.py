"""What a kernel is, whatever its buffers are called: the key under which its emitted source is reused.

A model repeats its layers, an optimizer its update, so most kernels of a program equal an earlier one. Running the
bodies under a handler that writes down each op is much cheaper than emitting text.

Invariant: kernels of one key give a code generator the same answers to every question it can ask, but for names,
origins and reasons; `buffers` and `scalars` pair their names in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torchlazy.inductor.analyses import UniformHandler
from torchlazy.inductor.codegen.kernel import EmittedKernel
from torchlazy.inductor.index import axis, stride_of
from torchlazy.inductor.ir import Buffer, Kernel, Statement


@dataclass(frozen=True)
class Fingerprint:
    """`key` compares by value. `is_flat`: pointwise over one axis, every access a step of one along it, or of none.

    `family` is coarser, for a first guess at kernels whose foreach sources may be equal: the ops and dtypes without the
    indices and most sizes. None where an index depends on data: those kernels are launched by themselves.
    """

    key: Hashable
    buffers: tuple[str, ...]
    scalars: tuple[str, ...]
    is_flat: bool
    family: Hashable


def take_fingerprint(kernel: Kernel) -> Fingerprint:
    """Run every body of the kernel once."""
    trace = _Trace(kernel)
    for sweep in kernel.sweeps:
        trace.lines.append(("sweep", sweep.over_reduce_axes))
        for statement in sweep.statements:
            trace.run(statement)
    key = (
        tuple((a.symbol, a.size) for a in kernel.axes),
        tuple((a.symbol, a.size) for a in kernel.reduce_axes),
        tuple((trace.names[b.name], _layout(b)) for b in kernel.reads),
        tuple((trace.names[b.name], _layout(b)) for b in kernel.writes),
        tuple((trace.scalars[name], kind) for name, kind in kernel.scalars),
        tuple((trace.names[written], trace.names[read]) for written, read in kernel.aliases),
        tuple(trace.lines),
    )
    is_flat = len(kernel.axes) == 1 and not kernel.reduce_axes and len(kernel.sweeps) == 1 and trace.is_flat
    family = None if trace.indirect_symbols else _family(kernel, trace)
    return Fingerprint(key, tuple(trace.names), tuple(trace.scalars), is_flat, family)


def _family(kernel: Kernel, trace: _Trace) -> Hashable:
    """Kernels of many points may differ in their outermost axis, reductions to one result in their length."""
    sizes = [a.size for a in kernel.axes]
    reduce_sizes = [a.size for a in kernel.reduce_axes] if kernel.axes else []
    return (
        tuple(sizes[1:]),
        tuple(reduce_sizes),
        (bool(sizes), len(kernel.reduce_axes)),
        tuple((buffer.dtype, buffer.device) for buffer in (*kernel.reads, *kernel.writes)),
        tuple(kind for _, kind in kernel.scalars),
        tuple(line[0] if line[0] in ("load", "index_expr") else line for line in trace.lines if line[0] != "statement"),
    )


def _layout(buffer: Buffer) -> Hashable:
    return buffer.dtype, tuple(buffer.shape), tuple(buffer.strides), buffer.device, buffer.offset


class _Trace(UniformHandler[int]):
    """Each op becomes a line; a value is the number of its line."""

    def __init__(self, kernel: Kernel) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.names: dict[str, int] = {}
        for buffer in (*kernel.reads, *kernel.writes):
            self.names.setdefault(buffer.name, len(self.names))
        self.scalars = {name: number for number, (name, _) in enumerate(kernel.scalars)}
        self.symbol = kernel.axes[0].symbol if len(kernel.axes) == 1 else None
        self.is_flat = self.symbol is not None
        self.indirect_symbols = 0

    def run(self, statement: Statement) -> None:
        node = statement.node
        outputs = []
        for output in node.outputs:
            number = self.names.setdefault(output.name, len(self.names))
            outputs.append((number, _layout(output), output.name in statement.stored))
            if self.is_flat and stride_of(output.element(statement.index), self.symbol) != 1:
                self.is_flat = False
        head = (node.reduction, node.accumulate_dtype, tuple(node.ranges), tuple(node.reduce_ranges))
        self.lines.append(("statement", tuple(outputs), head, statement.index, statement.reduce_index))
        result = node.body(self, statement.index, statement.reduce_index)
        self.lines.append(("result", result))

    def _line(self, *parts: Any) -> int:
        self.lines.append(parts)
        return len(self.lines) - 1

    def pointwise(self, op: str, operands: tuple[int, ...]) -> int:
        return self._line(op, operands)

    def load(self, name: str, index: sympy.Expr) -> int:
        if self.is_flat and stride_of(sympy.sympify(index), self.symbol) not in (0, 1):
            self.is_flat = False
        return self._line("load", self.names.setdefault(name, len(self.names)), index)

    def store(self, name: str, index: sympy.Expr, value: int) -> None:
        raise AssertionError("bodies return their value; the code generator stores it")

    def scalar(self, name: str, dtype: torch.dtype) -> int:
        return self._line("scalar", self.scalars[name], dtype)

    def constant(self, value: float, dtype: torch.dtype) -> int:
        # repr tells 0.0 from -0.0 and equals itself for nan.
        return self._line("constant", repr(value), dtype)

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> int:
        if self.is_flat and stride_of(sympy.sympify(expr), self.symbol) is None:
            self.is_flat = False
        return self._line("index_expr", expr, dtype)

    def indirect(self, value: int, size: sympy.Expr, what: str) -> sympy.Expr:
        self.is_flat = False
        self._line("indirect", value, size, what)
        self.indirect_symbols += 1
        return axis(f"indirect{self.indirect_symbols}", size)

    def masked(self, condition: int, body: Callable[[], int], other: float) -> int:
        self._line("masked", condition, repr(other))
        return self._line("end", body())

    def to_dtype(self, value: int, dtype: torch.dtype) -> int:
        return self._line("to_dtype", value, dtype)

    def bitcast(self, value: int, dtype: torch.dtype) -> int:
        return self._line("bitcast", value, dtype)

    def random_bits(self, seed: int, stream: int, counter: int) -> int:
        return self._line("random_bits", seed, stream, counter)


class EmitOnce:
    """A code generator that answers for a kernel equal to an earlier one with that one's source, under other names."""

    def __init__(self, emit_kernel: Callable[..., EmittedKernel]) -> None:
        self._emit_kernel = emit_kernel
        self._known: dict[Hashable, tuple[EmittedKernel, Fingerprint]] = {}
        self._prints: dict[int, tuple[Kernel, Fingerprint]] = {}

    def fingerprint(self, kernel: Kernel) -> Fingerprint:
        """The fingerprint, taken once a kernel object."""
        if id(kernel) not in self._prints:
            self._prints[id(kernel)] = (kernel, take_fingerprint(kernel))  # the kernel is kept: its id stays its own
        return self._prints[id(kernel)][1]

    def __call__(
        self, kernel: Kernel, *, foreach: bool = False, row_scalars: frozenset[str] = frozenset()
    ) -> EmittedKernel:
        own = self.fingerprint(kernel)
        rows = frozenset(own.scalars.index(name) for name in row_scalars)
        key = (own.key, foreach, rows)
        if key not in self._known:
            emitted = self._emit_kernel(kernel, foreach=foreach, row_scalars=row_scalars)
            self._known[key] = (emitted, own)
            return emitted
        emitted, other = self._known[key]
        name_of = dict(zip(other.buffers, own.buffers, strict=True))
        scalar_of = dict(zip(other.scalars, own.scalars, strict=True))
        return replace(
            emitted,
            buffers=tuple(name_of[name] for name in emitted.buffers),
            scalars=tuple(scalar_of[name] for name in emitted.scalars),
            row_scalars=tuple(scalar_of[name] for name in emitted.row_scalars),
        )
