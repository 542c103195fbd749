"""Errors of the runtime. Each class documents its cause, an example and the fix.

Invariant: every message says what failed, where, and what to do about it.
"""

from __future__ import annotations

from torchlazy.runtime.program.program import KernelSource


class RuntimeLayerError(RuntimeError):
    """Base of everything that loading and running a program raises by itself."""


class ToolchainMissing(RuntimeLayerError):
    """A language's compiler is not installed.

    Cause: `load_kernels` met a C++ source on a machine without g++ or clang++, or a Triton source without triton.
    Fix: install the compiler (or point CXX at it), or emit another language: `has_cpp()`, `has_numba()` and
    `has_triton()` tell beforehand.
    """


class KernelCompileError(RuntimeLayerError):
    """The compiler refused one generated kernel.

    Cause: a fault of a code generator, or a compiler too old for what it emits.
    Example: a source that calls a function that the prelude does not define.
    Fix: read `log` beside `source.text`; the kernels compiled together with this one are not affected, they are cached.
    """

    def __init__(self, source: KernelSource, log: str):
        self.source = source
        self.log = log
        head = "\n".join(log.strip().splitlines()[:20])
        super().__init__(
            f"{source.language} kernel {source.key[:12]} does not compile\n{head}\n"
            f"where: KernelCompileError.source.text holds the generated source, .log the whole output of the compiler\n"
            f"remedy: this is a fault of the code generator or of the compiler; the program can still run eagerly"
        )


class UnknownPrelude(RuntimeLayerError):
    """A source starts with `prelude: NAME` and the caller of `load_kernels` handed over no text of that name.

    Fix: pass `preludes={"NAME": text}`.
    """


class ProgramError(RuntimeLayerError):
    """A `Program` is not well formed.

    Cause: a step reads a name that no step made, an output was freed, a launch has too few buffers.
    Fix: the step that the message prints; `program_text.format_program` shows its surroundings.
    """


class OtherVersion(ProgramError):
    """A file holds a program in the form of another torchlazy.

    Cause: a cache folder, or a file that was handed on, outlived the version that wrote it.
    Fix: none is needed for the cache, whose keys name the version: the program is compiled anew.
    """
