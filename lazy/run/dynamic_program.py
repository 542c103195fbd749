"""Programs for all sizes (templates) in use: which traces one serves, and such a program with its sizes bound.

Invariant: a template serves a trace only if all of the trace's numbers are what its symbols say, and its guards hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchlazy.lazy.numbers.matcher import Matcher
from torchlazy.lazy.run.hot_sizes import SizeCount, Tally
from torchlazy.lazy.trace.skeleton import DecomposedTrace
from torchlazy.runtime.executor import Executable
from torchlazy.runtime.program.program import Program


@dataclass(eq=False)
class Template:
    """A loaded template and which traces it serves."""

    run: Executable
    program: Program
    matcher: Matcher
    holds: Any
    fallbacks: tuple[Any, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def bind(self, parts: DecomposedTrace) -> tuple[Any, ...] | None:
        """The scalars that a trace adds to its own: varying floats, then symbols; None where it is not served."""
        found = self.matcher.match(parts)
        if found is None:
            return None
        symbols, floats = found
        return (*floats, *symbols) if self.holds(*symbols) else None


NativeRun: TypeAlias = tuple[Any, tuple[Any, ...], Any]
"""A program in C++, its scalars behind the trace's (one for all sizes gets these), and what gives these two anew."""


def native_of(run: Any) -> NativeRun | None:
    """What a compiled trace runs, in C++; None where it runs in Python."""
    if type(run) is BoundRun:
        return run.native()
    return (run.native, (), None) if type(run) is Executable and run.native is not None else None


@dataclass(eq=False)
class BoundRun:
    """A template's program with its symbols bound: what a compiled trace runs. Where its sizes are hot, a program
    compiled for them alone takes its place (run/hot_sizes.py)."""

    executable: Executable
    extra: tuple[Any, ...]
    count: SizeCount | None = None

    @property
    def executable_now(self) -> Executable:
        own = None if self.count is None else self.count.own
        return self.executable if own is None else own

    @property
    def program(self) -> Program:
        return self.executable_now.program

    @property
    def source(self) -> str:
        return self.executable_now.source

    @property
    def counts(self) -> Any:
        return self.executable_now.counts

    @property
    def device(self) -> int | None:
        return self.executable.device

    def native(self, runs: int = 0) -> NativeRun | None:
        """As `native_of`, having counted so many runs; None on a GPU, too."""
        count = self.count
        if count is not None:
            self._counted(count, runs)
        now = self.executable_now
        if type(now) is not Executable or now.device is not None or now.native is None:
            return None
        return now.native, self.extra if now is self.executable else (), None if count is None else self.native

    def is_overtaken(self, executable: Executable) -> bool:
        """Whether another program is to run instead of this one, after one more run of it in C++."""
        if self.count is not None:
            self._counted(self.count, 1)
        return self.executable_now is not executable

    @staticmethod
    def _counted(count: SizeCount, runs: int) -> None:
        count.runs += runs
        count.tally.runs += runs
        if count.runs >= count.next_look:
            count.look(count)

    def where_failed(self, error: Exception) -> Any:
        """As `Executable.where_failed`."""
        return self.executable_now.where_failed(error)

    def run(self, inputs: list[Any], scalars: Sequence[Any] = ()) -> list[Any]:
        """As `Executable.run`, with the trace's own scalars."""
        count = self.count
        if count is not None:
            self._counted(count, 1)
            if (own := count.own) is not None:
                return own.run(inputs, scalars)
        return self.executable.run(inputs, [*scalars, *self.extra])

    __call__ = run
