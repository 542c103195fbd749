"""What a captured call's Python reads of tensors: gradients, which then need a guard, and numbers, which are followed.

Invariant: every read of `.grad` from Python is seen, of ordinary and of lazy tensors; a number that torch hands over
with an expression behind it reaches the program as a number of `traced_numbers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torchlazy.lazy.traced_numbers import as_seen, node_of

_READ = torch.Tensor.grad.__get__  # type: ignore[union-attr]
# Their backward takes the logarithm of a number, which a symbol has not.
_POWERS = frozenset({torch.Tensor.__rpow__, torch.pow, torch.float_power})
_SYMBOLIC = frozenset({torch.SymFloat, torch.SymInt})


class TensorReads(TorchFunctionMode):
    """Inside, `gradients` becomes True when a tensor is asked for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ:
            self.gradients = True
        if func in _POWERS:
            args = tuple([arg if node_of(arg) is None else arg.node.taken() for arg in args])
        result = func(*args, **(kwargs or {}))
        if type(result) in _SYMBOLIC:
            return as_seen(result)
        if type(result) is list and result and type(result[0]) in _SYMBOLIC:  # Tensor.tolist
            return [as_seen(item) for item in result]
        return result
