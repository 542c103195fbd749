"""Frames of Python that stand between an operator of a captured call and who called it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)


def is_read_by_torch() -> bool:
    """Whether torch's own Python asked for the number (a step count): it tells floats by `isinstance`."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_passing(frame):
            return frame.f_code.co_filename.startswith(_TORCH)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_passing(frame: FrameType) -> bool:
    """Whether a frame stands between an operator and who called it."""
    name = frame.f_code.co_filename
    if name.endswith("torch/_library/autograd.py"):
        return frame.f_code.co_name != "forward"  # which hands the operator's numbers to its backward, too
    return name.startswith(_OURS) or name.endswith(_PASSING)


# Python of torch that stands between an operator and who called it.
_PASSING = (
    "torch/_ops.py", "torch/overrides.py", "torch/_tensor.py", "torch/_compile.py", "utils/_python_dispatch.py",
    "_dynamo/eval_frame.py", "torch/_library/custom_ops.py",
)  # fmt: skip

__all__ = ["is_passing", "is_read_by_torch"]
