"""Geometry of results from meta kernels, where those run the very code that shapes eager's results.

Fake kernels are written anew in Python for many operators, and give sizes of 1 other strides.
Invariant: what is asked of the meta device here is a view or an elementwise operator on tensors of one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torchlazy.lazy.geometry import Geometry

aten = torch.ops.aten

# Fake kernels give row-major results here; the real ones keep the memory format of this argument.
_KEEPS_FORMAT_OF: dict[torch._ops.OpOverload, int] = {aten.max_unpool2d.default: 0}


def shapes_like_eager(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], compute: str) -> bool:
    """Whether `run_on_meta` gives eager's strides for this call."""
    returns = op._schema.returns
    is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    if not is_view and torch.Tag.pointwise not in op.tags:
        return False
    return all(_is_on(compute, value) for value in (*args, *kwargs.values()))


def _is_on(compute: str, value: Any) -> bool:
    if type(value) is Geometry:
        return value.compute == compute
    if isinstance(value, (list, tuple)):
        return all(_is_on(compute, item) for item in value)
    return not isinstance(value, (torch.device, torch.Generator))


def metas(value: Any) -> Any:
    """Tensors on the meta device in the place of geometries."""
    if type(value) is Geometry:
        span = torch.empty_strided((value.span,), (1,), dtype=value.dtype, device="meta")
        return span.as_strided(value.shape, value.strides, value.offset)
    if isinstance(value, (list, tuple)):
        return [metas(item) for item in value]
    return value


def laid_out(op: torch._ops.OpOverload, result: Any, args: Any) -> Any:
    """`result` with the strides that the real kernel gives it; call it under the mode that made it."""
    position = _KEEPS_FORMAT_OF.get(op)
    if position is None or args[position].is_contiguous():
        return result
    if args[position].dim() == 4 and args[position].is_contiguous(memory_format=torch.channels_last):
        return result.contiguous(memory_format=torch.channels_last)
    return result
