"""Geometry of fake quantization, forward and backward, which torch tells only by running it: results like the operand.

Invariant: operands are float32 and dense. A zero point that is out of range is an error of its value: it is raised
where it is computed.
"""

from __future__ import annotations

import torch
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.shape_rules import Result, rule
from torchlazy.lazy.shape_strides import is_dense

_ZERO_POINTS = frozenset({torch.int32, torch.float32, torch.float16})


def _like(x: Geometry, dtype: torch.dtype = torch.float32) -> Result | None:
    fits = x.dtype is torch.float32 and x.span > 0 and is_dense(x.shape, x.strides)
    return Result(x.shape, x.strides, dtype) if fits else None


def _with_mask(x: Geometry) -> tuple[Result, Result] | None:
    found, mask = _like(x), _like(x, torch.bool)
    return None if found is None or mask is None else (found, mask)


def _is_one_for_each_channel(x: Geometry, scale: Geometry, zero_point: Geometry, axis: int) -> bool:
    if not 0 <= axis < len(x.shape) or scale.dtype is not torch.float32:
        return False
    return scale.shape == zero_point.shape == (x.shape[axis],)


@rule("fake_quantize_per_tensor_affine_cachemask")
def _per_tensor(
    x: Geometry, scale: float, zero_point: int, quant_min: int, quant_max: int
) -> tuple[Result, Result] | None:
    return _with_mask(x) if quant_min <= zero_point <= quant_max else None


@rule("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def _per_tensor_by_tensors(
    x: Geometry, scale: Geometry, zero_point: Geometry, enabled: Geometry, quant_min: int, quant_max: int
) -> tuple[Result, Result] | None:
    are_numbers = all(tensor.shape in ((), (1,)) for tensor in (scale, zero_point, enabled))
    if not are_numbers or scale.dtype is not torch.float32 or zero_point.dtype is not torch.int32:
        return None
    return _with_mask(x) if quant_min <= quant_max else None


@rule("fake_quantize_per_channel_affine_cachemask")
def _per_channel(
    x: Geometry, scale: Geometry, zero_point: Geometry, axis: int, quant_min: int, quant_max: int
) -> tuple[Result, Result] | None:
    if zero_point.dtype not in _ZERO_POINTS or quant_min > quant_max:
        return None
    return _with_mask(x) if _is_one_for_each_channel(x, scale, zero_point, axis) else None


@rule("_fake_quantize_learnable_per_channel_affine")
def _learnable_per_channel(
    x: Geometry,
    scale: Geometry,
    zero_point: Geometry,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Result | None:
    if zero_point.dtype is not torch.float32 or not quant_min <= 0 <= quant_max:
        return None
    return _like(x) if _is_one_for_each_channel(x, scale, zero_point, axis) else None


@rule("_fake_quantize_learnable_per_tensor_affine")
def _learnable_per_tensor(
    x: Geometry, scale: Geometry, zero_point: Geometry, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Result | None:
    is_one = scale.shape == zero_point.shape == (1,) and {scale.dtype, zero_point.dtype} == {torch.float32}
    return _like(x) if is_one and quant_min <= 0 <= quant_max else None


@rule(
    "_fake_quantize_learnable_per_tensor_affine_backward",
    "_fake_quantize_learnable_per_channel_affine_backward",
)
def _learnable_backward(
    gradient: Geometry, x: Geometry, scale: Geometry, zero_point: Geometry, *rest: float
) -> tuple[Result, Result, Result] | None:
    found, one = _like(x), Result(scale.shape, (1,), torch.float32)
    fits = gradient.dtype is torch.float32 and gradient.shape == x.shape and scale.shape == zero_point.shape
    if found is None or not fits or len(scale.shape) != 1 or {scale.dtype, zero_point.dtype} != {torch.float32}:
        return None
    return found, one, one
