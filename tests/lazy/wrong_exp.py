"""A code generator with a bug in it: the CPU's generators add 1 to every `exp`, and nothing else is wrong.

`python -m tests.lazy.wrong_exp script.py` runs a script under that compiler.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torchlazy.inductor.codegen import cpp_ops, numba_ops


def wrong_pointwise(right: Callable[..., Any]) -> Callable[..., Any]:
    """The emitter of one scalar op, wrong for `exp` alone."""

    def pointwise(self: Any, op: str, operands: tuple[Any, ...]) -> Any:
        value = right(self, op, operands)
        return right(self, "add", (value, self.constant(1.0, torch.float32))) if op == "exp" else value

    return pointwise


GENERATORS = (cpp_ops.CppOps, numba_ops.NumbaOps)

if __name__ == "__main__":
    for generator in GENERATORS:
        generator.pointwise = wrong_pointwise(generator.pointwise)
    runpy.run_path(sys.argv[1], run_name="__main__")
