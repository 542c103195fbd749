"""C++ kernels: many in one shared library, libraries compiled side by side, loaded by ctypes.

Invariant: a source defines its entry as `extern "C" ... kernel(...)`, with ` kernel(` exactly once in its text. Here
each source gets a namespace and a symbol of its own, so that sources never meet inside one translation unit.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlazy.runtime import cache_folder
from torchlazy.runtime.errors import KernelCompileError, ToolchainMissing
from torchlazy.runtime.program.program import KernelSource
from torchlazy.runtime.toolchains import compiler_run, precompiled_prelude
from torchlazy.runtime.toolchains.background_compilers import run_in_background
from torchlazy.runtime.toolchains.kernel_cache import CachedBinary, KernelCache, read_regular, symbol_of

log = logging.getLogger("torchlazy.runtime")

# -ffp-contract=off: eager rounds after each operation; -fno-math-errno lets sqrt and friends vectorise.
CPP_FLAGS: tuple[str, ...] = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-w",
)  # fmt: skip

MORE_FLAGS = tuple(shlex.split(os.environ.get("TORCHLAZY_CPP_FLAGS", "")))
"""For generated kernels, which have a prelude, and the native recorder; what is small goes without."""

# Generated kernels throw nothing and call nothing of C++'s library; g++ links without it in 14 ms of processor time
# instead of 56. `-z defs` refuses what could not be found when the library is loaded: that is then linked as ever.
PLAIN_FLAGS = ("-fno-exceptions", "-nodefaultlibs", "-Wl,-z,defs")
PLAIN_LIBRARIES = ("-lgomp", "-lm", "-lgcc", "-lc")
_LINKING = ("-shared", "-nodefaultlibs", "-Wl,-z,defs")  # flags that compile no header

# Part of every key: raise it when the way of building units changes.
_FORMAT = "cpp-3"
_KERNELS_WORTH_A_UNIT = 4
_ENTRY = re.compile(r"(?<=[ \n*&])kernel\(")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[^\n]*\n", re.MULTILINE)

Function = Callable[..., int]

loading = threading.Lock()  # held while a library is being loaded
asking = threading.Lock()  # held while a compiler is asked for its version
_versions: dict[tuple[str, ...], str | None] = {}


@dataclass(frozen=True, slots=True)
class CppCompileJob:
    """One source on its way to a function."""

    key: str
    source: KernelSource
    prelude: str

    @property
    def symbol(self) -> str:
        return symbol_of(self.key)


def has_cpp() -> bool:
    """Whether a C++ compiler is here, and answers: $CXX, g++, clang++ or c++."""
    compiler = _compiler()
    if compiler is None:
        return False
    known = _versions.get(compiler, "")  # each cut asks
    return (known if known != "" else _version(compiler)) is not None


def load(
    group: Sequence[tuple[KernelSource, str]], cache: KernelCache, *, is_background: bool = False
) -> tuple[dict[str, Function], list[KernelCompileError]]:
    """Functions by source key, and the sources that did not compile; `group` pairs each source with its prelude.

    With `is_background` no thread waits for it: the compiler gives way to others, and ends with this process.
    """
    jobs = [CppCompileJob(_disk_key(source, prelude), source, prelude) for source, prelude in group]
    functions: dict[str, Function] = {}
    missing: list[CppCompileJob] = []
    for job in jobs:
        if job.key in cache.memory:
            functions[job.source.key] = cache.memory[job.key]
        elif (binary := cache.find_binary(job.key)) and (function := _open(job, binary, cache)):
            functions[job.source.key] = function
        else:
            missing.append(job)
    if not missing:
        return functions, []
    built, failures = _build(missing, cache, is_background)
    for job in missing:
        if job.key in built:
            function = _bind_or_build(built[job.key], job, cache)
            functions[job.source.key] = cache.memory[job.key] = function
    if not is_background:
        _precompile(dict.fromkeys(job.prelude for job in missing), cache)
    cache_folder.evict_now_and_then(cache.folder)  # now that the libraries are loaded
    return functions, failures


def is_kept(source: KernelSource, cache: KernelCache) -> bool:
    """Whether `load` would find it compiled, without a prelude."""
    return cache.find_binary(_disk_key(source, "")) is not None


def _bind_or_build(binary: CachedBinary, job: CppCompileJob, cache: KernelCache) -> Function:
    """The function of a library that was just stored; compiled once more where it is gone again."""
    try:
        return _bind_or_copy(binary, job, cache)
    except OSError as error:  # another process has cleared the folder, or keeps it within a small bound
        built, failures = _build([job], cache.in_private_folder(f"what it is given is gone at once ({error})"))
        if failures:
            raise failures[0] from error
        return _bind(built[job.key], job)


def _bind_or_copy(binary: CachedBinary, job: CppCompileJob, cache: KernelCache) -> Function:
    """The function, by way of a private copy where the folder is one that nothing may be run from."""
    try:
        return _bind(binary, job)
    except OSError as error:
        content = read_regular(binary.path)
        if hashlib.sha256(content).hexdigest() != binary.path.stem:
            raise
        path = cache.in_private_folder(f"its libraries cannot be loaded ({error})").store_binary(content, [job.key])
        return _bind(CachedBinary(path, binary.symbol), job)


def _open(job: CppCompileJob, binary: CachedBinary, cache: KernelCache) -> Function | None:
    """The function of a cached library; None, with a note, where it cannot be loaded."""
    try:
        function = _bind_or_copy(binary, job, cache)
    except (OSError, AttributeError) as error:
        log.warning("kernel cache: %s does not load, its kernel is built again: %s", binary.path, error)
        return None
    cache.memory[job.key] = function
    return function


def _bind(binary: CachedBinary, job: CppCompileJob) -> Function:
    with loading:
        library = ctypes.CDLL(str(binary.path))
        function = getattr(library, binary.symbol)
        packed = getattr(library, f"{binary.symbol}{PACKED}", None)
    function.packed = ctypes.cast(packed, ctypes.c_void_p).value if packed is not None else None
    # An int64 status is read by its low half: positions in index_checks are small.
    function.restype = ctypes.c_int
    function.argtypes = argument_types(job.source)
    return function


def argument_types(source: KernelSource) -> list[Any]:
    """ctypes of the parameters, in the order documented in `KernelSource`."""
    scalars = [ctypes.c_double if kind is float else ctypes.c_int64 for kind in source.scalars]
    if source.foreach:
        return [ctypes.c_void_p, ctypes.c_int64, *scalars]
    return [ctypes.c_void_p] * len(source.pointers) + scalars + [ctypes.c_int64] * source.sizes


def _build(
    jobs: list[CppCompileJob], cache: KernelCache, is_background: bool = False
) -> tuple[dict[str, CachedBinary], list[KernelCompileError]]:
    """Compile units side by side; a unit that fails is compiled again source by source."""
    start = time.perf_counter()
    cores = available_cores()
    units = split_into_units(jobs, cores)
    built: dict[str, CachedBinary] = {}
    failures: list[KernelCompileError] = []
    compile_unit = functools.partial(_compile, cache=cache, is_background=is_background)
    again: list[list[CppCompileJob]] = []
    for unit, (path, output) in zip(units, _side_by_side(compile_unit, units, cores), strict=True):
        if path is not None:
            built |= {job.key: CachedBinary(path, job.symbol) for job in unit}
        elif len(unit) == 1:
            failures.append(KernelCompileError(unit[0].source, output))
        elif compiler_run.has_hung((_compiler() or ("",))[0]):
            failures += [KernelCompileError(job.source, output) for job in unit]
        else:
            again += [[job] for job in unit]
    for (job,), (path, output) in zip(again, _side_by_side(compile_unit, again, cores), strict=True):
        if path is not None:
            built[job.key] = CachedBinary(path, job.symbol)
        else:
            failures.append(KernelCompileError(job.source, output))
    log.info("compiled %d C++ kernels in %d units, %.2f s", len(built), len(units), time.perf_counter() - start)
    return built, failures


def _side_by_side(
    compile_unit: Callable[[list[CppCompileJob]], tuple[Path | None, str]], units: list[list[CppCompileJob]], cores: int
) -> list[tuple[Path | None, str]]:
    if len(units) < 2:
        return list(map(compile_unit, units))
    threads: list[int] = []
    with ThreadPoolExecutor(max_workers=cores, initializer=lambda: threads.append(threading.get_ident())) as pool:
        try:
            return list(pool.map(compile_unit, units))
        except BaseException:  # Ctrl-C, which compilers in groups of their own do not get
            pool.shutdown(wait=False, cancel_futures=True)
            compiler_run.end_runs_of(threads)
            raise


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_into_units(jobs: list[CppCompileJob], cores: int) -> list[list[CppCompileJob]]:
    """Lists of about equal work, one for each core once there are more than a handful of kernels a core."""
    count = min(cores, -(-len(jobs) // _KERNELS_WORTH_A_UNIT))
    units: list[list[CppCompileJob]] = [[] for _ in range(count)]
    work = [0] * count
    for job in sorted(jobs, key=lambda job: (-len(job.source.text), job.key)):
        lightest = work.index(min(work))
        units[lightest].append(job)
        work[lightest] += len(job.source.text) + 200
    return units


def _precompile(preludes: Iterable[str], cache: KernelCache) -> None:
    """Make headers of those that this process has had parsed often enough."""
    compiler = _compiler()
    for prelude in preludes:
        if compiler is not None and _is_gnu(compiler):
            key = precompiled_prelude.key_of(prelude, target())
            if precompiled_prelude.is_wanted(prelude, key, cache):
                flags = [flag for flag in (*CPP_FLAGS, *MORE_FLAGS, *PLAIN_FLAGS) if flag not in _LINKING]
                precompiled_prelude.make(prelude, key, [*compiler, *flags], cache)


def unit_text(unit: Sequence[CppCompileJob], *, has_header: bool = False) -> str:
    """One translation unit: preludes and includes at the top, or the header that stands for them, then a namespace a
    source."""
    preludes = dict.fromkeys(job.prelude for job in unit if job.prelude)
    includes: dict[str, None] = {}
    bodies = []
    for job in unit:
        includes |= dict.fromkeys(line.strip() for line in _INCLUDE.findall(job.source.text))
        body = _INCLUDE.sub("", job.source.text)
        body, found = _ENTRY.subn(f"{job.symbol}(", body)
        if found != 1:
            raise KernelCompileError(job.source, f"` kernel(` stands {found} times in the text; it must stand once")
        if 'extern "C"' not in body:
            body = re.sub(rf"^([^\n]*\b{job.symbol}\()", r'extern "C" \1', body, flags=re.MULTILINE)
        bodies.append(f"namespace ns_{job.symbol} {{\n{body}\n}}\n{_packed(job)}")
    if has_header:
        return "\n".join([f'#include "{precompiled_prelude.NAME}"', *includes, _PACKING, *bodies])
    return "\n".join([*includes, "#include <cstdint>", *preludes, _PACKING, *bodies])


_PACKING = Path(__file__).with_name("packed_call.h").read_text()
PACKED = "_packed"


def _packed(job: CppCompileJob) -> str:
    """A kernel's second entry, which takes all arguments as an array of words: callers in C++ need no signature."""
    if not job.prelude:
        return ""
    name = f"{job.symbol}{PACKED}"
    call = f"torchlazy_packed::call(&ns_{job.symbol}::{job.symbol}, words)"
    return f'extern "C" int {name}(const int64_t* words) {{ return {call}; }}\n'


def _compile(unit: list[CppCompileJob], cache: KernelCache, is_background: bool = False) -> tuple[Path | None, str]:
    """The stored library of a unit, or None and what the compiler said."""
    compiler = _compiler()
    if compiler is None:
        raise ToolchainMissing("no C++ compiler found: install g++ or clang++, or set CXX to one")
    try:
        text = unit_text(unit)
    except KernelCompileError as error:
        return None, error.log
    with tempfile.TemporaryDirectory(prefix="torchlazy-cpp-") as folder:
        key = _lay_header(unit, compiler, Path(folder), cache)
        way = (compiler, folder, is_background, MORE_FLAGS if any(job.prelude for job in unit) else ())
        done = _compile_text(text if key is None else unit_text(unit, has_header=True), *way)
        if key is not None and done.returncode != 0:
            said, done = done.stderr, _compile_text(text, *way)
            if done.returncode == 0:
                precompiled_prelude.refuse(key, said)
        if done.returncode != 0:
            return None, f"{shlex.join(done.args)}\n{done.stderr or done.stdout or f'exit status {done.returncode}'}"
        content = Path(folder, "unit.so").read_bytes()
    return cache.store_binary(content, [job.key for job in unit]), done.stderr


def _lay_header(unit: list[CppCompileJob], compiler: tuple[str, ...], folder: Path, cache: KernelCache) -> str | None:
    """The key of the header that was laid into the folder for this unit."""
    preludes = {job.prelude for job in unit}
    if len(preludes) > 1 or not _is_gnu(compiler):
        return None
    (prelude,) = preludes
    if not precompiled_prelude.is_worth_it(prelude):
        return None
    key = precompiled_prelude.key_of(prelude, target())
    return key if precompiled_prelude.put_beside(folder, prelude, key, cache) else None


def _compile_text(
    text: str, compiler: tuple[str, ...], folder: str, is_background: bool, more: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    """The compiler's first success among the ways to link, else what it did last."""
    # A fixed relative name: the same text gives the same bytes, wherever it is compiled.
    Path(folder, "unit.cpp").write_text(text)
    for flags, libraries in _ways_to_link(compiler):
        command = [*compiler, *CPP_FLAGS, *more, *flags, "unit.cpp", "-o", "unit.so", *libraries]
        done = run_in_background(command, folder) if is_background else _run(command, folder)
        if done.returncode == 0 or compiler_run.has_hung(compiler[0]):
            break
    return done


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return compiler_run.run_compiler(command, folder, compiler_run.compile_seconds())


def _ways_to_link(compiler: tuple[str, ...]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Flags before the source and libraries after it, to be tried in turn."""
    return [*([(PLAIN_FLAGS, PLAIN_LIBRARIES)] if _is_gnu(compiler) else []), ((), ())]


def _is_gnu(compiler: tuple[str, ...]) -> bool:
    return sys.platform == "linux" and "Free Software Foundation" in (_version(compiler) or "")


def _disk_key(source: KernelSource, prelude: str) -> str:
    digest = hashlib.sha256(prelude.encode()).hexdigest()
    return hashlib.sha256("\n".join((_FORMAT, source.key, digest, target())).encode()).hexdigest()


@functools.cache
def _find_compiler(wish: str) -> tuple[str, ...] | None:
    candidates = [shlex.split(wish)] if wish else [["g++"], ["clang++"], ["c++"]]
    for command in candidates:
        if command and shutil.which(command[0]):
            return tuple(command)
    return None


def _compiler() -> tuple[str, ...] | None:
    return _find_compiler(os.environ.get("CXX", ""))


def target() -> str:
    """What beside the source decides the machine code: compiler, flags and, for -march=native, the processor."""
    compiler = _compiler()
    if compiler is None:
        raise ToolchainMissing("no C++ compiler found: install g++ or clang++, or set CXX to one")
    version = _version(compiler)
    if version is None:
        raise ToolchainMissing(f"the C++ compiler {compiler[0]} does not answer: set CXX to another one")
    flags = " ".join((*CPP_FLAGS, *MORE_FLAGS, *PLAIN_FLAGS, *PLAIN_LIBRARIES))
    return "\n".join((shlex.join(compiler), version, flags, processor(), own_version()))


def _version(compiler: tuple[str, ...]) -> str | None:
    """What it says of itself; None where it does not answer. Asked once a process, by one thread for all."""
    with asking:
        if compiler not in _versions:
            _versions[compiler] = _ask_version(compiler)
        return _versions[compiler]


def _ask_version(compiler: tuple[str, ...]) -> str | None:
    try:
        done = compiler_run.run_compiler([*compiler, "--version"], None, compiler_run.PROBE_SECONDS)
    except OSError as error:
        log.warning("the C++ compiler %s cannot be run: %s", compiler[0], error)
        return None
    if compiler_run.has_hung(compiler[0]):
        log.warning("the C++ compiler is not used: %s", done.stderr)
        return None
    return done.stdout.strip()


@functools.cache
def own_version() -> str:
    """The version of this package; part of every key on disk."""
    try:
        return importlib.metadata.version("torchlazy")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled"


@functools.cache
def processor() -> str:
    """A fingerprint of the processor's model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part")))
    return hashlib.sha256("\n".join([platform.machine(), platform.processor(), *facts]).encode()).hexdigest()
