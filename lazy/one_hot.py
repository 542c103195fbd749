"""`one_hot` on the lazy device looks at its numbers where they are computed, not at all or at the call.

Torch compares with a range for devices whose numbers it must not read, so that a class out of range silently gives a
row of zeros. Here it is a write at one position a row, which raises eager's type of error at the cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torchlazy.lazy.recorder import Recorder

aten = torch.ops.aten
_KEEP: list[torch.library.Library] = []


def one_hot(classes: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """int64 [*classes.shape, num_classes]: 1 at each class, 0 elsewhere; -1 classes: as many as the largest needs.

    `classes` int64 of any shape. Raises RuntimeError for another dtype, at the cut for a class out of range.
    """
    if classes.dtype != torch.int64:
        raise RuntimeError(f"one_hot is only applicable to an index tensor of type LongTensor, not of {classes.dtype}")
    if num_classes <= 0 or not classes.numel():
        return aten.one_hot.default.decompose(classes, num_classes).contiguous()  # it compares: laid out as the classes
    zeros = torch.zeros((*classes.shape, num_classes), dtype=torch.int64, device=classes.device)
    return zeros.scatter(-1, classes.unsqueeze(-1), 1)


def under_a_mode(_: Any, tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`torch.nn.functional.one_hot` of any tensor inside `lazy_mode`, where torch compares, too."""
    return one_hot(tensor, num_classes)


def install(recorder: Recorder) -> None:
    """A kernel above autograd for the lazy device."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("one_hot", one_hot, "AutogradLazy")
    _KEEP.append(library)
