"""Kernels as Python source for Numba: plain scalar loops, shared between threads by `prange`.

A source is a compiled function `body`, which runs a range of tasks, and the entry `kernel`, which calls it once or from
every thread. `numba_plan` says what a task is: in a pointwise kernel an element (one flat axis) or a run along the axis
that memory runs along, in a reduction one point of the parallel axes.

Invariant: text depends on the kernel's structure only. Sums, products and moments of floats are accumulated in float64,
so that plain left-to-right loops are as accurate as ATen's pairwise ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torchlazy.inductor.codegen.kernel import EmittedKernel, name_arguments
from torchlazy.inductor.codegen.numba_ops import NumbaKernelState, NumbaOps, NumbaValue, indent, literal, value_dtype
from torchlazy.inductor.codegen.numba_plan import NumbaLoopPlan, NumbaStatement, NumbaSweep, plan_kernel
from torchlazy.inductor.index import dot, flatten
from torchlazy.inductor.ir import Kernel, LoopNode
from torchlazy.prims.size_int import hint, is_tracked, markers_in, rename_markers
from torchlazy.runtime.program.program import KernelSource

# Additions below which a launch is faster on one thread: waking Numba's threads takes about 10 microseconds.
_SERIAL_WORK = 1 << 16
# Pieces that the tasks of a parallel launch are cut into; more than any desktop has cores, for balance.
_PARTS = 64


def emit(kernel: Kernel, *, foreach: bool = False, row_scalars: frozenset[str] = frozenset()) -> EmittedKernel:
    """The Numba source of `kernel`; `foreach` (flat pointwise kernels only) makes it run over the rows of a table.

    `row_scalars` names the runtime scalars that differ between rows.
    """
    arguments = name_arguments(kernel)
    plan = plan_kernel(kernel)
    if foreach and not plan.flat:
        raise ValueError("foreach: only a kernel with one flat pointwise axis can run over a table of rows")
    state = NumbaKernelState(
        arguments.pointer_of, {buffer.name: buffer.dtype for buffer in arguments.buffers}, arguments.scalar_of
    )
    body = _BodyWriter(plan, state).task()
    pointers = [arguments.pointer_of[buffer.name] for buffer in arguments.buffers]
    own = [name for name, _ in kernel.scalars if foreach and name in row_scalars]
    shared = [name for name, _ in kernel.scalars if name not in own]
    kinds = dict(kernel.scalars)
    values = [*pointers, *(arguments.scalar_of[name] for name, _ in kernel.scalars)]
    tracked = markers_in("\n".join([*plan.decode(), *body, str(plan.tasks), str(plan.inner and plan.inner.size)]))
    if tracked and foreach:
        raise ValueError("foreach: sizes of the program in the text of a kernel are arguments of one launch")
    names = {size.marker: f"size{number}" for number, size in enumerate(tracked, int(plan.flat))}
    values += names
    handed = ", ".join([*values, *["error"] * bool(state.checks)])
    text = "\n".join(
        [
            "# prelude: numba",
            "",
            "",
            "@pure",
            f"def body(begin, end, {handed}):" if handed else "def body(begin, end):",
            "    for task in range(begin, end):",
            *indent(indent([*plan.decode(), *body])),
            "",
            "",
            *(
                _foreach_entry(pointers, arguments.scalar_of, shared, own, kinds, handed, state)
                if foreach
                else _entry(plan, values, list(names), handed, state)
            ),
            "",
        ]
    )
    source = KernelSource(
        language="numba",
        entry="kernel",
        text=rename_markers(text, names),
        pointers=tuple(buffer.dtype for buffer in arguments.buffers),
        scalars=tuple(kinds[name] for name in shared),
        sizes=(1 if plan.flat else 0) + len(tracked),
        foreach=foreach,
        row_scalars=tuple(kinds[name] for name in own),
        index_checks=tuple(rename_markers(check, dict.fromkeys(names, "n")) for check in state.checks),
    )
    return EmittedKernel(
        source=source,
        buffers=tuple(buffer.name for buffer in arguments.buffers),
        scalars=tuple(shared),
        sizes=((plan.tasks,) if plan.flat else ()) + tuple(tracked),
        row_scalars=tuple(own),
    )


# ---- entries


def _entry(
    plan: NumbaLoopPlan, values: Sequence[str], tracked: Sequence[str], handed: str, state: NumbaKernelState
) -> list[str]:
    own = values[: len(values) - len(tracked)]
    parameters = ", ".join([*own, *["size0"] * plan.flat, *tracked])
    head = [f"def kernel({parameters}):", *_error_head(state)]
    call = f", {handed})" if handed else ")"
    work = max(1, state.work)
    if plan.flat:
        lines = _shared_loop("size0", max(1024, _SERIAL_WORK // work), call, 1024)
    elif is_tracked(plan.tasks) or (plan.inner is not None and is_tracked(plan.inner.size)):
        each = work * hint(plan.inner.size if plan.inner else 1)
        lines = [
            f"if {plan.tasks} < {max(2, _SERIAL_WORK // max(1, each))}:",
            f"    body(0, {plan.tasks}{call}",
            "else:",
            f"    for part in prange({_PARTS}):",
            f"        body({_part(str(plan.tasks))}{call}",
        ]
    elif plan.tasks * work * (plan.inner.size if plan.inner else 1) < _SERIAL_WORK or plan.tasks < 2:
        lines = [f"body(0, {plan.tasks}{call}"]
    else:
        lines = [f"for part in prange({_PARTS}):", f"    body({_part(str(plan.tasks))}{call}"]
    return [*head, *indent([*lines, _status(state)])]


def _foreach_entry(
    pointers: list[str], scalar_of: dict[str, str], shared: list[str], own: list[str], kinds: dict[str, type],
    handed: str, state: NumbaKernelState,
) -> list[str]:  # fmt: skip
    """Row after row; the threads share the elements of a long one."""
    width = len(pointers) + 1 + len(own)
    rows = [f"{name} = load_int64(row, {position})" for position, name in enumerate(pointers)]
    rows.append(f"size0 = load_int64(row, {len(pointers)})")
    for position, name in enumerate(own, len(pointers) + 1):
        kind = "float64" if kinds[name] is float else "int64"
        rows.append(f"{scalar_of[name]} = load_{kind}(row, {position})")
    rows += _shared_loop("size0", max(1024, _SERIAL_WORK // max(1, state.work)), f", {handed})", 1024)
    parameters = ", ".join(["table", "rows", *(scalar_of[name] for name in shared)])
    return [
        f"def kernel({parameters}):",
        *_error_head(state),
        "    for number in range(rows):",
        f"        row = table + number * {8 * width}",
        *indent(indent(rows)),
        f"    {_status(state)}",
    ]


def _shared_loop(size: str, serial: int, call: str, least: int) -> list[str]:
    """All of `size` tasks: on this thread where they are few."""
    return [
        f"if {size} < {serial}:",
        f"    body(0, {size}{call}",
        "else:",
        f"    for part in prange({_PARTS}):",
        f"        body({_part(size)}{call}",
    ]


def _part(size: str) -> str:
    return f"part * {size} // {_PARTS}, (part + 1) * {size} // {_PARTS}"


def _error_head(state: NumbaKernelState) -> list[str]:
    return ["    status = np.zeros(1, np.int64)", "    error = status.ctypes.data"] if state.checks else []


def _status(state: NumbaKernelState) -> str:
    return "return load_int64(error, 0) + 0 * status[0]" if state.checks else "return 0"


# ---- the task


class _BodyWriter:
    """Writes what one task does: its sweeps in order."""

    def __init__(self, plan: NumbaLoopPlan, state: NumbaKernelState) -> None:
        self.plan = plan
        self.state = state
        self.registers: dict[str, NumbaValue] = {}

    def task(self) -> list[str]:
        lines: list[str] = []
        for sweep in self.plan.sweeps:
            lines += self._sweep(sweep)
        if self.plan.inner is not None:
            lines = [f"for {self.plan.inner.name} in range({self.plan.inner.size}):", *indent(lines)]
        return lines or ["pass"]

    def _sweep(self, sweep: NumbaSweep) -> list[str]:
        """Its statements, within loops over the reduce axes if it runs over them."""
        before = self.state.work
        ops = NumbaOps(self.state, dict(self.registers))
        starts: list[str] = []
        ends: list[str] = []
        results: dict[str, NumbaValue] = {}
        for placed in sweep.statements:
            if placed.statement.node.reduction is None:
                self._pointwise(ops, placed)
            else:
                reduction = _Reduction.of(placed, self.state)
                starts += reduction.start()
                ops.lines.extend(reduction.step(ops))
                ends += reduction.end(ops, results)
        lines = ops.lines
        if sweep.over_reduce_axes:
            for symbol in reversed(self.plan.reduced):
                lines = [f"for {symbol.name} in range({symbol.size}):", *indent(lines or ["pass"])]
            points = prod(hint(axis.size) for axis in self.plan.reduced)
            self.state.work = before + (self.state.work - before) * max(1, points)
            self.registers |= results
        else:
            self.registers = ops.registers | results
        return [*starts, *lines, *ends]

    def _pointwise(self, ops: NumbaOps, placed: NumbaStatement) -> None:
        statement = placed.statement
        (output,) = statement.node.outputs
        value = statement.node.body(ops, placed.index, placed.reduce_index)
        if value.dtype is not value_dtype(output.dtype):
            value = ops.to_dtype(value, output.dtype)
        if output.name in statement.stored:
            ops.store(output.name, dot(placed.index, output.strides, output.offset), value)
        ops.registers[output.name] = value


_WIDER = {torch.float32: torch.float64}


@dataclass(frozen=True)
class _Reduction:
    """One accumulator of a sweep: its name, and the dtype of what it takes."""

    placed: NumbaStatement
    name: str
    dtype: torch.dtype

    @staticmethod
    def of(placed: NumbaStatement, state: NumbaKernelState) -> _Reduction:
        node = placed.statement.node
        if node.reduction in ("any", "all"):
            return _Reduction(placed, state.fresh("acc"), torch.bool)
        assert node.accumulate_dtype is not None, f"reduction {node.reduction}: a reduction states its accumulator"
        dtype = value_dtype(node.accumulate_dtype)
        return _Reduction(placed, state.fresh("acc"), torch.uint8 if dtype is torch.bool else dtype)

    @property
    def node(self) -> LoopNode:
        return self.placed.statement.node

    @property
    def held(self) -> torch.dtype:
        """The dtype of the accumulator itself."""
        return _WIDER.get(self.dtype, self.dtype) if self.node.reduction in ("sum", "prod", "welford") else self.dtype

    def start(self) -> list[str]:
        name, kind = self.name, self.node.reduction
        if kind == "welford":
            return [f"{name} = {literal(0, self.held)}", f"{name}_m2 = {name}", f"{name}_count = {name}"]
        if kind in ("argmax", "argmin"):
            return [f"{name} = {literal(0, self.dtype)}", f"{name}_at = int64(-1)"]
        return [f"{name} = {self._identity()}"]

    def _identity(self) -> str:
        kind = self.node.reduction
        if kind in ("sum", "prod"):
            return literal(0 if kind == "sum" else 1, self.held)
        if kind in ("any", "all"):
            return str(kind == "all")
        if self.dtype.is_floating_point:
            return literal(float("-inf" if kind == "max" else "inf"), self.dtype)
        limits = torch.iinfo(self.dtype)
        return literal(limits.min if kind == "max" else limits.max, self.dtype)

    def step(self, ops: NumbaOps) -> list[str]:
        """Take the value of one point; the value's own statements go to `ops`."""
        name, kind = self.name, self.node.reduction
        value = ops.to_dtype(self.node.body(ops, self.placed.index, self.placed.reduce_index), self.dtype)
        x = value.text
        held = str(self.held).removeprefix("torch.")
        ops.state.work += 8 if kind == "welford" else 2
        if kind == "welford":
            return [
                f"{name}_count += 1",
                f"{name}_d = {held}({x}) - {name}",
                f"{name} += {name}_d / {name}_count",
                f"{name}_m2 += {name}_d * ({held}({x}) - {name})",
            ]
        if kind in ("argmax", "argmin"):
            position = flatten(self.placed.reduce_index, tuple(self.node.reduce_ranges))
            at = ops.index_expr(position, torch.int64).text
            test = f"beats_{kind[3:]}({x}, {name})"
            return [f"if {name}_at < 0 or {test}:", f"    {name} = {x}", f"    {name}_at = {at}"]
        if kind in ("any", "all"):
            return [f"{name} = {name} {'or' if kind == 'any' else 'and'} {x}"]
        if kind in ("max", "min"):
            return [f"{name} = {held}({kind}imum({name}, {x}))"]
        return [f"{name} = {held}({name} {'+' if kind == 'sum' else '*'} {x})"]

    def end(self, ops: NumbaOps, results: dict[str, NumbaValue]) -> list[str]:
        """The statements after the loops: results get names and are stored."""
        name, kind = self.name, self.node.reduction
        if kind == "welford":
            values = [NumbaValue(text, self.held) for text in (name, f"{name}_m2", f"{name}_count")]
        elif kind in ("argmax", "argmin"):
            values = [NumbaValue(f"{name}_at", torch.int64)]
        else:
            values = [NumbaValue(name, self.held)]
        after = NumbaOps(ops.state, {})
        for output, value in zip(self.node.outputs, values, strict=True):
            value = after.to_dtype(value, output.dtype)
            if output.name in self.placed.statement.stored:
                index = dot(self.placed.index, output.strides, output.offset)
                after.store(output.name, index, value)
            results[output.name] = value
        return after.lines
