"""A code generator with a bug in it: every generator adds 1 to each `exp`, and nothing else is wrong.

`python -m tests.lazy.wrong_exp script.py` runs a script under that compiler.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torchlazy.inductor.codegen import cpp_ops, numba_ops, triton_writer


def wrong_pointwise(right: Callable[..., Any]) -> Callable[..., Any]:
    """The emitter of one scalar op, wrong for `exp` alone."""

    def pointwise(self: Any, op: str, operands: tuple[Any, ...]) -> Any:
        value = right(self, op, operands)
        return right(self, "add", (value, self.constant(1.0, torch.float32))) if op == "exp" else value

    return pointwise


GENERATORS: tuple[tuple[Any, str], ...] = (
    (cpp_ops.CppOps, "pointwise"),
    (numba_ops.NumbaOps, "pointwise"),
    (triton_writer.TritonWriter, "_pointwise"),
)

if __name__ == "__main__":
    for generator, method in GENERATORS:
        setattr(generator, method, wrong_pointwise(getattr(generator, method)))
    runpy.run_path(sys.argv[1], run_name="__main__")
