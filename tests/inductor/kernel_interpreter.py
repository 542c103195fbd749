"""Runs schedules on small tensors, strictly: the oracle's oracle for fusion tests.

Invariant: a value that a kernel holds in registers may be read only at the very element that its statement computed,
only while the contract of `ir.Kernel` keeps it alive, and memory only by the kernels that list it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import sympy
import torch
from torchlazy.inductor.interpret import EvalHandler, Memory, extent, ints, reduce_values, run, run_node
from torchlazy.inductor.ir import Buffer, Kernel, LoopGraph, LoopNode, Statement
from torchlazy.inductor.ops_handler import OpsHandler
from torchlazy.inductor.scheduler import Schedule, ScheduleOptions, schedule
from torchlazy.prims.meta import contiguous_strides

Lambda = Callable[[OpsHandler, Any, Any], Any]


def buffer(name: str, *shape: int, dtype: torch.dtype = torch.float32, strides: Sequence[int] | None = None) -> Buffer:
    return Buffer(name, dtype, shape, tuple(strides) if strides is not None else contiguous_strides(shape), "cpu")


def pointwise(out: Buffer, body: Lambda) -> LoopNode:
    return LoopNode((out,), out.shape, body)


def reduction(kind: Any, out: Buffer | tuple[Buffer, ...], reduce_ranges: Sequence[int], body: Lambda) -> LoopNode:
    outputs = out if isinstance(out, tuple) else (out,)
    dtype = torch.bool if kind in ("any", "all") else torch.float32
    return LoopNode(outputs, outputs[0].shape, body, tuple(reduce_ranges), kind, dtype)


def run_schedule(
    plan: Schedule, graph: LoopGraph, inputs: Sequence[torch.Tensor], scalars: Sequence[Any] = (), each: bool = False
) -> list[torch.Tensor]:
    """The outputs of a schedule; `each` runs kernels point by point instead of all points at once."""
    memory = Memory()
    for declared, tensor in zip(graph.inputs, inputs, strict=True):
        memory.bind(declared, tensor.clone(memory_format=torch.preserve_format))
    numbers = dict(zip((name for name, _ in graph.scalars), scalars, strict=True))
    for item in plan.items:
        if isinstance(item, Kernel):
            run_kernel(item, memory, numbers, plan.donations, each)
        else:
            run_node(item, memory, numbers)
    for name, target in plan.donations.items():
        if name != target and name in memory.flat:
            assert memory.flat[name].data_ptr() == memory.flat[target].data_ptr()
    return [memory.tensors[name] for name in plan.outputs]


def run_kernel(
    kernel: Kernel, memory: Memory, scalars: Mapping[str, Any], donations: Mapping[str, str], each: bool
) -> None:
    for out in kernel.writes:
        target = donations.get(out.name)
        if target is None:
            memory.allocate(out)
            continue
        memory.flat[out.name] = memory.flat[target]
        source = memory.flat[target]
        memory.tensors[out.name] = source.as_strided(
            ints(out.shape), ints(out.strides), source.storage_offset() + int(out.offset)
        )
    sizes = ints([a.size for a in kernel.axes])
    reduce_sizes = ints([a.size for a in kernel.reduce_axes])
    rank = 0 if each else len(sizes)
    full = (*(() if each else sizes), *reduce_sizes)
    symbols: dict[sympy.Symbol, Any] = {}
    axes = (*(() if each else kernel.axes), *kernel.reduce_axes)
    for place, axis in enumerate(axes):
        along = [1] * len(full)
        along[place] = int(axis.size)
        symbols[axis.symbol] = torch.arange(int(axis.size)).reshape(along)
    for point in product(*map(range, sizes)) if each else [()]:
        fixed = {axis.symbol: torch.tensor(value) for axis, value in zip(kernel.axes, point, strict=False)}
        _run_point(kernel, memory, scalars, {**symbols, **fixed}, rank, full)


def _run_point(
    kernel: Kernel,
    memory: Memory,
    scalars: Mapping[str, Any],
    symbols: dict[sympy.Symbol, Any],
    rank: int,
    full: tuple[int, ...],
) -> None:
    registers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    point = (*full[:rank], *(1 for _ in full[rank:]))
    for sweep in kernel.sweeps:
        sweep_names: list[str] = []
        for statement in sweep.statements:
            shape = full if sweep.over_reduce_axes else point
            handler = _Handler(kernel, memory, scalars, dict(symbols), registers)
            node = statement.node
            value = torch.as_tensor(node.body(handler, statement.index, statement.reduce_index)).expand(shape)
            results = [value]
            if node.reduction is not None:
                assert sweep.over_reduce_axes
                results = [r.reshape(point) for r in reduce_values(value, node, rank)]
            elif sweep.over_reduce_axes:
                sweep_names.extend(out.name for out in node.outputs)
            for out, result in zip(node.outputs, results, strict=True):
                where = torch.as_tensor(handler.position(out.element(statement.index)))
                registers[out.name] = (result, where)
                if out.name in statement.stored:
                    _store(memory, out, where, result)
        for name in sweep_names:
            registers.pop(name, None)


def _store(memory: Memory, out: Buffer, where: torch.Tensor, value: torch.Tensor) -> None:
    shape = torch.broadcast_shapes(where.shape, value.shape)
    flat = memory.flat[out.name]
    places = where.expand(shape).reshape(-1)
    assert places.unique().numel() == places.numel(), f"{out.name} is stored twice at one element"
    assert not places.numel() or int(places.max()) < flat.numel()
    flat[places] = value.expand(shape).reshape(-1).to(flat.dtype)


class _Handler(EvalHandler):
    def __init__(self, kernel: Kernel, memory: Memory, scalars: Any, symbols: Any, registers: Any) -> None:
        super().__init__(memory, scalars, symbols)
        self.kernel = kernel
        self.registers = registers

    def position(self, index: sympy.Expr) -> torch.Tensor:
        from torchlazy.inductor.index import evaluate

        return torch.as_tensor(evaluate(sympy.sympify(index), self.symbols))

    def load(self, name: str, index: sympy.Expr) -> torch.Tensor:
        if name in self.registers:
            value, where = self.registers[name]
            here = self.position(index)
            shape = torch.broadcast_shapes(here.shape, where.shape)
            assert torch.equal(here.expand(shape), where.expand(shape)), f"{name} is read at another point"
            return value
        assert name in {b.name for b in self.kernel.reads}, f"{name} is neither in registers nor among the reads"
        return super().load(name, index)


def check(
    graph: LoopGraph,
    inputs: Sequence[torch.Tensor],
    scalars: Sequence[Any] = (),
    options: ScheduleOptions | None = None,
    exact: bool = False,
) -> Schedule:
    """Schedule the graph and compare both ways of running it with running the nodes one by one."""
    wanted = run(graph, [t.clone(memory_format=torch.preserve_format) for t in inputs], scalars)
    plan = schedule(graph, options)
    for each in (False, True):
        got = run_schedule(plan, graph, inputs, scalars, each)
        for have, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5, equal_nan=True)
    return plan


def statements(kernel: Kernel) -> list[Statement]:
    return [statement for sweep in kernel.sweeps for statement in sweep.statements]


__all__ = ["buffer", "check", "extent", "pointwise", "reduction", "run_schedule", "statements"]
