"""Templates in use: which traces a program for all sizes serves, and such a program with its sizes bound.

Invariant: a template serves a trace only if all of the trace's numbers are what its symbols say, and its guards hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchlazy.lazy.numbers import Parts
from torchlazy.lazy.unified import Matcher
from torchlazy.runtime.executor import Executable
from torchlazy.runtime.program import Program


@dataclass(eq=False)
class Template:
    """A loaded template and which traces it serves."""

    run: Executable
    program: Program
    matcher: Matcher
    holds: Any
    fallbacks: tuple[Any, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)

    def bind(self, parts: Parts) -> tuple[Any, ...] | None:
        """The scalars that a trace adds to its own: floats that moved, then symbols; None where it is not served."""
        found = self.matcher.match(parts)
        if found is None:
            return None
        symbols, floats = found
        return (*floats, *symbols) if self.holds(*symbols) else None


@dataclass(eq=False)
class BoundRun:
    """A template's program with its symbols bound: what a compiled trace runs."""

    executable: Executable
    extra: tuple[Any, ...]

    @property
    def program(self) -> Program:
        return self.executable.program

    @property
    def source(self) -> str:
        return self.executable.source

    @property
    def counts(self) -> Any:
        return self.executable.counts

    @property
    def restrides(self) -> int:
        return self.executable.restrides

    def run(self, inputs: list[Any], scalars: Sequence[Any] = ()) -> list[Any]:
        """As `Executable.run`, with the trace's own scalars."""
        return self.executable.run(inputs, [*scalars, *self.extra])

    __call__ = run
