"""libdevice for Triton's interpreter, which cannot call the real one: the same names computed by torch on the CPU.

Invariant: imported by generated kernels only under TRITON_INTERPRET=1; results agree with libdevice to a few ulp.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_UNARY: dict[str, Callable[..., Any]] = {
    "trunc": torch.trunc, "nearbyint": torch.round, "rsqrt": torch.rsqrt, "exp": torch.exp, "exp2": torch.exp2,
    "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan,
    "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh, "asinh": torch.asinh, "acosh": torch.acosh,
    "atanh": torch.atanh, "erf": torch.erf, "erfc": torch.erfc, "erfinv": torch.erfinv, "lgamma": torch.lgamma,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Any]] = {
    "pow": torch.pow, "atan2": torch.atan2, "copysign": torch.copysign, "hypot": torch.hypot,
    "nextafter": torch.nextafter, "fmod": torch.fmod,
}  # fmt: skip


def _stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of torch tensors as a function of the interpreter's tensors."""

    def call(*operands: Any) -> Any:
        pattern = operands[0] if len(operands) == 1 else operands[0] + operands[1]  # for the broadcast type
        arrays = [torch.from_numpy(np.array(operand.handle.data)) for operand in operands]
        result = function(*arrays).numpy()
        return tl.core.tensor(TensorHandle(result, operands[0].handle.dtype), pattern.type)

    return call


libdevice = SimpleNamespace(**{name: _stand_in(function) for name, function in (_UNARY | _BINARY).items()})
