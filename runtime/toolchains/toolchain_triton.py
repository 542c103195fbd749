"""Triton kernels: compiled ahead for a target, launched through the compiled kernel with bare addresses.

Invariant: a source is a module with a @triton.jit function named `source.entry` whose parameters are the pointers, the
scalars, the sizes, then a constexpr for each upper-case name in `source.options`; the other options are Triton's
(num_warps, num_stages). The grid is ceil(first size / XBLOCK). A foreach function takes the table, the block table
(int64 [programs, 2]: row and first element), the shared scalars and the constexprs; its grid is one program a block.

A kernel has a variant for each answer to: are all pointers 16-byte aligned, which sizes are multiples of 16, does
any size need 64 bits. `bind` fixes the sizes, so that a launch looks at the pointers only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchlazy.runtime.cuda.foreach_tables import foreach_block_table
from torchlazy.runtime.errors import KernelCompileError, ToolchainMissing
from torchlazy.runtime.native.launch import DriverLaunch, LaunchShape, driver_launch, native_launcher
from torchlazy.runtime.program.program import KernelSource
from torchlazy.runtime.toolchains import triton_worker
from torchlazy.runtime.toolchains.background_priority import breathe
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, write_atomically
from torchlazy.runtime.toolchains.toolchain_cpp import available_cores
from torchlazy.runtime.toolchains.triton_crew import compile_with_crew

log = logging.getLogger("torchlazy.runtime")

Sizes = tuple[int, ...]
Launcher = Callable[..., int]

_WARP = 32
_SM90 = ("cuda", 90, _WARP)
_ENOUGH_FOR_WORKERS = 4
_DTYPES = {
    torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float32: "fp32", torch.float64: "fp64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
_compiling = threading.Lock()


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def current_device_and_stream() -> tuple[str, int]:
    """The current CUDA device and its current raw stream."""
    index = torch.cuda.current_device()
    return f"cuda:{index}", torch._C._cuda_getCurrentRawStream(index)


def load(
    group: Sequence[tuple[KernelSource, str]], cache: KernelCache
) -> tuple[dict[str, TritonKernel], list[KernelCompileError]]:
    """Modules by source key, and the sources that cannot be imported; `group` pairs each source with its prelude."""
    if not has_triton():
        raise ToolchainMissing("a Triton kernel is to be loaded and triton is not installed: pip install triton")
    target = _SM90 if is_interpreting() else current_target()
    kernels: dict[str, TritonKernel] = {}
    failures: list[KernelCompileError] = []
    for source, prelude in group:
        breathe()
        memory_key = f"triton {source.key} {target}"
        try:
            if memory_key not in cache.memory:
                cache.memory[memory_key] = TritonKernel.from_source(source, prelude, cache, target)
            kernels[source.key] = cache.memory[memory_key]
        except Exception as error:  # the generated module itself may fail in any way
            failures.append(KernelCompileError(source, f"{type(error).__name__}: {error}"))
    return kernels, failures


def compile_variants(wanted: Sequence[tuple[TritonKernel, Sequence[Sizes]]]) -> None:
    """Compile the aligned variants for these sizes; raises for the first that fails, after all have been tried."""
    _compile_side_by_side(wanted)
    failures: list[KernelCompileError] = []
    for kernel, all_sizes in wanted:
        for sizes in all_sizes:
            breathe()
            try:
                kernel.compile(sizes, aligned=True)
            except KernelCompileError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def compile_for_sm90(source: KernelSource, *, prelude: str = "", sizes: Sizes = ()) -> Any:
    """Compile for Hopper, on any machine: the `triton.compiler.CompiledKernel`, whose `asm` holds ptx and cubin."""
    with tempfile.TemporaryDirectory(prefix="torchlazy-triton-") as folder:
        kernel = TritonKernel.from_source(source, prelude, KernelCache(Path(folder)), _SM90)
        return kernel.compile(sizes or (1 << 20,) * source.sizes, aligned=True)


def current_target() -> tuple[str, Any, int]:
    """The target of the current device, in the form that `GPUTarget` takes."""
    if not torch.cuda.is_available():
        raise ToolchainMissing(
            "Triton kernels need a CUDA device and this process sees none: "
            "emit C++ or Numba, set TRITON_INTERPRET=1 before importing triton, or use compile_for_sm90 to compile only"
        )
    if torch.version.hip is None:  # as Triton says it, whose import takes long
        major, minor = torch.cuda.get_device_capability()
        return "cuda", 10 * major + minor, _WARP
    import triton

    target = triton.runtime.driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def import_triton(device: str) -> None:
    """What the first program of a process needs of Triton: half a second, and on a fresh machine a compiler's time."""
    with contextlib.suppress(Exception):  # tried again, and reported, when a program is loaded
        import triton

        with torch.cuda.device(device):
            triton.runtime.driver.active.get_current_target()
        triton_worker.prepare_cache_keys()


@dataclass(eq=False)
class TritonKernel:
    """One source loaded as a module, and its compiled variants."""

    source: KernelSource
    folder: Path  # of the kernel cache
    path: Path
    function: Any
    target: tuple[str, Any, int]
    compiled: dict[str, Any] = field(default_factory=dict)  # by job, as text
    bound: dict[tuple[str, Sizes], Launcher] = field(default_factory=dict)
    variants: dict[tuple[str, Sizes, bool], tuple[Any, LaunchShape]] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)  # constants in place of those that the compiler failed with

    @staticmethod
    def from_source(
        source: KernelSource, prelude: str, cache: KernelCache, target: tuple[str, Any, int]
    ) -> TritonKernel:
        """Write the module to the cache folder (Triton reads its source from a file) and import it."""
        path = cache.source_file("triton", source.key, f"{prelude}\n{source.text}" if prelude else source.text)
        return TritonKernel(source, cache.folder, path, triton_worker.load_function(str(path), source.entry), target)

    @property
    def constexprs(self) -> dict[str, int]:
        return {name: value for name, value in self.source.options if name.isupper()} | self.replaced

    def job(self, sizes: Sizes, *, aligned: bool) -> dict[str, Any]:
        """What to compile: a JSON value that says everything about one variant."""
        source = self.source
        scalars = ["fp64" if kind is float else "i64" for kind in source.scalars]
        if source.foreach:
            types, specialised = ["*i64", "*i64", *scalars], [0, 1]
        else:
            wide = source.dynamic or ("i64" if any(size >= 1 << 31 for size in sizes) else "i32")
            pointers = [f"*{_DTYPES[dtype]}" for dtype in source.pointers]
            types = [*pointers, *scalars, *[wide] * source.sizes]
            specialised = list(range(len(pointers))) if aligned else []
            first = len(pointers) + len(scalars)
            if source.dynamic:
                specialised += [first + number for number in source.aligned_sizes]
            else:
                specialised += [first + number for number, size in enumerate(sizes) if size % 16 == 0]
        constexprs = self.constexprs
        names = self.function.arg_names
        if len(names) != len(types) + len(constexprs):
            raise KernelCompileError(
                source, f"{source.entry} has the parameters {names}, its source declares {types} and {constexprs}"
            )
        return {
            "path": str(self.path),
            "entry": source.entry,
            "signature": dict(zip(names, types)) | dict.fromkeys(names[len(types) :], "constexpr"),
            "constexprs": constexprs,
            "aligned": specialised,
            "options": {name: value for name, value in source.options if not name.isupper()},
            "target": list(self.target),
        }

    def compile(self, sizes: Sizes, *, aligned: bool, device: str = "") -> Any:
        """One variant for one device; each device needs an object of its own, the binary is the same."""
        job = self.job(sizes, aligned=aligned)
        text = json.dumps(job)
        key = f"{device} {text}"
        with _compiling:
            if device and key not in self.compiled and f" {text}" in self.compiled:
                self.compiled[key] = self.compiled.pop(f" {text}")  # compiled ahead, for no device in particular
            if key not in self.compiled:
                self.compiled[key] = self._compiled(job)
            return self.compiled[key]

    def _compiled(self, job: dict[str, Any]) -> Any:
        """Where the compiler fails it tries other numbers of warps, then larger blocks: layouts of threads that it
        cannot convert are others there (Triton 3.6's TritonGPURemoveLayoutConversions fails on some reductions with
        many results, for about half of the combinations)."""
        failure: Exception | None = None
        warps, xblock = job["options"].get("num_warps", 4), job["constexprs"].get("XBLOCK", 0)
        blocks = (xblock, 2 * xblock, 4 * xblock) if xblock else (0,)
        for block, other in itertools.product(blocks, (warps, *(n for n in (4, 8, 2, 16, 1) if n != warps))):
            tried = job | {"options": job["options"] | {"num_warps": other}}
            if block != xblock:
                tried["constexprs"] = job["constexprs"] | {"XBLOCK": block}
            try:
                found = triton_worker.compile_job(tried, self.function)
            except Exception as error:  # any stage from the parser to ptxas
                failure = failure or error
                if "PassManager" not in str(error):  # it would be the same everywhere
                    break
                continue
            if block != xblock:
                self.replaced["XBLOCK"] = block
            return found
        raise KernelCompileError(self.source, f"{type(failure).__name__}: {failure}") from failure

    def bind(self, device: str, sizes: Sizes) -> Launcher:
        """A launcher for fixed sizes: it takes the stream, the pointers and the scalars; of a foreach kernel, where
        `sizes` are those of the rows, the stream, the table and the scalars. In the interpreter it takes no stream, and
        tensors in the place of addresses. The launcher of a dynamic kernel takes its sizes after the scalars."""
        if self.source.dynamic:
            sizes = ()
        if self.source.dynamic and (device, sizes) not in self.bound:
            self.bound[device, sizes] = (
                _interpreted_dynamic_launcher(self) if is_interpreting() else _compiled_launcher(self, device, sizes)
            )
        if (device, sizes) not in self.bound:
            self.bound[device, sizes] = (
                _interpreted_launcher(self, sizes) if is_interpreting() else _compiled_launcher(self, device, sizes)
            )
        return self.bound[device, sizes]

    def driver_launch(self, device: str, sizes: Sizes) -> DriverLaunch | None:
        """What `bind` launches, for C++; None where it is not one call of the driver."""
        if is_interpreting() or not _has_programs(self, device, sizes):
            return None
        return driver_launch(*_variant(self, device, sizes, aligned=True))


def _interpreted_dynamic_launcher(kernel: TritonKernel) -> Launcher:
    def launch(*arguments: Any) -> int:
        first = arguments[len(arguments) - kernel.source.sizes]
        grid = -(-first // kernel.constexprs["XBLOCK"])
        if grid:
            kernel.function[(grid,)](*arguments, **kernel.constexprs)
        return 0

    return launch


def _grid_and_extras(kernel: TritonKernel, device: str, sizes: Sizes) -> tuple[int, list[Any], list[Any]]:
    """The number of programs, what follows the table or pointers, and what follows the scalars."""
    xblock = kernel.constexprs["XBLOCK"]
    if kernel.source.foreach:
        blocks = foreach_block_table(sizes, xblock).to(device)
        return len(blocks), [blocks], []
    return -(-sizes[0] // xblock), [], list(sizes)


def _interpreted_launcher(kernel: TritonKernel, sizes: Sizes) -> Launcher:
    grid, before, after = _grid_and_extras(kernel, "cpu", sizes)
    pointers = 1 if kernel.source.foreach else len(kernel.source.pointers)

    def launch(*arguments: Any) -> int:
        if grid:
            values = [*arguments[:pointers], *before, *arguments[pointers:], *after]
            kernel.function[(grid,)](*values, **kernel.constexprs)
        return 0

    return launch


def _has_programs(kernel: TritonKernel, device: str, sizes: Sizes) -> bool:
    return bool(kernel.source.dynamic) or bool(_grid_and_extras(kernel, device, sizes)[0])


def _compiled_launcher(kernel: TritonKernel, device: str, sizes: Sizes, *, aligned: bool = True) -> Launcher:
    """The launcher of one variant: one native function where that can launch it, else a function around Triton's."""
    if not _has_programs(kernel, device, sizes):
        return lambda *arguments: 0
    compiled, shape = _variant(kernel, device, sizes, aligned=aligned)
    constants = tuple(kernel.constexprs.values())
    return native_launcher(compiled, shape) or launcher_of_triton(compiled, shape, constants)


def _variant(kernel: TritonKernel, device: str, sizes: Sizes, *, aligned: bool) -> tuple[Any, LaunchShape]:
    """A loaded kernel, and what its launches are made of."""
    known = kernel.variants.get((device, sizes, aligned))
    if known is not None:
        return known
    source = kernel.source
    breathe()
    compiled = kernel.compile(sizes, aligned=aligned, device=device)  # which decides how large its blocks are
    grid, before, after = (0, [], []) if source.dynamic else _grid_and_extras(kernel, device, sizes)
    other = functools.cache(lambda: _compiled_launcher(kernel, device, sizes, aligned=False))
    shape = LaunchShape(
        pointers=1 if source.foreach else len(source.pointers),
        fixed=tuple(tensor.data_ptr() for tensor in before),
        scalars=source.scalars,
        sizes=tuple(after),
        moving_sizes=source.sizes if source.dynamic else 0,
        grid=grid,
        xblock=kernel.constexprs["XBLOCK"] if source.dynamic else 0,
        unaligned=None if source.foreach or not aligned else lambda *arguments: other()(*arguments),
        kept=tuple(before),
    )
    with torch.cuda.device(device):
        compiled._init_handles()
    kernel.variants[device, sizes, aligned] = compiled, shape
    return compiled, shape


def launcher_of_triton(compiled: Any, shape: LaunchShape, constants: tuple[int, ...]) -> Launcher:
    """A generated function: one test of the addresses, one call of Triton's launcher with what it asks for."""
    pointers = [f"p{number}" for number in range(shape.pointers)]
    scalars = [f"s{number}" for number in range(len(shape.scalars))]
    moving = [f"n{number}" for number in range(shape.moving_sizes)]
    names: dict[str, Any] = {"shape": shape, "unaligned": shape.unaligned}
    names["run"], names["function"], names["metadata"] = compiled.run, compiled.function, compiled.packed_metadata
    given = ", ".join(["stream", *pointers, *scalars, *moving])
    values = [*pointers, *map(str, shape.fixed), *scalars, *map(str, shape.sizes), *moving, *map(str, constants)]
    lines = [f"def launch({given}):"]
    if shape.xblock:
        lines += [f"    grid = -(-n0 // {shape.xblock})", "    if not grid:", "        return 0"]
    if shape.unaligned is not None:
        lines += [f"    if ({' | '.join(pointers)}) & 15:", f"        return unaligned({given})"]
    grid = "grid" if shape.xblock else shape.grid
    lines += [
        f"    run({grid}, 1, 1, stream, function, metadata, None, None, None, {', '.join(values)})",
        "    return 0",
    ]
    exec("\n".join(lines), names)
    return names["launch"]  # type: ignore[no-any-return]


def _compile_side_by_side(wanted: Sequence[tuple[TritonKernel, Sequence[Sizes]]]) -> None:
    """Let child processes fill Triton's cache."""
    jobs: dict[Path, dict[str, Any]] = {}
    for kernel, all_sizes in wanted:
        for sizes in all_sizes:
            job = kernel.job(sizes, aligned=True)
            text = json.dumps({**job, "path": kernel.path.name, "version": _triton_version()}, sort_keys=True)
            mark = kernel.folder / "triton" / f"{hashlib.sha256(text.encode()).hexdigest()}.done"
            if f" {json.dumps(job)}" not in kernel.compiled and not mark.exists():
                jobs[mark] = job
    if len(jobs) < _ENOUGH_FOR_WORKERS or available_cores() < 2:
        return
    start = time.perf_counter()
    compile_with_crew(sorted(jobs.values(), key=lambda job: -Path(job["path"]).stat().st_size))
    for mark in jobs:
        with contextlib.suppress(OSError):  # a full disk: the next process asks Triton's own cache
            write_atomically(mark, b"")
    log.info("compiled %d Triton kernels side by side, %.2f s", len(jobs), time.perf_counter() - start)


@functools.cache
def _triton_version() -> str:
    import triton

    return triton.__version__
