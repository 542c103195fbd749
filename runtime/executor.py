"""Runs a `Program`: its steps as one generated Python function, over real tensors.

Invariant: `run` consumes its list of inputs, so memory that only the program still needs goes back after its last
reader; a donated input comes back as the output that overwrote it. Nothing of a run stays in the executable.
"""

from __future__ import annotations

import linecache
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torchlazy.runtime.cuda.foreach_launch import DeviceTables
from torchlazy.runtime.native.program_steps import native_program
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.program.code import emit_run
from torchlazy.runtime.program.program import VALUE_CHECK, Allocate, ExternCall, ForeachLaunch, Launch, Program, Step
from torchlazy.runtime.program.stages import Border, Stage, find_stages
from torchlazy.runtime.program.steps import span_bytes
from torchlazy.runtime.toolchains.kernel_cache import KernelCache
from torchlazy.runtime.toolchains.toolchain import LoadedKernel, compile_variants, load_kernels

_numbers = count()
_RUNS_IN_PYTHON = 2  # before the program is made in C++, which pays for programs that come again
_IN_CPP: weakref.WeakSet[Executable] = weakref.WeakSet()
_PLACE = "_torchlazy_place"  # of an error that a native run raised


@dataclass(frozen=True)
class ProgramCounts:
    """What one run does, known from the program alone."""

    launches: int
    foreach_launches: int
    foreach_rows: int
    extern_calls: dict[str, int]
    allocations: int
    allocated_bytes: int
    reused: int


@dataclass(frozen=True)
class StepPlaces:
    """Which steps stand where in the generated text: those of `RunCode`, its `begun` and its `calls`."""

    filename: str
    steps: tuple[Step, ...]
    begun: list[int]
    calls: dict[int, int]

    def steps_begun(self, place: TracebackType) -> tuple[Step, ...]:
        """The steps that may have begun when the function raised; `place` is where it stood."""
        line, inner = place.tb_lineno - 1, place.tb_next
        if line not in self.calls or inner is None or inner.tb_frame.f_code.co_filename != self.filename:
            return self.steps[: self.begun[line]]
        return self.steps[: self.calls[line] + self.begun[inner.tb_lineno - 1]]


def take_untold_runs() -> Iterator[tuple[Executable, int]]:
    """Programs in C++, and how often the native recorder ran each since this was last asked."""
    for executable in tuple(_IN_CPP):
        runs = 0 if executable._native is None else executable._native.take_untold()
        if runs:
            yield executable, runs


@dataclass(eq=False)
class Executable:
    """A loaded program. `source` is the generated function, which calls `border` between `stages`, if it has any."""

    program: Program
    source: str
    counts: ProgramCounts
    _function: Callable[[list[torch.Tensor], Sequence[float]], list[torch.Tensor]]
    _tables: list[DeviceTables]
    _device: int | None
    _places: StepPlaces
    _kernels: Sequence[LoadedKernel] = ()
    stages: tuple[Stage, ...] = ()
    border: Border | None = None
    _runs: int = 0
    _native: Any = None
    _asked_native: bool = False

    @property
    def native(self) -> Any:
        """The program in C++ (runtime/native/recorder/program.h); None where it has to run in Python, or the library is
        not there yet."""
        library = LIBRARY.module  # whoever records or replays natively has it compiled
        if not self._asked_native and library is not None:
            self._asked_native, self._native = True, native_program(library, self.program, self._kernels, self._device)
            _IN_CPP.add(self)
        return self._native

    def where_failed(self, error: Exception) -> tuple[Sequence[Step], Mapping[str, Any]] | None:
        """The steps that may have begun when a run raised, and the values that were held then, by name; None where the
        run had not begun."""
        found = getattr(error, _PLACE, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename != self._places.filename:
            place = place.tb_next
        return None if place is None else (self._places.steps_begun(place), place.tb_frame.f_locals)

    def _run_native(self, inputs: list[torch.Tensor], scalars: Sequence[float]) -> list[torch.Tensor]:
        try:
            return self._native.run(inputs, scalars)  # type: ignore[no-any-return]
        except Exception as error:
            held = dict(zip([name for name, _ in self.program.inputs], inputs, strict=True))
            setattr(error, _PLACE, (self.program.steps[: self._native.failed + 1], held))
            if not self._native.has_run:  # it may be that C++ alone cannot
                self._native = None
            inputs.clear()
            raise

    @property
    def device(self) -> int | None:
        """The index of the CUDA device that the program computes on; None on the CPU."""
        return self._device

    def run(self, inputs: list[torch.Tensor], scalars: Sequence[float] = ()) -> list[torch.Tensor]:
        """The outputs for these inputs, in the program's order; `inputs` is empty afterwards.

        Plain tensors in, plain tensors out: autograd, dispatch modes and function modes do not see what happens inside.
        CUDA work goes to the current stream of the program's device.
        """
        if self._device is not None and torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self.run(inputs, scalars)
        if not self._asked_native:
            self._runs += 1
            if self._runs > _RUNS_IN_PYTHON:
                _ = self.native
        function = self._function if self._native is None else self._run_native
        if self._device is not None and torch.cuda.is_current_stream_capturing():
            function = self._function  # which knows of the tables that a graph needs
        with torch._C._AutoDispatchBelowAutograd():
            if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
                with ExitStack() as stack:
                    stack.enter_context(_disable_current_modes())
                    stack.enter_context(torch._C.DisableTorchFunction())
                    return function(inputs, scalars)
            return function(inputs, scalars)

    __call__ = run

    def in_stages(self) -> Executable:
        """The same program with its stages, between which it calls `border`; this one where it has none."""
        stages = find_stages(self.program, self._places.steps)
        return load(self.program, self._kernels, stages, Border()) if len(stages) > 1 else self

    def prepare_capture(self) -> None:
        """Before a CUDA graph capture of `run`: memory for the foreach tables."""
        for table in self._tables:
            table.prepare()

    def fill_tables(self) -> None:
        """After a CUDA graph capture of `run`, and before the first replay: bring the foreach tables to the device."""
        for table in self._tables:
            table.fill_pending()


def load(
    program: Program, kernels: Sequence[LoadedKernel], stages: tuple[Stage, ...] = (), border: Border | None = None
) -> Executable:
    """Make the program runnable; `kernels[i]` is the loaded `program.kernels[i]`. It calls `border` between stages."""
    if len(kernels) != len(program.kernels):
        raise ValueError(f"load: the program has {len(program.kernels)} kernels, {len(kernels)} loaded ones were given")
    compile_variants(kernels, launched_sizes(program))
    code = emit_run(program, kernels, [stage.stop for stage in stages[:-1]], border)
    names: dict[str, Any] = code.names | {
        "window": window,
        "restride": _restride,
        "fail": _index_error_for(kernels),
    }
    filename = f"<torchlazy program {next(_numbers)}>"
    exec(compile(code.text, filename, "exec"), names)
    function = names.pop("run")
    for part in code.parts:
        del names[part]
    # Tracebacks through the program then show the generated lines.
    linecache.cache[filename] = (len(code.text), None, code.text.splitlines(keepends=True), filename)
    places = StepPlaces(filename, code.steps, code.begun, code.calls)
    executable = Executable(
        program,
        code.text,
        count_steps(program),
        function,
        code.tables,
        _cuda_device(program),
        places,
        kernels,
        stages,
        border,
    )
    weakref.finalize(executable, linecache.cache.pop, filename, None)
    return executable


def load_program(program: Program, *, cache: KernelCache, preludes: Mapping[str, str] | None = None) -> Executable:
    """`load_kernels` and `load` in one."""
    return load(program, load_kernels(program.kernels, cache=cache, preludes=preludes))


def launched_sizes(program: Program) -> dict[int, list[tuple[int, ...]]]:
    """For each kernel the sizes that it is launched with; for foreach kernels, whose sizes are data, one entry."""
    found: dict[int, dict[tuple[int, ...], None]] = {}
    for step in program.steps:
        if isinstance(step, Launch) and 0 not in step.sizes[:1]:
            found.setdefault(step.kernel, {})[step.sizes] = None
        elif isinstance(step, ForeachLaunch):
            found.setdefault(step.kernel, {})[()] = None
    return {kernel: list(sizes) for kernel, sizes in found.items()}


def count_steps(program: Program) -> ProgramCounts:
    """Static counts of one run."""
    allocates = [step for step in program.steps if isinstance(step, Allocate)]
    foreach = [step for step in program.steps if isinstance(step, ForeachLaunch)]
    fresh = [step for step in allocates if step.reuse is None]
    return ProgramCounts(
        launches=sum(isinstance(step, Launch) for step in program.steps),
        foreach_launches=len(foreach),
        foreach_rows=sum(len(step.rows) for step in foreach),
        extern_calls=dict(Counter(step.op for step in program.steps if isinstance(step, ExternCall))),
        allocations=len(fresh),
        allocated_bytes=sum(span_bytes(step.meta) for step in fresh),
        reused=len(allocates) - len(fresh),
    )


def window(
    tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, offset: int
) -> torch.Tensor:
    """The memory from the element 0 of `tensor` on, as another layout or dtype; `offset` in elements of `dtype`."""
    if tensor.dtype is dtype:
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)
    start, rest = divmod(int(tensor.storage_offset()) * tensor.itemsize, dtype.itemsize)
    if rest:
        raise RuntimeError(
            f"window: element 0 of a {tensor.dtype} tensor starts within an element of {dtype}; clone the input first"
        )
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start + offset, shape, strides)


def _restride(tensor: torch.Tensor | None, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The same values with the promised strides; no copy where the difference cannot be seen in memory."""
    if tensor is None:
        raise RuntimeError(f"a library call gave nothing where a tensor of shape {shape} was promised")
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if tensor.numel() == 0 or all(size == 1 or have == want for size, have, want in pairs):
        return tensor.as_strided(shape, strides, tensor.storage_offset())
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _index_error_for(kernels: Sequence[LoadedKernel]) -> Callable[[int, int], None]:
    def fail(kernel: int, status: int) -> None:
        checks = kernels[kernel].source.index_checks
        what = checks[status - 1] if 0 < status <= len(checks) else f"kernel {kernel}, status {status}"
        if what.startswith(VALUE_CHECK):
            raise RuntimeError(what.removeprefix(VALUE_CHECK))
        raise IndexError(f"index out of range in {what}")

    return fail


def _cuda_device(program: Program) -> int | None:
    metas = [meta for _, meta in program.inputs] + list(program.output_metas)
    metas += [step.meta for step in program.steps if isinstance(step, Allocate)]
    for meta in metas:
        if meta.device.startswith("cuda"):
            return int(meta.device.partition(":")[2] or 0)
    return None
