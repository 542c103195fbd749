"""The operator `torchlazy::int8_linear`: a product of int8 tensors with scales, by oneDNN on the CPU.

oneDNN wants the weight in a layout of its own: it is packed once, and found again by the address of the plain one, so
that programs hold dense tensors alone.

Invariant: what is packed is what the weight held when `pack` was called last; whoever writes to it calls that.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

_Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_PACKED: dict[int, tuple[weakref.finalize[Any, Any], _Packed]] = {}  # by the address of the plain weight

_LIBRARY = torch.library.Library("torchlazy", "FRAGMENT")
_LIBRARY.define(
    "int8_linear(Tensor x, Tensor scale, Tensor weight, Tensor scales, Tensor? bias, ScalarType dtype) -> Tensor"
)


def _int8_linear(
    x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: Any, dtype: torch.dtype
) -> torch.Tensor:
    kept = _PACKED.get(weight.data_ptr())
    packed, zeros, zero = pack(weight) if kept is None else kept[1]
    rows = x.reshape(-1, x.shape[-1])
    is_one = rows.shape[0] == 1
    if is_one:  # for a single row oneDNN takes two to a hundred times as long as for two
        rows = rows.expand(2, -1).contiguous()
    product = torch.ops.onednn.qlinear_pointwise.tensor(
        rows, scale, zero, packed, scales, zeros, bias, 1.0, 0, dtype, "none", [], ""
    )
    return (product[:1] if is_one else product).reshape(*x.shape[:-1], weight.shape[0])


def _result(x: torch.Tensor, scale: Any, weight: torch.Tensor, scales: Any, bias: Any, dtype: torch.dtype) -> Any:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


_LIBRARY.impl("int8_linear", _int8_linear, "CPU")
torch.library.register_fake("torchlazy::int8_linear", _result, lib=_LIBRARY)


def pack(weight: torch.Tensor) -> _Packed:
    """The weight, (out_features, in_features) in int8, as oneDNN wants it; kept as long as this tensor lives."""
    address = weight.data_ptr()
    before = _PACKED.pop(address, None)
    if before is not None:
        before[0].detach()
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    found = packed, torch.zeros(weight.shape[0], dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    _PACKED[address] = weakref.finalize(weight, _PACKED.pop, address, None), found
    return found


@functools.cache
def weight_limit() -> int:
    """The largest value of a weight in int8, with either sign: 127, or 63 on this CPU. Without VNNI oneDNN adds the
    products of two pairs in 16 bits: with larger weights these sums would be cut off, and results far off."""
    most = 127
    rows, weight = torch.full((8, 256), most, dtype=torch.int8), torch.full((64, 256), most, dtype=torch.int8)
    found = _int8_linear(rows, torch.ones(()), weight, torch.ones(64), None, torch.float32)
    return most if bool((found == float(most * most * 256)).all()) else 63


__all__ = ["pack", "weight_limit"]
