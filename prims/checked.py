"""`torchlazy::checked`: a tensor whose numbers must obey a condition, or an error where they are computed.

ATen's CPU kernels check some numbers that they are given (a probability lies between 0 and 1); where the recorder
decomposes such an operator, this stands for the check.

Invariant: the result is the operand's values, in fresh memory.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("torchlazy", "FRAGMENT")
_library.define("checked(Tensor x, Tensor holds, str message) -> Tensor")


def checked(x: torch.Tensor, holds: torch.Tensor, message: str) -> torch.Tensor:
    """A copy of x; RuntimeError with the message where `holds` (bool, of x's shape) is false somewhere."""
    if not holds.all():
        raise RuntimeError(message)
    return x.clone()


def _meta(x: torch.Tensor, holds: torch.Tensor, message: str) -> torch.Tensor:
    return torch.empty_like(x)


_library.impl("checked", checked, "CompositeExplicitAutograd")
_library.impl("checked", _meta, "Meta")

__all__ = ["checked"]
