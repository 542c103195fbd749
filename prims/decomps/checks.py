"""Checks of numbers: what ATen's CPU kernels refuse is an error of the program too, where the number is computed.

Invariant: on other devices, whose kernels refuse nothing (or stop the whole process), there is no check.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torchlazy.prims import checked as _define_operator  # noqa: F401  (defines torchlazy::checked)
from torchlazy.prims import ops as P
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.value import Value, value
from torchlazy.prims.promotion import compute_dtype


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


_C_NAMES = {
    torch.uint8: "uint8_t", torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int", torch.int64: "int64_t",
    torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float",
}  # fmt: skip


def checked_number(x: Value, dtype: torch.dtype) -> Value:
    """x, of one element that is read as a number of `dtype`: it must lie in its range, or wrap into it from below 0."""
    if dtype not in _C_NAMES or x.dtype == torch.bool or x.dtype.is_complex:
        return x
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        info = torch.finfo(x.dtype) if x.dtype.is_floating_point else torch.iinfo(x.dtype)
        if info.max <= largest:
            return x
        wide = x.to(torch.float32 if compute_dtype(x.dtype) != torch.float64 else torch.float64)
        holds = abs(wide).le(largest).either(wide.isinf()).either(wide.isnan())
    else:
        target = torch.iinfo(dtype)
        low = target.min if target.min or x.dtype.is_floating_point else -target.max
        if not x.dtype.is_floating_point:
            source = torch.iinfo(x.dtype)
            if (low <= source.min and source.max <= target.max) or source.max > 2**63:
                return x
        wide = x.to(compute_dtype(x.dtype))
        holds = wide.ge(low).both(wide.le(target.max))
    return checked(x, holds, f"value cannot be converted to type {_C_NAMES[dtype]} without overflow")


@rule(torch.ops.torchlazy.checked.default)
def checked_operand(b: Builder, x: Node, holds: Node, message: str) -> Node:
    """The operator as the primitive."""
    return checked(value(b, x), value(b, holds), message).to(b.dtype(x)).node
