"""Triton kernels: compiled ahead for a target, launched through the compiled kernel with bare addresses.

Work in progress.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence

from torchlazy.runtime.errors import KernelCompileError
from torchlazy.runtime.kernel_cache import KernelCache
from torchlazy.runtime.program import KernelSource


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def current_device() -> str:
    """The current CUDA device."""
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def load(
    group: Sequence[tuple[KernelSource, str]], cache: KernelCache
) -> tuple[dict[str, Callable[[str], Callable[..., int]]], list[KernelCompileError]]:
    raise NotImplementedError
