"""From kernel sources to callables: looks in memory, then on disk, then compiles what is missing, all of it at once.

Invariant: `load_kernels` returns one `LoadedKernel` per source, in order, and equal sources get the same one. A kernel
that does not compile raises only after every other kernel of the call has been compiled and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchlazy.runtime import toolchain_cpp, toolchain_numba, toolchain_triton
from torchlazy.runtime.errors import KernelCompileError, UnknownPrelude
from torchlazy.runtime.kernel_cache import KernelCache
from torchlazy.runtime.program import KernelSource
from torchlazy.runtime.toolchain_cpp import has_cpp
from torchlazy.runtime.toolchain_numba import has_numba
from torchlazy.runtime.toolchain_triton import has_triton, is_interpreting

__all__ = ["LoadedKernel", "has_cpp", "has_numba", "has_triton", "load_kernels"]

_PRELUDE_MARK = "prelude: "


@dataclass(frozen=True)
class LoadedKernel:
    """A compiled kernel. Calling it runs it with plain ints and floats in the order that `KernelSource` documents.

    CPU kernels return 0 or a position in `source.index_checks`; where a table's address is expected they also take the
    table itself as `bytes`. Triton kernels run on the current CUDA stream and return 0; a foreach Triton kernel takes
    one more number at the end, the largest first size among its rows, which makes its grid. With `takes_tensors`
    (the Triton interpreter) tensors stand in the place of addresses. With `takes_stream` the bare launchers take the
    raw CUDA stream before everything else.
    """

    source: KernelSource
    launcher_for: Callable[[str], Callable[..., int]]
    takes_tensors: bool = False
    takes_stream: bool = False

    def launcher(self, device: str) -> Callable[..., int]:
        """The bare function for one device ("cpu", "cuda:0"), for callers that count nanoseconds."""
        return self.launcher_for(device)

    def __call__(self, *args: Any) -> int:
        if not self.takes_stream:
            return self.launcher_for("cpu")(*args)
        device, stream = toolchain_triton.current_device_and_stream()
        return self.launcher_for(device)(stream, *args)


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
    sources: Sequence[KernelSource], *, cache: KernelCache, preludes: Mapping[str, str] | None = None
) -> list[LoadedKernel]:
    """Compile, or take from the cache, every source; raises KernelCompileError for the first that fails."""
    wanted: dict[str, tuple[KernelSource, str]] = {}
    for source in sources:
        wanted.setdefault(source.key, (source, prelude_of(source, preludes or {})))
    loaded: dict[str, LoadedKernel] = {}
    failures: list[KernelCompileError] = []
    for language, load in (("cpp", _load_cpp), ("numba", _load_numba), ("triton", _load_triton)):
        group = [pair for pair in wanted.values() if pair[0].language == language]
        if group:
            found, failed = load(group, cache)
            loaded |= found
            failures += failed
    if failures:
        raise failures[0]
    return [loaded[source.key] for source in sources]


_Result = tuple[dict[str, LoadedKernel], list[KernelCompileError]]


def _load_cpp(group: list[tuple[KernelSource, str]], cache: KernelCache) -> _Result:
    functions, failures = toolchain_cpp.load(group, cache)
    return _plain({source.key: source for source, _ in group}, functions), failures


def _load_numba(group: list[tuple[KernelSource, str]], cache: KernelCache) -> _Result:
    functions, failures = toolchain_numba.load(group, cache)
    return _plain({source.key: source for source, _ in group}, functions), failures


def _load_triton(group: list[tuple[KernelSource, str]], cache: KernelCache) -> _Result:
    launchers, failures = toolchain_triton.load(group, cache)
    sources = {source.key: source for source, _ in group}
    tensors = is_interpreting()
    kernels = {key: LoadedKernel(sources[key], launch, tensors, not tensors) for key, launch in launchers.items()}
    return kernels, failures


def _plain(sources: Mapping[str, KernelSource], functions: Mapping[str, Callable[..., int]]) -> dict[str, LoadedKernel]:
    """Kernels whose one function serves every device that the language has: the CPU."""
    return {key: LoadedKernel(sources[key], _always(function)) for key, function in functions.items()}


def _always(function: Callable[..., int]) -> Callable[[str], Callable[..., int]]:
    return lambda device: function
