"""The code generators by name, and which one serves a device.

Invariant: every back end implements the same operators; choosing one never changes what a program means.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchlazy.inductor.codegen import cpp, numba_, triton
from torchlazy.inductor.codegen.kernel import EmittedKernel
from torchlazy.runtime.toolchain import has_cpp, has_numba, has_triton

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Backend:
    """A code generator: `emit(kernel, *, foreach, row_scalars)`, and the preludes that its text names."""

    language: str
    emit: Callable[..., EmittedKernel]
    preludes: dict[str, str]


@cache
def backend(language: str) -> Backend:
    """The back end called "cpp", "numba" or "triton"."""
    if language == "cpp":
        return Backend("cpp", cpp.emit, cpp.PRELUDES)
    if language == "numba":
        return Backend("numba", numba_.emit, {"numba": (_HERE / "numba_prelude.py").read_text()})
    if language == "triton":
        return Backend("triton", triton.emit, {})
    raise ValueError(f'no code generator is called {language!r}; there are "cpp", "numba" and "triton"')


def language_for(device: str) -> str:
    """The language for a compute device: TORCHLAZY_CPU_BACKEND if set, else C++ with a compiler, else Numba; Triton on
    CUDA. Empty where there is none."""
    if device.startswith("cuda"):
        return "triton" if has_triton() else ""
    if device != "cpu":
        return ""
    wish = os.environ.get("TORCHLAZY_CPU_BACKEND", "")
    if wish:
        return backend(wish).language
    return "cpp" if has_cpp() else "numba" if has_numba() else ""
