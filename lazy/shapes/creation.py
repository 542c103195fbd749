"""Shape rules of copies, of tensors made from sizes or like another, of fake quantization and of oneDNN's RNN layers.

torch finds the result of fake quantization only by running it: it is like the operand. oneDNN's recurrent layers keep a
workspace for the backward, whose size the kernel is asked for.

Invariant: a tensor like another is sure where its model is dense: then it has the model's strides. Operands of fake
quantization are float32 and dense; a zero point that is out of range is an error of its value and is raised where it
is computed. The workspace's size was seen on zeros of the same sizes; the recorder asks once for each combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.lazy.shapes.pointwise import REALS
from torchlazy.lazy.shapes.registry import On, Result, plain, rule
from torchlazy.lazy.shapes.strides import broadcast, is_dense
from torchlazy.lazy.torch_private.dispatch import below_autograd
from torchlazy.lazy.trace.geometry import Geometry

_KEEPING = (None, torch.preserve_format)


def _alike(model: Geometry, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> Result | None:
    if type(model) is not Geometry:
        return None  # a number in place of a tensor: functional transforms pass one
    dtype = dtype or model.dtype
    if dtype not in REALS or model.dtype not in REALS:
        return None
    if memory_format is torch.contiguous_format:
        return plain(model.shape, dtype)
    if memory_format not in _KEEPING or not is_dense(model.shape, model.strides):
        return None
    return Result(model.shape, model.strides, dtype)


def _is_ordinary(layout: Any, pin_memory: Any) -> bool:
    return layout in (None, torch.strided) and not pin_memory


@rule("zeros_like", "ones_like", "empty_like")
def _likeness(
    model: Geometry, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Result | None:  # fmt: skip
    return _alike(model, dtype, memory_format) if _is_ordinary(layout, pin_memory) else None


@rule("full_like")
def _filled_likeness(
    model: Geometry, value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Result | None:  # fmt: skip
    if type(value) not in (int, float) or (dtype or model.dtype) is not torch.float32:
        return None
    return _alike(model, dtype, memory_format) if _is_ordinary(layout, pin_memory) else None


@rule("_c10d_functional::all_reduce", "_c10d_functional::broadcast", "_c10d_functional::wait_tensor")
def _from_all_processes(source: Geometry, *how: Any) -> Result | None:
    """torch's meta kernels of these count as collectives without a wait, of which torch warns at exit."""
    return _alike(source, None, None)


@rule("_to_copy")
def _cast(
    source: Geometry, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> Result | None:  # fmt: skip
    return _alike(source, dtype, memory_format) if _is_ordinary(layout, pin_memory) else None


@rule("clone")
def _clone(source: Geometry, *, memory_format: Any = None) -> Result | None:
    return _alike(source, None, memory_format)


@rule("copy")
def _copied_into(target: Geometry, source: Geometry, non_blocking: bool = False) -> Result | None:
    """A tensor like the target that holds the source."""
    if source.dtype not in REALS or target.offset or broadcast((target.shape, source.shape)) != target.shape:
        return None
    return _alike(target, None, None)


@rule("fill.Scalar")
def _filled(target: Geometry, value: Any) -> Result | None:
    if type(value) not in (int, float) or target.dtype is not torch.float32:
        return None
    return _alike(target, None, None)


@rule("zero")
def _zeroed(target: Geometry) -> Result | None:
    return _alike(target, None, None)


def _of_size(size: Sequence[Any], dtype: torch.dtype | None) -> Result | None:
    if dtype not in REALS or any(type(n) is not int or n < 0 for n in size):
        return None
    return plain(tuple(size), dtype)


@rule("zeros", "ones", "empty.memory_format")
def _new(
    size: Sequence[int], *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Result | None:  # fmt: skip
    if memory_format not in (None, torch.contiguous_format) or not _is_ordinary(layout, pin_memory):
        return None
    return _of_size(size, dtype or torch.get_default_dtype())


@rule("full")
def _full(
    size: Sequence[int], value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Result | None:  # fmt: skip
    if type(value) not in (int, float) or not _is_ordinary(layout, pin_memory):
        return None
    if dtype not in (None, torch.float32) and not (dtype is torch.int64 and type(value) is int):
        return None
    return _of_size(size, dtype or (torch.int64 if type(value) is int else torch.get_default_dtype()))


@rule("new_zeros", "new_ones", "new_empty")
def _new_beside(
    model: Geometry, size: Sequence[int], *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Result | None:  # fmt: skip
    return _of_size(size, dtype or model.dtype) if _is_ordinary(layout, pin_memory) else None


@rule("arange")
def _counted(
    end: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Result | None:
    return _counted_from(0, end, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)


@rule("arange.start")
def _counted_from(
    start: Any, end: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Result | None:
    if type(start) is not int or type(end) is not int or end < start or not _is_ordinary(layout, pin_memory):
        return None
    if dtype not in (None, torch.int64, torch.float32) or max(abs(start), abs(end)) >= 1 << 24:
        return None
    return plain((end - start,), dtype or torch.int64)


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


_TRAIN = 15  # the position of the argument that says whether gradients are on, as `handlers.recurrent_layer` records it


@rule("mkldnn_rnn_layer", placed=True)
def _rnn_layer(*args: Any, on: On) -> tuple[Result, ...] | None:
    """Forward with gradients on; without them there is no workspace (`infer` then asks torch's fake kernel)."""
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
