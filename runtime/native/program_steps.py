"""A loaded program as the native recorder's library runs it: its steps by number, kernels by address.

Invariant: what it refuses (a kernel of Numba, one of Triton at sizes that vary, a constant without a form in C++) runs
as the program's Python function; the results are the same.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from torchlazy.prims.meta import TensorMeta
from torchlazy.prims.size_expr import python_text
from torchlazy.runtime.program.program import (
    Allocate,
    ExternCall,
    ForeachLaunch,
    Free,
    Launch,
    Program,
    Reinterpret,
    ValueRef,
)
from torchlazy.runtime.program.steps import resolve_overload
from torchlazy.runtime.program.symbolic import FloatName, SizeName
from torchlazy.runtime.toolchains.toolchain import LoadedKernel

_CODES = {ast.Add: 2, ast.Sub: 3, ast.Mult: 4, ast.FloorDiv: 5, ast.Mod: 6}


def native_program(library: Any, program: Program, kernels: Sequence[LoadedKernel], device: int | None) -> Any:
    """The program in C++; None where it has to run in Python. `device`: of its CUDA kernels, None on the CPU."""
    try:
        return library.Program(_Steps(program, kernels).spec() | {"device": -1 if device is None else device})
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError):
        return None


class _Steps:
    def __init__(self, program: Program, kernels: Sequence[LoadedKernel]) -> None:
        self.program, self.kernels = program, kernels
        self.slots: dict[str, int] = {}
        self.metas = dict(program.inputs)
        for step in program.steps:
            if isinstance(step, (Allocate, Reinterpret)):
                self.metas[step.name] = step.meta
            elif isinstance(step, ExternCall):
                made = zip(step.outputs, step.metas, strict=True)
                self.metas.update((name, meta) for name, meta in made if name is not None and meta is not None)
        self.sizes = {name: number for number, (name, _) in enumerate(program.sizes)}
        self.scalars = {name: number for number, (name, _) in enumerate(program.scalars)}
        kept = {program.inputs[position][0] for _, position in program.donations}
        self.lasting = kept | set(program.outputs)

    def spec(self) -> dict[str, Any]:
        program = self.program
        inputs = [self.slot(name) for name, _ in program.inputs]
        steps = [self.step(step) for step in program.steps]
        places = {name: number for number, name in enumerate(program.symbols)}
        return {
            "inputs": inputs,
            "steps": steps,
            "outputs": [self.slot(name) for name in program.outputs],
            "scalars": [kind is float for _, kind in program.scalars],
            "donations": list(program.donations),
            "symbols": len(program.symbols),
            "sizes": [postfix(python_text(size), places) for _, size in program.sizes],
            "slots": len(self.slots),
        }

    def slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots))

    def step(self, step: Any) -> tuple[Any, ...]:
        if isinstance(step, Allocate):
            reuse = -1 if step.reuse is None else self.slot(step.reuse)
            return "allocate", self.slot(step.name), reuse, self._layout(step.meta), step.meta.device
        if isinstance(step, Reinterpret):
            source, moved = self.slot(step.source), self._moved([step.offset])
            offset = int(step.offset), moved[0][1] if moved else -1
            return "window", self.slot(step.name), source, self._layout(step.meta), *offset
        if isinstance(step, Launch):
            kernel = self.kernels[step.kernel]
            function = self._function(kernel, step.buffers, step.sizes)
            scalars = [self.scalars[name] for name in step.scalars]
            now, moved = list(map(int, step.sizes)), self._moved(step.sizes)
            buffers = [self.slot(name) for name in step.buffers]
            return "launch", function, buffers, scalars, now, moved, list(kernel.source.index_checks)
        if isinstance(step, ForeachLaunch):
            kernel = self.kernels[step.kernel]
            given = [row for row in step.rows if not (row[1] and row[1][0] == 0)]
            rows = [
                (
                    [self.slot(name) for name in buffers],
                    list(map(int, sizes)),
                    self._moved(sizes),
                    [self.scalars[name] for name in scalars],
                )
                for buffers, sizes, scalars in given
            ]
            scalars = [self.scalars[name] for name in step.scalars]
            sizes = tuple(sizes[0] for _, sizes, _ in given if sizes)
            function = self._function(kernel, given[0][0] if given else (), sizes)
            return "foreach", function, rows, scalars, list(kernel.source.index_checks)
        if isinstance(step, ExternCall):
            return self._extern(step)
        assert isinstance(step, Free)
        return "free", [self.slot(name) for name in step.names if name not in self.lasting]

    def _function(self, kernel: LoadedKernel, buffers: Sequence[str], sizes: tuple[int, ...]) -> Any:
        """Where a kernel of C++ is, or how the driver launches one of Triton's; None where there is nothing to do."""
        if kernel.triton is None:
            return kernel.function.packed  # type: ignore[union-attr]
        if self._moved(sizes):
            raise TypeError("a kernel of Triton at sizes that vary")
        if not buffers or (sizes[:1] == (0,) and not kernel.source.foreach):
            return None
        found = kernel.triton.driver_launch(self.metas[buffers[0]].device, sizes)
        if found is None or found.shape.moving_sizes:
            raise TypeError("a kernel that Triton's launcher launches")
        shape = found.shape
        return (
            *found.driver, found.function, found.threads, found.shared,
            shape.grid, list(shape.fixed), list(shape.sizes), shape.unaligned, shape,
        )  # fmt: skip

    def _extern(self, step: ExternCall) -> tuple[Any, ...]:
        overload = resolve_overload(step.op)
        name, _, kind = overload.name().partition(".")
        outputs = [
            None if output is None or meta is None else (self.slot(output), self._layout(meta))
            for output, meta in zip(step.outputs, step.metas, strict=True)
        ]
        kwargs = {name: self._argument(value) for name, value in step.kwargs}
        return "extern", name, kind, [self._argument(value) for value in step.args], kwargs, outputs

    def _argument(self, value: Any) -> Any:
        if isinstance(value, ValueRef):
            return ("scalar", self.scalars[value.name]) if value.scalar else ("value", self.slot(value.name))
        if isinstance(value, (list, tuple)):
            return [self._argument(item) for item in value]
        if isinstance(value, SizeName):
            return "size", self.sizes[value.name]
        if isinstance(value, FloatName):
            raise TypeError(f"{value}, a float that a run computes from sizes")
        return value

    def _layout(self, meta: TensorMeta) -> tuple[Any, ...]:
        moved = self._moved((*meta.shape, *meta.strides))
        return list(map(int, meta.shape)), list(map(int, meta.strides)), meta.dtype, moved

    def _moved(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Places of the sizes that a run computes, each with the size's number."""
        return [(n, self.sizes[size.name]) for n, size in enumerate(numbers) if isinstance(size, SizeName)]


def postfix(text: str, place: Mapping[str, int]) -> list[tuple[int, int]]:
    """An expression of sizes, as Python has it, in the form of the C++ (`Expression`): (0, number), (1, symbol) or an
    operator behind its operands. `place`: the symbols' numbers by name."""

    def walk(node: Any) -> list[tuple[int, int]]:
        if isinstance(node, ast.Constant):
            return [(0, int(node.value))]  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            return [(1, place[node.id])]
        if isinstance(node, ast.UnaryOp):
            return [(0, 0), *walk(node.operand), (3, 0)]
        return [*walk(node.left), *walk(node.right), (_CODES[type(node.op)], 0)]

    return walk(ast.parse(text, mode="eval").body)
