"""Loaded programs: what runs at a cut, without importing the compiler.

A process whose programs come from the store, or from compile workers, pays for the loader alone: SymPy, the rules and
the code generators are imported only when this process compiles, or when a caller asks for a program's earlier forms.

Invariant: a program loads the same whichever process compiled it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from torchlazy.inductor.codegen import languages
from torchlazy.lazy.deferred import DeferredModule
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.fallback import Fallback
from torchlazy.runtime import executor
from torchlazy.runtime.collector import paused_collector
from torchlazy.runtime.program import text as program_text
from torchlazy.runtime.program.program import Program
from torchlazy.runtime.program.store import StoredProgram
from torchlazy.runtime.toolchains import toolchain
from torchlazy.runtime.toolchains.kernel_cache import KernelCache

if TYPE_CHECKING:
    from torch import fx
    from torchlazy.lazy.plan.pipeline import Forms

T = TypeVar("T")
_pipeline = DeferredModule("torchlazy.lazy.plan.pipeline")
_printer = DeferredModule("torchlazy.inductor.printer")
_scheduler = DeferredModule("torchlazy.inductor.scheduler")


@dataclass(frozen=True)
class CompileOptions:
    """What a program depends on beside its trace."""

    language: str  # "cpp", "numba" or "triton"
    precision: str  # "fused" or "eager"
    recompute: str = "on"  # "on": backward rematerializes what is free inside its own kernels; "off"; a budget's text
    scalars: str = "arguments"
    """"memory": as 0-dim tensors after the other inputs, for CUDA graphs; "stages": the same, where what needs late
    inputs stays apart."""

    @property
    def in_memory(self) -> bool:
        return self.scalars != "arguments"

    @property
    def in_stages(self) -> bool:
        return self.scalars == "stages"


@dataclass(frozen=True)
class Compiled:
    """A loaded program. Its earlier forms are made again on request: a program that another process compiled came
    without them, and they are large."""

    run: executor.Executable
    program: Program
    trace: CutTrace
    options: CompileOptions
    fallbacks: tuple[Fallback, ...]
    timings: dict[str, float] = field(default_factory=dict)

    @cached_property
    def forms(self) -> Forms:
        return _pipeline.forms_of(self.trace, self.options)

    @property
    def aten(self) -> fx.Graph:
        return self.forms.aten

    @property
    def prims(self) -> fx.Graph:
        return self.forms.prims

    def texts(self) -> dict[str, str]:
        """The later stages as text, for dumps and debug printing."""
        return {
            "loop_ir": _printer.print_loop_graph(self.forms.loops),
            "fusion": _scheduler.format_schedule(self.forms.schedule),
            "program": program_text.format_program(self.program),
            "memory": "\n".join((program_text.format_memory(self.program), self.forms.held)).rstrip(),
        }


def stored_form(program: Program, fallbacks: Sequence[Fallback], timings: dict[str, float]) -> StoredProgram:
    """A program as the store keeps it."""
    plain = tuple((f.op, f.reason, f.frame, f.by_choice) for f in fallbacks)
    return StoredProgram(program, plain, sum(timings.values()))


def load_stored(
    stored: StoredProgram,
    trace: CutTrace,
    options: CompileOptions,
    cache: KernelCache,
    timings: dict[str, float] | None = None,
) -> Compiled:
    """A program that another process compiled from this trace, or from one of the same structure."""
    fallbacks = tuple(Fallback(*facts) for facts in stored.fallbacks)
    return load_program(stored.program, trace, options, cache, fallbacks, dict(timings or {}))


@paused_collector()
def load_program(
    program: Program,
    trace: CutTrace,
    options: CompileOptions,
    cache: KernelCache,
    fallbacks: tuple[Fallback, ...],
    timings: dict[str, float],
) -> Compiled:
    """Kernels from the cache, or compiled now, and the program as a Python function; adds the seconds to `timings`."""
    preludes = languages.preludes(options.language)
    stage = "kernels" if "kernels" not in timings else "load kernels"
    kernels = timed(timings, stage, toolchain.load_kernels, program.kernels, cache=cache, preludes=preludes)
    run = timed(timings, "load", executor.load, program, kernels)
    return Compiled(run, program, trace, options, fallbacks, timings)


def timed(timings: dict[str, float], stage: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """What `function` returns; its seconds are added to `timings[stage]`."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    timings[stage] = timings.get(stage, 0.0) + time.perf_counter() - start
    return result
