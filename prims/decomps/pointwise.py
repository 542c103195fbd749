"""Rules of elementwise operators.

Invariant: the prims compute what ATen's CPU kernels compute, element for element: in float32 for halves, rounded once at
the end of each ATen operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import Builder, rule

aten = torch.ops.aten


@rule(aten.add.Tensor, aten.add.Scalar)
def add(b: Builder, x: Any, y: Any, alpha: Any = 1) -> fx.Node:
    """x + alpha * y"""
    (x, y), dtype = b.promote(x, y)
    if alpha != 1:
        y = b.prim(ops.mul, y, alpha)
    return b.convert(b.prim(ops.add, x, y), dtype)
