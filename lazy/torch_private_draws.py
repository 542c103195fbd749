"""Private torch API for one draw from a generator. Works on torch 2.11 to 2.13."""

from __future__ import annotations

import torch


def random_number(memory: torch.Tensor, generator: torch.Generator | None) -> int:
    """What `random_` draws into this ordinary tensor of one whole number.

    Why private: the modes that are open, the user's among them, are to see nothing of it. `below_autograd` would say so
    too, at several times the cost; a training step has a draw for each dropout.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return int(memory.random_(generator=generator).item())
