"""Hand-built kernels with their expected results, and ways to run them: in Triton's interpreter, compiled, on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchlazy.inductor.codegen.kernel import EmittedKernel
from torchlazy.inductor.codegen.triton import emit
from torchlazy.inductor.codegen.triton_choices import Blocks
from torchlazy.inductor.index import axis, axis_index
from torchlazy.inductor.ir import Axis, Buffer, Kernel, LoopNode, Statement, Sweep
from torchlazy.prims.meta import contiguous_strides
from torchlazy.runtime.cuda.foreach_tables import foreach_block_table, scalar_bits
from torchlazy.runtime.program.program import KernelSource

f32, f64, f16, bf16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
TYPE_NAME = {
    torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", f16: "fp16", bf16: "bf16", f32: "fp32", f64: "fp64",
}  # fmt: skip


def buffer(name: str, shape: Sequence[int], dtype: torch.dtype = f32, strides: Sequence[int] | None = None) -> Buffer:
    """A buffer, contiguous unless told."""
    return Buffer(name, dtype, tuple(shape), tuple(strides or contiguous_strides(tuple(shape))), "cuda:0")


@dataclass
class KernelBuilder:
    """Collects statements over x axes of `xs` and reduce axes of `rs`; sweeps start with `sweep()`."""

    xs: tuple[int, ...]
    rs: tuple[int, ...] = ()
    reads: dict[str, Buffer] = field(default_factory=dict)
    writes: dict[str, Buffer] = field(default_factory=dict)
    sweeps: list[tuple[bool, list[Statement]]] = field(default_factory=list)
    scalars: tuple[tuple[str, type], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self.x = axis_index("x", self.xs)
        self.r = axis_index("r", self.rs)

    def sweep(self, over_reduce_axes: bool) -> None:
        self.sweeps.append((over_reduce_axes, []))

    def read(self, name: str, shape: Sequence[int], dtype: torch.dtype = f32, strides: Any = None) -> Buffer:
        self.reads[name] = buffer(name, shape, dtype, strides)
        return self.reads[name]

    def point(self, out: Buffer, body: Callable[..., Any], index: Any = None, stored: bool = True) -> Buffer:
        """A pointwise statement at x (point sweep) or (x, r) (reduce sweep)."""
        over_r = self.sweeps[-1][0]
        index = index if index is not None else (*self.x, *self.r) if over_r else self.x
        node = LoopNode((out,), out.shape, lambda ops, idx, ridx: body(ops, idx))
        self._add(Statement(node, tuple(index), (), (out.name,) if stored else ()), stored)
        return out

    def reduce(self, outs: Sequence[Buffer], kind: Any, body: Callable[..., Any], stored: bool = True,
               accumulate: torch.dtype | None = f32) -> tuple[Buffer, ...]:  # fmt: skip
        node = LoopNode(tuple(outs), self.xs, body, self.rs, kind, accumulate)
        self._add(Statement(node, self.x, self.r, tuple(o.name for o in outs) if stored else ()), stored)
        return tuple(outs)

    def _add(self, statement: Statement, stored: bool) -> None:
        self.sweeps[-1][1].append(statement)
        if stored:
            self.writes.update({out.name: out for out in statement.node.outputs})

    def build(self) -> Kernel:
        axes = tuple(Axis(axis(f"x{i}", n), n) for i, n in enumerate(self.xs))
        reduce_axes = tuple(Axis(axis(f"r{i}", n), n) for i, n in enumerate(self.rs))
        sweeps = tuple(Sweep(over_r, tuple(statements)) for over_r, statements in self.sweeps)
        return Kernel(axes, reduce_axes, sweeps, tuple(self.reads.values()), tuple(self.writes.values()),
                      self.scalars, self.aliases)  # fmt: skip


@dataclass
class Case:
    """A kernel, inputs by buffer name, expected contents of written buffers, tolerances."""

    name: str
    kernel: Kernel
    inputs: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    scalars: dict[str, float | int] = field(default_factory=dict)
    blocks: Blocks | None = None
    rtol: float = 1e-5
    atol: float = 1e-6


def load_function(source: KernelSource, folder: Path) -> Any:
    """The @triton.jit function of a source, from a file, as Triton wants it."""
    path = folder / f"kernel_{source.key[:16]}.py"
    path.write_text(source.text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, source.entry)


def signature_of(source: KernelSource) -> dict[str, str]:
    """Parameter name -> Triton type, for compiling ahead."""
    header = next(line for line in source.text.splitlines() if line.startswith(f"def {source.entry}("))
    parameters = header[header.index("(") + 1 : header.rindex(")")].split(", ")
    names = [parameter.split(":")[0] for parameter in parameters]
    scalars = ["fp64" if kind is float else "i64" for kind in source.scalars]
    if source.foreach:
        kinds = ["*i64", "*i64", *scalars]
    else:
        kinds = [*(f"*{TYPE_NAME[dtype]}" for dtype in source.pointers), *scalars, *["i32"] * source.sizes]
    return {name: kinds[i] if i < len(kinds) else "constexpr" for i, name in enumerate(names)}


def compile_source(source: KernelSource, folder: Path) -> Any:
    """A cubin for an H100, made without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = load_function(source, folder)
    options = dict(source.options)
    signature = signature_of(source)
    names = list(signature)
    constants = {name: options.pop(name) for name in names if signature[name] == "constexpr"}
    attributes = {}
    for i, name in enumerate(names):
        if signature[name].startswith("*") or name.startswith("size"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    ast_source = ASTSource(function, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    return triton.compile(ast_source, target=GPUTarget("cuda", 90, 32), options=options)


def launch(emitted: EmittedKernel, tensors: dict[str, torch.Tensor], scalars: dict[str, Any], folder: Path) -> None:
    """Run through Triton's own launcher: the interpreter on CPU tensors, or the GPU."""
    source = emitted.source
    function = load_function(source, folder)
    options = dict(source.options)
    grid = (-(-emitted.sizes[0] // options["XBLOCK"]),)
    arguments = [*(tensors[name] for name in emitted.buffers), *(scalars[name] for name in emitted.scalars)]
    function[grid](*arguments, *emitted.sizes, **options)


def launch_foreach(emitted: EmittedKernel, rows: Sequence[dict[str, torch.Tensor]], scalars: dict[str, Any],
                   row_scalars: Sequence[dict[str, Any]], folder: Path,
                   sizes: Sequence[tuple[int, ...]] = ()) -> None:  # fmt: skip
    """Run a foreach kernel over rows of tensors; without `sizes` each row's is the size of its first tensor."""
    source = emitted.source
    function = load_function(source, folder)
    options = dict(source.options)
    sizes = sizes or [(row[emitted.buffers[0]].numel(),) for row in rows]
    table = [
        [*(row[name].data_ptr() for name in emitted.buffers), *size,
         *(scalar_bits(own[name], kind) for name, kind in zip(emitted.row_scalars, source.row_scalars, strict=True))]
        for row, size, own in zip(rows, sizes, row_scalars, strict=True)
    ]  # fmt: skip
    device = rows[0][emitted.buffers[0]].device
    blocks = foreach_block_table([size[0] for size in sizes], options["XBLOCK"]).to(device)
    function[(len(blocks),)](
        torch.tensor(table, dtype=torch.int64).to(device),
        blocks,
        *(scalars[name] for name in emitted.scalars),
        **options,
    )


def storage_of(meta: Buffer, value: torch.Tensor | None, device: str) -> torch.Tensor:
    """A tensor with the buffer's layout; filled with junk where nothing is given."""
    result = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=device)
    junk = torch.zeros_like(result) if meta.dtype == torch.bool else torch.full_like(result, 77)
    return result.copy_(junk if value is None else value)


def run_case(case: Case, device: str, folder: Path) -> None:
    """Emit, run, compare; raises AssertionError."""
    emitted = emit(case.kernel, blocks=case.blocks)
    metas = {b.name: b for b in (*case.kernel.reads, *case.kernel.writes)}
    tensors = {name: storage_of(meta, case.inputs.get(name), device) for name, meta in metas.items()}
    for written, read in case.kernel.aliases:
        tensors[written] = tensors[read]
    launch(emitted, tensors, case.scalars, folder)
    for name, expected in case.expected.items():
        actual = tensors[name].cpu()
        rtol, atol = case.rtol, case.atol
        if actual.dtype in (f16, bf16):  # one rounding; the interpreter truncates where a GPU rounds to nearest
            rtol, atol = 2 * torch.finfo(actual.dtype).eps, 1e-3
        try:
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{case.name}, {name}: {error}\n{emitted.source.text}") from None
