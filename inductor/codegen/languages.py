"""Which language serves a device, and the preludes that generated text names: what loading a program must know.

Invariant: importing this file imports no code generator; a process that only loads programs never needs one.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

from torchlazy.runtime.toolchains.toolchain import has_cpp, has_numba, has_triton

LANGUAGES = ("cpp", "numba", "triton")
_FOLDER = Path(__file__).parent
_CPP_HEADERS = ("cpp_prelude.h", "cpp_math.h", "cpp_arith.h", "cpp_reduce.h")


@cache
def preludes(language: str) -> dict[str, str]:
    """The texts that sources of this language name as theirs; ValueError for a language that there is not."""
    if language not in LANGUAGES:
        raise ValueError(f'no code generator is called {language!r}; there are "cpp", "numba" and "triton"')
    if language == "cpp":
        return {"cpp": _cpp_prelude()}
    return {"numba": (_FOLDER / "numba_prelude.py").read_text()} if language == "numba" else {}


def _cpp_prelude() -> str:
    """Our headers as one."""
    lines = [line for header in _CPP_HEADERS for line in (_FOLDER / header).read_text().splitlines()]
    return "\n".join(line for line in lines if not line.startswith(('#include "', "#pragma once"))) + "\n"


def language_for(device: str) -> str:
    """The language for a compute device: TORCHLAZY_CPU_BACKEND if set, else C++ with a compiler, else Numba; Triton on
    CUDA. Empty where there is none; ValueError where the variable names none."""
    if device.startswith("cuda"):
        return "triton" if has_triton() else ""
    if device != "cpu":
        return ""
    wish = os.environ.get("TORCHLAZY_CPU_BACKEND", "")
    if wish:
        try:
            preludes(wish)  # is there such a language?
        except ValueError as why:
            raise ValueError(f"the environment has TORCHLAZY_CPU_BACKEND={wish!r}: {why}") from None
        return wish
    if has_cpp():
        return "cpp"
    _warn_of_no_compiler()
    return "numba" if has_numba() else ""


@cache
def _warn_of_no_compiler() -> None:
    how = (
        "compiled by Numba, anew in each process" if has_numba() else "not compiled: programs run operator by operator"
    )
    warnings.warn(
        f"torchlazy: no C++ compiler is here, so CPU kernels are {how}; install g++ or clang++, or name one in CXX "
        "(TORCHLAZY_CPU_BACKEND=numba asks for Numba without this warning)",
        RuntimeWarning,
        stacklevel=2,
    )
