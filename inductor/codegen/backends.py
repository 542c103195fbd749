"""The code generators by name.

Invariant: every back end implements the same operators; choosing one never changes what a program means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torchlazy.inductor.codegen import cpp, numba_, triton
from torchlazy.inductor.codegen.kernel import EmittedKernel
from torchlazy.inductor.codegen.languages import language_for


@dataclass(frozen=True)
class Backend:
    """A code generator: `emit(kernel, *, foreach, row_scalars)`."""

    language: str
    emit: Callable[..., EmittedKernel]


@cache
def backend(language: str) -> Backend:
    """The back end called "cpp", "numba" or "triton"."""
    generators = {"cpp": cpp.emit, "numba": numba_.emit, "triton": triton.emit}
    if language not in generators:
        raise ValueError(f'no code generator is called {language!r}; there are "cpp", "numba" and "triton"')
    return Backend(language, generators[language])


__all__ = ["Backend", "backend", "language_for"]
