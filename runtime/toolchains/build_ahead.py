"""Compile a program's kernels into the disk cache without running them: what a compile worker does at the end.

Invariant: no GPU is needed, not even for Triton kernels: the target comes as a parameter. Afterwards another process
that loads the program finds every kernel in the cache (but Numba's, which are not kept: toolchain_numba.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from torchlazy.runtime.executor import launched_sizes
from torchlazy.runtime.program.program import Program
from torchlazy.runtime.toolchains import toolchain_triton, triton_worker
from torchlazy.runtime.toolchains.kernel_cache import KernelCache
from torchlazy.runtime.toolchains.target_facts import TritonTarget
from torchlazy.runtime.toolchains.toolchain import load_kernels, prelude_of


def build_kernels(
    program: Program, *, cache: KernelCache, preludes: Mapping[str, str], target: TritonTarget | None
) -> None:
    """Compile every kernel of the program; raises KernelCompileError for the first that fails."""
    if target is None or toolchain_triton.is_interpreting():
        load_kernels(program.kernels, cache=cache, preludes=preludes)
        return
    load_kernels([source for source in program.kernels if source.language != "triton"], cache=cache, preludes=preludes)
    sizes = launched_sizes(program)
    wanted = []
    for number, source in enumerate(program.kernels):
        if source.language == "triton":
            kernel = toolchain_triton.TritonKernel.from_source(source, prelude_of(source, preludes), cache, target)
            wanted.append((kernel, tuple(sizes.get(number, ()))))
    toolchain_triton.compile_variants(wanted)
    for kernel, _ in wanted:
        for compiled in kernel.compiled.values():
            triton_worker.build_launcher(compiled)
