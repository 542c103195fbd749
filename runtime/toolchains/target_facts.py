"""What a compiled program depends on beside its trace: this package, torch, the toolchain, the processor or GPU.

Invariant: equal facts mean that a program made by one process may run in the other.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torchlazy.runtime.toolchains import toolchain_cpp, toolchain_triton

_PACKAGE = Path(__file__).resolve().parents[2]
_COMPILING = ("autograd", "inductor", "lazy", "prims", "runtime")

TritonTarget = tuple[str, Any, int]


@functools.cache
def package_fingerprint() -> str:
    """The version of this package and a hash of its source files: an edited compiler makes other programs."""
    digest = hashlib.sha256(toolchain_cpp.own_version().encode())
    for folder in _COMPILING:
        for parent, folders, files in os.walk(_PACKAGE / folder):
            folders.sort()
            for name in sorted(files):
                if name.endswith((".py", ".h")):
                    path = os.path.join(parent, name)
                    digest.update(f"\0{os.path.relpath(path, _PACKAGE)}\0".encode())
                    digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def versions() -> str:
    """This package's and torch's versions."""
    return f"torchlazy {toolchain_cpp.own_version()}, torch {torch.__version__}"


@functools.cache
def triton_target(device: str) -> TritonTarget | None:
    """The GPU that Triton compiles for; None where kernels are not compiled for one."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    with torch.cuda.device(device):
        return toolchain_triton.current_target()


@functools.cache
def target_facts(language: str, target: TritonTarget | None = None) -> str:
    """One text of all facts, for a language and, for Triton, the GPU."""
    facts = [package_fingerprint(), torch.__version__, platform.python_version(), language]
    if language == "cpp":
        facts.append(toolchain_cpp.target())
    elif language == "numba":
        facts += [importlib.metadata.version("numba"), toolchain_cpp.processor()]
    elif language == "triton":
        facts += [importlib.metadata.version("triton"), repr(target), str(torch.version.cuda)]
        facts.append(f"interpreter {toolchain_triton.is_interpreting()}")
    return "\n".join(facts)
