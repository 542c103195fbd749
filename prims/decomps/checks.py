"""Looks at numbers: what ATen's CPU kernels refuse is an error of the program too, where the number is computed.

Invariant: on other devices, whose kernels refuse nothing (or stop the whole process), there is no check.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torchlazy.prims import checked as _define_operator  # noqa: F401  (defines torchlazy::checked)
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.value import Value, value


def checked(x: Value, holds: Value, message: str) -> Value:
    """x, with an error at run time where a condition of its shape does not hold; x itself off the CPU."""
    if x.meta.device != "cpu":
        return x
    return Value(x.b, x.b.prim(P.checked, x.node, holds.node, message=message))


def checked_divisor(divisor: Value) -> Value:
    """The divisor of a division of integers."""
    return checked(divisor, divisor.ne(0), "ZeroDivisionError")


def checked_probability(x: Value, message: str) -> Value:
    """x, which must lie in [0, 1]; a NaN does not."""
    return checked(x, x.ge(0.0).both(x.le(1.0)), message)


@rule(torch.ops.torchlazy.checked.default)
def checked_operand(b: Builder, x: Node, holds: Node, message: str) -> Node:
    """The operator as the primitive."""
    return checked(value(b, x), value(b, holds), message).to(b.dtype(x)).node
