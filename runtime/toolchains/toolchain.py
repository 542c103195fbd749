"""From kernel sources to callables: looks in memory, then on disk, then compiles what is missing, all of it at once.

Invariant: `load_kernels` returns one `LoadedKernel` per source, in order, and equal sources get the same one. A kernel
that does not compile raises only after every other kernel of the call has been compiled and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchlazy.runtime.errors import KernelCompileError, UnknownPrelude
from torchlazy.runtime.program.program import KernelSource
from torchlazy.runtime.toolchains import toolchain_cpp, toolchain_numba, toolchain_triton
from torchlazy.runtime.toolchains.kernel_cache import KernelCache
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp
from torchlazy.runtime.toolchains.toolchain_numba import has_numba
from torchlazy.runtime.toolchains.toolchain_triton import has_triton, is_interpreting

__all__ = ["LoadedKernel", "compile_variants", "has_cpp", "has_numba", "has_triton", "load_kernels"]

_PRELUDE_MARK = "prelude: "


@dataclass(frozen=True)
class LoadedKernel:
    """A compiled kernel. Calling it runs it with plain ints and floats in the order that `KernelSource` documents.

    CPU kernels return 0 or a position in `source.index_checks`; where a table's address is expected they also take the
    table itself as `bytes`. Triton kernels run on the current CUDA stream and return 0. With `takes_tensors` (the
    Triton interpreter) tensors stand in the place of addresses.

    For callers that count nanoseconds: `function` is the bare function of a CPU kernel. A Triton kernel has `triton`
    in its place: `triton.bind(device, sizes)` returns a launcher that takes the raw stream (not in the interpreter),
    then the pointers and scalars; of a foreach kernel `sizes` are those of the rows, and the launcher takes the stream,
    the table and the scalars.
    """

    source: KernelSource
    function: Callable[..., int] | None = None
    triton: toolchain_triton.TritonKernel | None = None
    takes_tensors: bool = False

    @property
    def takes_stream(self) -> bool:
        return self.triton is not None and not self.takes_tensors

    def __call__(self, *args: Any) -> int:
        if self.function is not None:
            return self.function(*args)
        if self.triton is None or self.source.foreach:
            raise TypeError(
                "a foreach Triton kernel needs its rows' sizes: call triton.bind(device, sizes), launch that"
            )
        split = len(args) if self.source.dynamic else len(args) - self.source.sizes
        if self.takes_tensors:
            return self.triton.bind("cpu", args[split:])(*args[:split])
        device, stream = toolchain_triton.current_device_and_stream()
        return self.triton.bind(device, args[split:])(stream, *args[:split])


def prelude_of(source: KernelSource, preludes: Mapping[str, str]) -> str:
    """The text that the source's first line asks for (`// prelude: cpp`, `# prelude: numba`), or nothing."""
    first = source.text.split("\n", 1)[0]
    if _PRELUDE_MARK not in first or first[:1] not in "/#":
        return ""
    name = first.split(_PRELUDE_MARK, 1)[1].strip()
    if name not in preludes:
        raise UnknownPrelude(
            f"a {source.language} kernel asks for prelude {name!r}, load_kernels was given {sorted(preludes)}: "
            f"pass preludes={{{name!r}: text}}"
        )
    return preludes[name]


def load_kernels(
    sources: Sequence[KernelSource],
    *,
    cache: KernelCache,
    preludes: Mapping[str, str] | None = None,
) -> list[LoadedKernel]:
    """Compile, or take from the cache, every source; raises KernelCompileError for the first that fails.

    Triton's code depends on the sizes too: its modules are loaded here, its variants compiled by `compile_variants`.
    """
    wanted: dict[str, tuple[KernelSource, str]] = {}
    for source in sources:
        wanted.setdefault(source.key, (source, prelude_of(source, preludes or {})))
    groups = {
        language: [pair for pair in wanted.values() if pair[0].language == language]
        for language in ("cpp", "numba", "triton")
    }
    loaded: dict[str, LoadedKernel] = {}
    failures: list[KernelCompileError] = []
    for language, load in (("cpp", toolchain_cpp.load), ("numba", toolchain_numba.load)):
        if groups[language]:
            functions, failed = load(groups[language], cache)
            loaded |= {key: LoadedKernel(wanted[key][0], function) for key, function in functions.items()}
            failures += failed
    if groups["triton"]:
        kernels, failed = toolchain_triton.load(groups["triton"], cache)
        tensors = is_interpreting()
        for key, kernel in kernels.items():
            loaded[key] = LoadedKernel(wanted[key][0], triton=kernel, takes_tensors=tensors)
        failures += failed
    if failures:
        raise failures[0]
    return [loaded[source.key] for source in sources]


def compile_variants(kernels: Sequence[LoadedKernel], sizes_of: Mapping[int, Sequence[tuple[int, ...]]]) -> None:
    """Compile what launches of kernel number k with `sizes_of[k]` need, side by side; nothing to do for CPU kernels."""
    wanted = [
        (triton, tuple(sizes_of.get(number, ())))
        for number, kernel in enumerate(kernels)
        if (triton := kernel.triton) is not None and kernel.takes_stream
    ]
    if wanted:
        toolchain_triton.compile_variants(wanted)
