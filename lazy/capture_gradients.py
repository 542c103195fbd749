"""Whether a captured call's Python looks at gradients: if not, they need no guard.

Invariant: every read of `.grad` from Python is seen, of ordinary and of lazy tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READ = torch.Tensor.grad.__get__  # type: ignore[union-attr]


class GradientReads(TorchFunctionMode):
    """Inside, `seen` becomes True when a tensor is asked for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _READ:
            self.seen = True
        return func(*args, **(kwargs or {}))
