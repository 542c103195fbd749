"""Kernels as Triton source text.

Invariant: the text is self-contained (it imports Triton only; helpers of `triton_prelude` that it names are pasted in)
and uses canonical names only.

What the launcher must know. The function takes, in order: the pointers (a bool buffer may be passed as a pointer to
int1 or int8), the scalars (annotated float64 or int64), `size0` = number of parallel points and, where axes are
reduced, `size1` = number of reduced points; then the constexprs XBLOCK [, RBLOCK], which stand in
`KernelSource.options` beside num_warps and num_stages. Grid: (ceil(size0 / XBLOCK),); with size0 == 0 launch
nothing. Sizes profit from being specialised on divisibility by 16, scalars must not be specialised.

A foreach kernel takes `table_ptr` (int64 [rows, columns]: pointers, sizes, row scalars of each row), `blocks_ptr`
(int64 [programs, 2]: row and first parallel point of each program, from `runtime.foreach_tables.foreach_blocks`), the
shared scalars, the constexprs. Grid: (programs,). A program looks at the alignment of its row's pointers itself: whole,
aligned blocks run without masks and with 16-byte accesses, the others element by element. Any kernel can be emitted so;
kernels may share a launch where their texts are equal. To that end blocks depend on no size that the text does not tell
anyway, and a reduction to one result has the same text for every length.

A load hint evict_last goes to what is read again: by a later sweep, or by many rows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from torchlazy.inductor.analyses import HEAVY_OPS
from torchlazy.inductor.codegen.kernel import EmittedKernel, name_arguments
from torchlazy.inductor.codegen.triton_choices import (
    FULL,
    Blocks,
    LoopBody,
    choose_any_length,
    choose_foreach,
    choose_foreach_reduction,
    choose_pointwise,
    choose_reduction,
)
from torchlazy.inductor.codegen.triton_index import (
    Access,
    AccessRecorder,
    FlatAxes,
    contiguous_side,
    element_sizes,
    needs_int64,
    order_axes,
    record_accesses,
    unit_symbols,
)
from torchlazy.inductor.codegen.triton_ops import memory_dtype
from torchlazy.inductor.codegen.triton_reductions import Finish, reduce_statement
from torchlazy.inductor.codegen.triton_writer import TritonWriter
from torchlazy.inductor.ir import Buffer, Kernel, Statement, Sweep
from torchlazy.prims.size_int import divides, hint, is_tracked, markers_in, rename_markers, surely_equal
from torchlazy.runtime.program.program import KernelSource

SCALAR_TYPE = {float: "tl.float64", int: "tl.int64", bool: "tl.int64"}
_LIBDEVICE = """if triton.knobs.runtime.interpret:
    from torchlazy.inductor.codegen.triton_interpret import libdevice
else:
    from triton.language.extra import libdevice
"""


def emit(
    kernel: Kernel,
    *,
    foreach: bool = False,
    row_scalars: frozenset[str] = frozenset(),
    blocks: Blocks | None = None,
) -> EmittedKernel:
    """The Triton source of `kernel`. `foreach`: one launch over many rows of pointers and sizes; the scalars named
    in `row_scalars` differ from row to row. `blocks` overrides the heuristics (autotuning, tests)."""
    plan = _Plan(kernel, foreach, blocks)
    if foreach:
        return _emit_foreach(kernel, plan, row_scalars)
    arguments = name_arguments(kernel)
    writer = plan.writer(arguments.pointer_of, arguments.scalar_of, masked=True)
    body = plan.write_body(writer)
    pointers = [arguments.pointer_of[buffer.name] for buffer in arguments.buffers]
    scalars = [f"{arguments.scalar_of[name]}: {SCALAR_TYPE[kind]}" for name, kind in arguments.scalars]
    lines = [*plan.prologue(), *body]
    tracked = markers_in("\n".join(lines))
    flat = ["size0", "size1"] if plan.r else ["size0"]
    names_of = {size.marker: f"size{number}" for number, size in enumerate(tracked, len(flat))}
    sizes = [*flat, *names_of]
    constexprs = [f"{name}: tl.constexpr" for name in (("XBLOCK", "RBLOCK") if plan.r else ("XBLOCK",))]
    entry = plan.entry()
    text = _module_text(entry, [*pointers, *scalars, *sizes, *constexprs], list(arguments.scalar_of.values()), lines)
    numels = (*((plan.x.numel, plan.r.numel) if plan.r else (plan.x.numel,)), *tracked)
    is_dynamic = any(map(is_tracked, numels))
    source = KernelSource(
        "triton", entry, rename_markers(text, names_of), tuple(buffer.dtype for buffer in arguments.buffers),
        tuple(kind for _, kind in arguments.scalars), len(sizes), options=plan.blocks.options(),
        dynamic=("i64" if plan.index_dtype == "tl.int64" else "i32") if is_dynamic else "",
        aligned_sizes=tuple(n for n, size in enumerate(numels) if divides(16, size)) if is_dynamic else (),
    )  # fmt: skip
    names = tuple(name for name, _ in arguments.scalars)
    return EmittedKernel(source, tuple(buffer.name for buffer in arguments.buffers), names, numels)


class _Plan:
    """What is decided about a kernel before its text is written: order of axes, blocks, index width, hints."""

    def __init__(self, kernel: Kernel, foreach: bool, blocks: Blocks | None) -> None:
        self.kernel = kernel
        self.foreach = foreach
        self.recorder: AccessRecorder = record_accesses(kernel)
        accesses = self.recorder.accesses
        over_r = [a for a in accesses if a.over_reduce_axes and not a.is_store]
        stores = [a for a in accesses if a.is_store]
        reduces = bool(kernel.reduce_axes) or any(sweep.over_reduce_axes for sweep in kernel.sweeps)
        leading = [*over_r, *stores] if reduces else [*stores, *accesses]
        self.x = FlatAxes("x", order_axes(kernel.axes, leading), unit_symbols(kernel.axes))
        self.r = None
        if reduces:
            self.r = FlatAxes("r", order_axes(kernel.reduce_axes, over_r), unit_symbols(kernel.reduce_axes))
        self.index_dtype = "tl.int64" if needs_int64(kernel, accesses) else "tl.int32"
        self.blocks = blocks or self._choose(over_r)
        self.x = replace(self.x, block=self.blocks.xblock)
        self.buffers: dict[str, Buffer] = {b.name: b for b in (*kernel.reads, *kernel.writes)}
        for sweep in kernel.sweeps:
            for statement in sweep.statements:
                self.buffers.update({output.name: output for output in statement.node.outputs})

    def _choose(self, over_r: list[Access]) -> Blocks:
        if self.r is None:
            if self.foreach:
                return choose_foreach()
            return choose_pointwise(hint(self.x.numel), one_axis=len(self.x.axes) <= 1)
        if self.is_any_length:
            return choose_foreach_reduction()
        moved = {(a.name, a.index, a.is_store): a for a in self.recorder.accesses if a.over_reduce_axes}
        side = contiguous_side(self.x.axes, self.r.axes, tuple(moved.values()), element_sizes(self.kernel))
        if is_tracked(self.r.numel):
            return choose_any_length(hint(self.x.numel), hint(self.r.numel), r_contiguous=side == "r")
        return choose_reduction(
            FULL if self.foreach else hint(self.x.numel),  # the rows fill the processors together
            self.r.numel,
            r_contiguous=side == "r",
            r_sweeps=sum(sweep.over_reduce_axes for sweep in self.kernel.sweeps),
            body=self._loop_body(over_r),
        )

    def _loop_body(self, over_r: list[Access]) -> LoopBody:
        return LoopBody(
            live=len({access.name for access in over_r}),
            stores=any(
                s.node.reduction is None and s.stored
                for sweep in self.kernel.sweeps
                if sweep.over_reduce_axes
                for s in sweep.statements
            ),
            heavy=not HEAVY_OPS.isdisjoint(self.recorder.op_counts),
        )

    @property
    def loops(self) -> bool:
        return self.r is not None and not self.blocks.persistent

    @property
    def is_any_length(self) -> bool:
        """Whether rows of a foreach launch may differ in the number of reduced points."""
        return self.foreach and self.r is not None and surely_equal(self.x.numel, 1)

    @property
    def has_xmask(self) -> bool:
        """Whether a program may reach past the end: not where whole blocks make up the axes inside of another."""
        return self.blocks.xblock > 1 and not self.x.has_uniform_axis

    @property
    def has_rmask(self) -> bool:
        if self.is_any_length:
            return True
        if self.r is None:
            return False
        return not divides(self.blocks.rblock, self.r.numel) or self.r.numel == 0

    def writer(self, pointer_of: dict[str, str], scalar_of: dict[str, str], *, masked: bool) -> TritonWriter:
        return TritonWriter(
            self.x,
            self.r,
            self.buffers,
            pointer_of,
            scalar_of,
            index_dtype=self.index_dtype,
            xmask=masked and self.has_xmask,
            rmask=self.has_rmask,
            persistent=self.blocks.persistent,
            overwrites=frozenset(self.buffers) & {*(w for w, _ in self.kernel.aliases), *self._read_and_written()},
        )

    def _read_and_written(self) -> set[str]:
        """Buffers that are loaded from memory and stored."""
        return {b.name for b in self.kernel.reads} & {b.name for b in self.kernel.writes}

    def entry(self) -> str:
        """A name for profilers that tells the kernel's structure."""
        kinds = [s.node.reduction for sweep in self.kernel.sweeps for s in sweep.statements if s.node.reduction]
        plain = ("where", "load", "store", "constant", "to_dtype", "index_expr", "scalar", "masked", "bitcast")
        ops = [op for op in self.recorder.op_counts if op not in plain]
        head = "foreach" if self.foreach else "reduce" if self.r else "pointwise"
        return "_".join(dict.fromkeys([head, *map(str, kinds), *ops][:7]))

    def prologue(self) -> list[str]:
        """Block indices and masks, before the body."""
        program = "tl.program_id(0)" + (".to(tl.int64)" if self.index_dtype == "tl.int64" else "")
        lines = self.xindex(f"{program} * XBLOCK")
        if self.has_xmask:
            lines.append("xmask = xindex < size0")
        return lines + self.rindex()

    def xindex(self, start: str) -> list[str]:
        """The parallel points of this program."""
        first = [f"{self.x.start} = {start}"] if self.x.has_uniform_axis else []
        start = self.x.start if first else start
        return [*first, f"xindex = {start} + tl.arange(0, XBLOCK){'[:, None]' if self.r else ''}"]

    def rindex(self) -> list[str]:
        """The reduced points of this program, or (looping) those of the first step."""
        lines: list[str] = []
        if self.r:
            wide = ".to(tl.int64)" if self.index_dtype == "tl.int64" else ""
            lines.append(f"rbase = tl.arange(0, RBLOCK)[None, :]{wide}")
            if not self.loops:
                lines.append("rindex = rbase")
                lines += ["rmask = rindex < size1"] * self.has_rmask
        return lines

    def write_body(self, writer: TritonWriter) -> list[str]:
        """All sweeps in order."""
        stored_before: set[str] = set()
        for number, sweep in enumerate(self.kernel.sweeps):
            loads = {a.name for a in self.recorder.accesses if a.sweep == number and not a.is_store}
            if (stored_before & loads) - writer.point_registers.keys():
                # Another thread of the block may have stored what this sweep loads.
                writer.flush_stores()
                writer.point_lines.append("tl.debug_barrier()")
                stored_before = set()
            writer.eviction = self._eviction(number)
            self._write_sweep(writer, sweep)
            stored = [name for statement in sweep.statements for name in statement.stored]
            stored_before.update(stored)
            writer.end_sweep(stored)
        writer.flush_stores()
        return writer.point_lines

    def _eviction(self, number: int) -> Callable[[str], str]:
        """In a looping kernel: keep what a later sweep over the reduced axes reads again, let go at the last read."""
        if not self.loops or not self.kernel.sweeps[number].over_reduce_axes:
            return lambda name: ""
        again = {a.name for a in self.recorder.accesses if a.over_reduce_axes and not a.is_store and a.sweep > number}
        before = {a.name for a in self.recorder.accesses if a.over_reduce_axes and not a.is_store and a.sweep < number}
        return lambda name: "evict_last" if name in again else "evict_first" if name in before else ""

    def _write_sweep(self, writer: TritonWriter, sweep: Sweep) -> None:
        looping = sweep.over_reduce_axes and self.loops
        writer.in_reduce_sweep = sweep.over_reduce_axes
        if looping:
            writer.flush_stores()
            writer.start_loop()
        unfinished: list[tuple[Statement, Finish]] = []
        for statement in sweep.statements:
            if statement.node.reduction is not None:
                assert self.r is not None
                finish = reduce_statement(writer, statement, self.r.numel, self.blocks.rblock)
                unfinished.append((statement, finish))
                continue
            (output,) = statement.node.outputs
            value = statement.node.body(writer, statement.index, statement.reduce_index)
            index = output.element(statement.index)
            if output.name in statement.stored:
                writer.store(output.name, index, value)
            writer.keep(output.name, index, value, to_end_of_point=not sweep.over_reduce_axes)
        if looping:
            lines = writer.end_loop()
            head = ["rindex = roffset + rbase", *["rmask = rindex < size1"] * self.has_rmask]
            stages = self.blocks.loop_stages
            steps = "range(0, size1, RBLOCK)" if stages == 1 else f"tl.range(0, size1, RBLOCK, num_stages={stages})"
            writer.point_lines.append(f"for roffset in {steps}:")
            writer.point_lines += [f"    {line}" for line in (*head, *lines)]
        writer.in_reduce_sweep = False
        for statement, finish in unfinished:
            for output, result in zip(statement.node.outputs, finish(), strict=True):
                index = output.element(statement.index)
                if output.name in statement.stored:
                    writer.store(output.name, index, result)
                writer.keep(output.name, index, result, to_end_of_point=True)


def _emit_foreach(kernel: Kernel, plan: _Plan, row_scalars: frozenset[str]) -> EmittedKernel:
    if any(map(is_tracked, (plan.x.numel, plan.r.numel if plan.r else 0))):
        raise ValueError("foreach: which program works on which row is laid out ahead; sizes must be numbers")
    arguments = name_arguments(kernel)
    shared = [(name, kind) for name, kind in kernel.scalars if name not in row_scalars]
    own = [(name, kind) for name, kind in kernel.scalars if name in row_scalars]
    scalar_of = {name: f"scalar{i}" for i, (name, _) in enumerate(shared)}
    scalar_of |= {name: f"row_scalar{i}" for i, (name, _) in enumerate(own)}
    names = [arguments.pointer_of[buffer.name] for buffer in arguments.buffers]
    sizes = ("size0", "size1") if plan.r else ("size0",)
    narrow = ".to(tl.int32)" if plan.index_dtype == "tl.int32" else ""
    lines = [
        "program = tl.program_id(0)",
        f"row_ptr = table_ptr + tl.load(blocks_ptr + 2 * program) * {len(names) + len(sizes) + len(own)}",
        f"start = tl.multiple_of(tl.load(blocks_ptr + 2 * program + 1){narrow}, XBLOCK)",
        *(f"{name}_address = tl.load(row_ptr + {i})" for i, name in enumerate(names)),
        *(f"{size} = tl.load(row_ptr + {i}){narrow}" for i, size in enumerate(sizes, len(names))),
    ]
    for i, (_, kind) in enumerate(own, len(names) + len(sizes)):
        cast = ".to(tl.float64, bitcast=True)" if kind is float else ""
        lines.append(f"row_scalar{i - len(names) - len(sizes)} = tl.load(row_ptr + {i}){cast}")
    lines += [*plan.xindex("start"), *plan.rindex()]
    lines.append(f"alignment = ({' | '.join(f'{name}_address' for name in names)}) & 15")
    whole = "(alignment == 0) & (start + XBLOCK <= size0)" if plan.blocks.xblock > 1 else "alignment == 0"
    for masked, head in ((False, f"if {whole}:"), (True, "else:")):
        writer = plan.writer(arguments.pointer_of, scalar_of, masked=masked)
        inside = ["xmask = xindex < size0"] * (masked and plan.blocks.xblock > 1)
        for name, buffer in zip(names, arguments.buffers, strict=True):
            pointer = f"{name}_address.to(tl.pointer_type({memory_dtype(buffer.dtype)}))"
            inside.append(f"{name} = {pointer if masked else f'tl.multiple_of({pointer}, 16)'}")
        lines += [head, *(f"    {line}" for line in (*inside, *plan.write_body(writer)))]
    entry = plan.entry()
    shared_parameters = [f"{scalar_of[name]}: {SCALAR_TYPE[kind]}" for name, kind in shared]
    constexprs = [f"{name}: tl.constexpr" for name, _ in plan.blocks.options() if name.isupper()]
    parameters = ["table_ptr", "blocks_ptr", *shared_parameters, *constexprs]
    if markers_in("\n".join(lines)):
        raise ValueError("foreach: sizes of the program in the text of a kernel are arguments of one launch")
    text = _module_text(entry, parameters, [scalar_of[name] for name, _ in shared], lines)
    source = KernelSource(
        "triton", entry, text, tuple(buffer.dtype for buffer in arguments.buffers), tuple(kind for _, kind in shared),
        len(sizes), foreach=True, row_scalars=tuple(kind for _, kind in own), options=plan.blocks.options(),
    )  # fmt: skip
    return EmittedKernel(
        source,
        tuple(buffer.name for buffer in arguments.buffers),
        tuple(name for name, _ in shared),
        (plan.x.numel, plan.r.numel) if plan.r else (plan.x.numel,),
        tuple(name for name, _ in own),
    )


def _module_text(entry: str, parameters: list[str], plain: list[str], body: list[str]) -> str:
    """The module of one kernel. `plain` parameters are not specialised on their value."""
    decorator = f"@triton.jit(do_not_specialize={plain!r})" if plain else "@triton.jit"
    function = f"def {entry}({', '.join(parameters)}):\n" + "\n".join(f"    {line}" for line in body) + "\n"
    helpers = _helpers_used(function)
    parts = ["import triton\nimport triton.language as tl\n"]
    if any("libdevice." in part for part in (function, *helpers)):
        parts.append(_LIBDEVICE)
    parts += [f"\n@triton.jit\n{helper}\n" for helper in helpers]
    return "\n".join([*parts, f"\n{decorator}\n{function}"])


_WORD = re.compile(r"[A-Za-z_]\w*")


@cache
def _prelude() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Helper functions by name: (source, names of the helpers it calls)."""
    text = Path(__file__).with_name("triton_prelude.py").read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    sources = {node.name: ast.get_source_segment(text, node) or "" for node in found}
    return {name: (source, tuple(set(_WORD.findall(source)) & (sources.keys() - {name})))
            for name, source in sources.items()}  # fmt: skip


def _helpers_used(function: str) -> list[str]:
    """Sources of the helpers that a function names, with what those call, in the prelude's order."""
    prelude = _prelude()
    wanted = list(set(_WORD.findall(function)) & prelude.keys())
    seen: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in seen:
            seen.add(name)
            wanted.extend(prelude[name][1])
    return [prelude[name][0] for name in prelude if name in seen]
