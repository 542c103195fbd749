"""The function `body` of a C++ kernel: loops around what `cpp_ops` prints, as `cpp_plan` lays them out.

Invariant: `body` runs tasks begin..end one after the other and shares nothing between them, so threads may take any
ranges. Within a task the sweeps follow in order; what a later sweep reads is a name of the task or (columns) a slot of
its tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import sympy
import torch
from torchlazy.inductor.codegen.cpp_ops import (
    CPP_TYPES,
    TASK,
    CppBlock,
    CppKernelState,
    CppOps,
    CppValue,
    indent,
    value_dtype,
)
from torchlazy.inductor.codegen.cpp_plan import (
    CASCADE_BLOCK,
    CASCADED_AXIS,
    CASCADED_ROW,
    INNER_TILE,
    CppLoopPlan,
    CppSweep,
    PlacedStatement,
)
from torchlazy.inductor.index import AxisSymbol, dot, flatten
from torchlazy.prims.size_int import hint, surely_equal

_ACCUMULATORS = {
    "sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "any": "Any", "all": "All",
    "argmax": "ArgMax", "argmin": "ArgMin", "welford": "Welford",
}  # fmt: skip
_RESULTS = {"welford": ("mean", "m2", "count")}
_ROUNDING = frozenset({"Sum", "Prod", "Welford"})
# Work (in additions) below which a loop body is worth unrolling over 4, then 2 accumulators.
_UNROLL = ((6, 4), (24, 2))


class _Accumulator:
    """One reduction of a sweep: its C++ type over scalars and over the loop's values, and its names."""

    def __init__(self, number: int, placed: PlacedStatement, vector: bool) -> None:
        node = placed.statement.node
        assert node.reduction is not None
        self.name = f"acc{number}"
        self.part = f"part{number}"
        self.placed = placed
        self.template = _ACCUMULATORS[node.reduction]
        self.is_arg = node.reduction in ("argmax", "argmin")
        self.dtype = self._input_dtype()
        element = CPP_TYPES[self.dtype]
        self.scalar_type = f"{self.template}<{element}>"
        lanes = "Mask<L>" if self.dtype is torch.bool else f"Vec<{element}, L>"
        if self.is_arg:
            lanes = f"Vec<{element}, L>"
        self.loop_type = f"{self.template}<{lanes}>" if vector else self.scalar_type
        self.results = _RESULTS.get(node.reduction, ("value",))

    def _input_dtype(self) -> torch.dtype:
        node = self.placed.statement.node
        if node.reduction in ("any", "all"):
            return torch.bool
        assert node.accumulate_dtype is not None, f"reduction {node.reduction}: a reduction states its accumulator"
        dtype = value_dtype(node.accumulate_dtype)
        return torch.uint8 if dtype is torch.bool else dtype

    def result_dtype(self) -> torch.dtype:
        return torch.int64 if self.is_arg else self.dtype


class BodyWriter:
    """Writes the function `body` of one plan."""

    def __init__(self, plan: CppLoopPlan, state: CppKernelState) -> None:
        self.plan = plan
        self.state = state
        self.function = CppBlock()
        self.task = CppBlock()
        self.registers: dict[str, CppValue] = {}
        self.accumulators = 0
        self.task_work = 0  # of one task (of one element: flat)

    def body(self) -> list[str]:
        """The statements of the function."""
        plan = self.plan
        if plan.mode == "grid":
            self._write_grid()
        else:
            for number, sweep in enumerate(plan.sweeps):
                self._write_sweep(sweep, last=number == len(plan.sweeps) - 1)
        if plan.flat:
            return [*self.function.lines, *self.task.lines]
        return [
            *self.function.lines,
            "for (int64_t task = begin; task < end; ++task) {",
            *indent([*self._decode_task(), *self.task.lines]),
            "}",
        ]

    def _decode_task(self) -> list[str]:
        """The outer axes' values, and the vector axis' range `from`..`to`, of task number `task`."""
        plan = self.plan
        lines, step = [], plan.tiles * plan.inner_tiles
        for position, symbol in reversed(list(enumerate(plan.outer))):
            text = "task" if surely_equal(step, 1) else f"task / {step}"
            if position > 0:
                text += f" % {symbol.size}"
            lines.append(f"const int64_t {symbol.name} = {text};")
            step *= symbol.size
        if plan.inner is not None:
            number = "task" if surely_equal(plan.tiles, 1) else f"task / {plan.tiles}"
            number = f"({number} % {plan.inner_tiles})" if plan.outer else f"({number})"
            size = plan.inner.size
            lines.append(f"const int64_t inner_from = {number} * {INNER_TILE};")
            lines.append(f"const int64_t inner_to = min_index(inner_from + {INNER_TILE}, {size});")
        if plan.mode != "rows" and plan.vector is not None:
            size, tile = plan.vector.size, plan.tile
            if surely_equal(plan.tiles, 1):
                lines.append(f"const int64_t from = 0, to = {size};")
            else:
                number = "task" if surely_equal(plan.tasks, plan.tiles) else f"(task % {plan.tiles})"
                lines.append(f"const int64_t from = {number} * {tile}, to = min_index(from + {tile}, {size});")
        return lines

    def _levels(self, loops: Sequence[AxisSymbol]) -> dict[sympy.Symbol, int]:
        levels: dict[sympy.Symbol, int] = dict.fromkeys(self.plan.outer, TASK)
        levels |= {symbol: TASK + 1 + n for n, symbol in enumerate(loops)}
        return levels

    # ------------------------------------------------------------------ pointwise
    def _write_grid(self) -> None:
        plan = self.plan
        assert plan.vector is not None
        levels = self._levels([plan.vector])
        blocks = [self.function, self.task, CppBlock()]
        if plan.inner is not None:  # vector, then a block of `inner`, then `inner`
            levels[plan.inner] = TASK + 3
            blocks += [CppBlock(), CppBlock()]
        ops = CppOps(self.state, blocks, levels, plan.vector, self.registers, plan.inner)
        for sweep in plan.sweeps:
            for placed in sweep.statements:
                self._write_pointwise(ops, placed)
        begin, end = ("begin", "end") if plan.flat else ("from", "to")
        lines = blocks[-1].lines
        if plan.inner is not None:
            name, start, count = plan.inner.name, f"{plan.inner.name}_block", f"{plan.inner.name}_count"
            lines = [
                *blocks[-3].lines,
                f"for (int64_t {start} = inner_from; {start} < inner_to; {start} += L) {{",
                f"  const int {count} = int(min_index(L, inner_to - {start}));",
                *indent(blocks[-2].lines),
                f"  for (int64_t {name} = {start}; {name} < {start} + {count}; ++{name}) {{",
                *indent(indent(lines)),
                "  }",
                "}",
            ]
        self.task.lines += self._vector_loop(begin, end, lines, 1)
        points = 1 if plan.flat else plan.tile if plan.inner is None else plan.tile * INNER_TILE
        self.task_work = ops.work * hint(points)

    def _vector_loop(self, begin: str, end: str, lines: list[str], unroll: int) -> list[str]:
        assert self.plan.vector is not None
        parameters = f"const int64_t {self.plan.vector.name}, const auto lanes, const auto u"
        return [
            f"each_vector<L, {unroll}>({begin}, {end}, [&]({parameters}) TL_LOOP {{",
            *indent(lines),
            "});",
        ]

    def _write_pointwise(self, ops: CppOps, placed: PlacedStatement) -> CppValue:
        statement = placed.statement
        (output,) = statement.node.outputs
        value = statement.node.body(ops, placed.index, placed.reduce_index)
        if value.dtype is not value_dtype(output.dtype):
            value = ops.to_dtype(value, output.dtype)
        if output.name in statement.stored:
            ops.store(output.name, dot(placed.index, output.strides, output.offset), value)
        ops.registers[output.name] = value
        return value

    # ------------------------------------------------------------------ reductions
    def _write_sweep(self, sweep: CppSweep, last: bool) -> None:
        """One sweep of `rows` or `columns`: its loops go to the task's block."""
        plan = self.plan
        columns = plan.mode == "columns"
        loops = list(plan.reduce_axes) if sweep.over_reduce_axes else []
        if columns:
            assert plan.vector is not None
            loops.append(plan.vector)
        vector = plan.vector if plan.vector in loops else None
        blocks = [self.function, self.task, *(CppBlock() for _ in loops)]
        ops = CppOps(self.state, blocks, self._levels(loops), vector, dict(self.registers))
        accumulators: list[_Accumulator] = []
        for placed in sweep.statements:
            if placed.statement.node.reduction is None:
                value = self._write_pointwise(ops, placed)
                if not sweep.over_reduce_axes:
                    self._keep(placed, value, ops, blocks[-1], last)
            else:
                accumulators.append(self._accumulate(ops, placed, vector))
        points = prod(hint(a.size) for a in plan.reduce_axes) if sweep.over_reduce_axes else 1
        self.task_work += ops.work * points * (hint(plan.tile) if columns else 1)
        if not loops:  # a reduction over axes of size 1 only
            for accumulator in accumulators:
                self._finish(accumulator, columns)
            return
        unroll = 1
        if plan.mode == "rows" and vector is not None and accumulators:
            unroll = next((count for limit, count in _UNROLL if ops.work <= limit), 1)
            if any(accumulator.is_arg for accumulator in accumulators):
                unroll = 1
        self._assemble(sweep, loops, blocks, accumulators, unroll)
        for accumulator in accumulators:
            self._finish(accumulator, columns)

    def _keep(self, placed: PlacedStatement, value: CppValue, ops: CppOps, block: CppBlock, last: bool) -> None:
        """Make a point value readable in later sweeps: a name of the task, or (columns) an array over the tile."""
        (output,) = placed.statement.node.outputs
        if not value.vector or last:
            self.registers[output.name] = value
            return
        name = self.state.fresh("kept")
        kind = "Mask<L>" if value.dtype is torch.bool else f"Vec<{CPP_TYPES[value.dtype]}, L>"
        self.task.lines.append(f"{kind} {name}[{self._tile_vectors()}];")
        block.lines.append(f"{name}[t] = {value.text};")
        self.registers[output.name] = CppValue(f"{name}[t]", value.dtype, value.level, True)

    def _tile_vectors(self) -> str:
        return f"({self.plan.tile} + L - 1) / L"

    def _accumulate(self, ops: CppOps, placed: PlacedStatement, vector: AxisSymbol | None) -> _Accumulator:
        node = placed.statement.node
        accumulator = _Accumulator(self.accumulators, placed, vector is not None)
        self.accumulators += 1
        value = node.body(ops, placed.index, placed.reduce_index)
        value = ops.to_dtype(value, accumulator.dtype)
        text = ops.as_vector(value) if vector is not None else value.text
        if vector is not None and accumulator.is_arg:
            self.state.wide = True
        inputs = [text]
        if accumulator.is_arg:
            position = flatten(placed.reduce_index, tuple(node.reduce_ranges))
            inputs.append(ops.index_expr(position, torch.int64).text)
        slot = ""
        if self.plan.mode == "columns":
            slot = "[t]"
        elif vector is not None:
            slot = "[u]"
            inputs.append("lanes")
        if ops.deepest is self.task:  # no loop around: nobody else declares it
            self.task.lines.append(f"{accumulator.scalar_type} {accumulator.name};")
        ops.deepest.lines.append(f"{accumulator.name}{slot}.add({', '.join(inputs)});")
        ops.work += 1 if node.reduction != "welford" else 8
        return accumulator

    def _assemble(
        self,
        sweep: CppSweep,
        loops: list[AxisSymbol],
        blocks: list[CppBlock],
        accumulators: list[_Accumulator],
        unroll: int,
    ) -> None:
        plan = self.plan
        columns, chunked = plan.mode == "columns", plan.is_chunked and sweep.over_reduce_axes
        lines = blocks[-1].lines
        cascaded = self._cascaded(loops, accumulators)
        for level in range(len(loops) - 1, -1, -1):
            symbol = loops[level]
            begin, end = (
                ("chunk_begin", "chunk_end") if chunked and symbol == plan.chunk_axis else ("0", str(symbol.size))
            )
            if symbol == plan.vector and columns:
                parameters = f"const int64_t {symbol.name}, const auto lanes, const int t"
                lines = [f"each_tile_vector<L>(from, to, [&]({parameters}) TL_LOOP {{", *indent(lines), "});"]
            elif symbol == plan.vector and cascaded:
                lines = self._cascade(begin, end, lines, cascaded, unroll)
            elif symbol == plan.vector:
                lines = self._vector_loop(begin, end, lines, unroll)
            else:
                head = f"for (int64_t {symbol.name} = {begin}; {symbol.name} < {end}; ++{symbol.name}) {{"
                lines = [head, *indent(lines), "}"]
            if level > 0:
                lines = [*blocks[TASK + level].lines, *lines]
        declared = [f"{a.loop_type} {a.name}{self._slots(a, unroll)};" for a in accumulators]
        if cascaded:
            declared += [f"{a.loop_type} {a.name}_long{self._slots(a, unroll)};" for a in cascaded]
            merges = "".join(f" {a.name}[u].merge({a.name}_long[u]);" for a in cascaded)
            lines = [*lines, f"for (int u = 0; u < {unroll}; ++u) {{{merges} }}"]
        if not chunked:
            self.task.lines += [*declared, *lines]
            return
        assert plan.chunk_axis is not None
        if plan.mode == "columns":
            self.task.lines += [
                f"Scratch<{a.loop_type}> {a.part}({plan.chunks} * ({self._tile_vectors()}));" for a in accumulators
            ]
            vectors = self._tile_vectors()
            copies = [
                f"for (int t = 0; t < {vectors}; ++t) {a.part}[chunk * ({vectors}) + t] = {a.name}[t];"
                for a in accumulators
            ]
        else:
            self.task.lines += [f"Scratch<{a.scalar_type}> {a.part}({plan.chunks});" for a in accumulators]
            copies = [f"{a.part}[chunk] = {self._folded(a)};" for a in accumulators]
        size, whole = plan.chunk_size, plan.chunk_axis.size
        # Each chunk is thousands of operations: the test is only whether threads are there.
        pragma = ["#pragma omp parallel for schedule(static) if (!omp_in_parallel())"] if plan.split else []
        self.task.lines += [
            *pragma,
            f"for (int64_t chunk = 0; chunk < {plan.chunks}; ++chunk) {{",
            f"  const int64_t chunk_begin = chunk * {size}, chunk_end = min_index(chunk_begin + {size}, {whole});",
            *indent([*declared, *lines, *copies]),
            "}",
        ]

    def _cascaded(self, loops: list[AxisSymbol], accumulators: list[_Accumulator]) -> list[_Accumulator]:
        """Those whose sums are begun anew for each block of a long row: of nearly equal elements each addition to a
        large sum rounds the same way."""
        vector = self.plan.vector
        if self.plan.mode == "columns" or vector is None or vector not in loops or hint(vector.size) < CASCADED_AXIS:
            return []
        if prod(hint(axis.size) for axis in loops) < CASCADED_ROW:
            return []
        return [a for a in accumulators if a.template in _ROUNDING and a.dtype.is_floating_point]

    def _cascade(self, begin: str, end: str, lines: list[str], cascaded: list[_Accumulator], unroll: int) -> list[str]:
        merges = "".join(f" {a.name}_long[u].merge({a.name}[u]); {a.name}[u] = {{}};" for a in cascaded)
        return [
            f"for (int64_t block = {begin}; block < {end}; block += {CASCADE_BLOCK}) {{",
            *indent(self._vector_loop("block", f"min_index(block + {CASCADE_BLOCK}, {end})", lines, unroll)),
            f"  for (int u = 0; u < {unroll}; ++u) {{{merges} }}",
            "}",
        ]

    def _slots(self, accumulator: _Accumulator, unroll: int) -> str:
        if self.plan.mode == "columns":
            return f"[{self._tile_vectors()}]"
        return f"[{unroll}]" if accumulator.loop_type != accumulator.scalar_type else ""

    def _folded(self, accumulator: _Accumulator) -> str:
        vector = accumulator.loop_type != accumulator.scalar_type
        return f"fold_all({accumulator.name})" if vector else accumulator.name

    def _finish(self, accumulator: _Accumulator, columns: bool) -> None:
        """Bind the reduction's outputs: scalars of the task, or slots of the tile."""
        statement, plan = accumulator.placed.statement, self.plan
        chunked = plan.is_chunked
        name = accumulator.name
        if columns:
            if chunked:
                vectors = self._tile_vectors()
                self.task.lines += [
                    f"{accumulator.loop_type} {name}[{vectors}];",
                    f"merge_columns({accumulator.part}.at, {plan.chunks}, {vectors}, {name});",
                ]
        else:
            source = f"merge_tree({accumulator.part}.at, {plan.chunks})" if chunked else self._folded(accumulator)
            self.task.lines.append(f"const {accumulator.scalar_type} {name}_all = {source};")
            name = f"{name}_all"
        vector_level = TASK + 1
        pending: list[tuple[str, CppValue]] = []
        for output, result in zip(statement.node.outputs, accumulator.results, strict=True):
            slot = f"{name}[t].{result}()" if columns else f"{name}.{result}()"
            value = CppValue(slot, accumulator.result_dtype(), vector_level if columns else TASK, columns)
            pending.append((output.name, value))
        self._write_results(accumulator, pending)

    def _write_results(self, accumulator: _Accumulator, pending: list[tuple[str, CppValue]]) -> None:
        """Register the results in their buffers' dtypes, and store those that must reach memory."""
        plan, placed = self.plan, accumulator.placed
        columns = plan.mode == "columns"
        loops = [plan.vector] if columns and plan.vector is not None else []
        blocks = [self.function, self.task, *(CppBlock() for _ in loops)]
        ops = CppOps(self.state, blocks, self._levels(loops), plan.vector if columns else None, {})
        outputs = {output.name: output for output in placed.statement.node.outputs}
        for name, slot in pending:
            output = outputs[name]
            value = ops.emit(slot.text, slot.dtype, slot.level, slot.vector)
            converted = ops.to_dtype(value, output.dtype)
            if name in placed.statement.stored:
                ops.store(name, dot(placed.index, output.strides, output.offset), converted)
            # Slots are read where they are needed; only a change of dtype must be kept beside them.
            self.registers[name] = slot if columns and converted is value else converted
            if columns and converted is not value:
                kept = self.state.fresh("kept")
                kind = "Mask<L>" if converted.dtype is torch.bool else f"Vec<{CPP_TYPES[converted.dtype]}, L>"
                self.task.lines.append(f"{kind} {kept}[{self._tile_vectors()}];")
                blocks[-1].lines.append(f"{kept}[t] = {converted.text};")
                self.registers[name] = CppValue(f"{kept}[t]", converted.dtype, slot.level, True)
        if columns and blocks[-1].lines and any("store(" in line or "kept" in line for line in blocks[-1].lines):
            assert plan.vector is not None
            parameters = f"const int64_t {plan.vector.name}, const auto lanes, const int t"
            self.task.lines += [
                f"each_tile_vector<L>(from, to, [&]({parameters}) TL_LOOP {{",
                *indent(blocks[-1].lines),
                "});",
            ]
