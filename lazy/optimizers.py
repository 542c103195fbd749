"""Optimizers and modules on lazy tensors: foreach by default, a flush after each step, parameters that keep identity.

Invariant: nothing here changes what an optimizer does to tensors of other kinds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchlazy.lazy import uninitialized
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.tensor import LazyTensor
from torchlazy.lazy.torch_private import allow_foreach, keep_parameter_identity


def install(recorder: Recorder) -> None:
    """Flush at the end of every `optimizer.step()` and let optimizers take their foreach path."""
    allow_foreach(LazyTensor, "lazy")
    keep_parameter_identity(lambda tensor: isinstance(tensor, LazyTensor))
    uninitialized.install()

    def flush(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        recorder.cut("optimizer step")

    register_optimizer_step_post_hook(flush)
