"""Geometry of oneDNN's recurrent layers that keep something for a backward: the kernel says how much.

Invariant: what this says was seen on zeros of the very sizes; the recorder asks once for each combination of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.shape_rules import On, Result, rule
from torchlazy.lazy.torch_private import below_autograd

_TRAIN = 15  # the position of the argument that says whether gradients are on, as `handlers.recurrent_layer` records it


@rule("mkldnn_rnn_layer", placed=True)
def _rnn_layer(*args: Any, on: On) -> tuple[Result, ...] | None:
    """Forward with gradients on; without them there is no workspace, and torch's fake kernel tells the rest."""
    if not on.is_cpu or len(args) <= _TRAIN or not args[_TRAIN]:
        return None
    try:
        with below_autograd(), torch.enable_grad():
            found = torch.ops.aten.mkldnn_rnn_layer.default(*map(_zeros, args))
    except Exception:  # eager's own error, which the caller finds
        return None
    return tuple(Result(tuple(value.shape), value.stride(), value.dtype) for value in found)


def _zeros(value: Any) -> Any:
    if type(value) is not Geometry:
        return value
    span = torch.zeros(value.span, dtype=value.dtype)
    return span.as_strided(value.shape, value.strides, value.offset)
