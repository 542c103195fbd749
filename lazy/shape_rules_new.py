"""Geometry of copies and of tensors made from nothing, from sizes, or in the likeness of another.

Invariant: a likeness is sure where its model is dense: then it has the model's strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.shape_rules import Result, plain, rule
from torchlazy.lazy.shape_rules_pointwise import REALS
from torchlazy.lazy.shape_strides import broadcast, is_dense

_KEEPING = (None, torch.preserve_format)


def _alike(model: Geometry, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> Result | None:
    if type(model) is not Geometry:
        return None  # torch takes a number for a tensor: functional transforms do so
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
    """torch's meta kernels of these count as collectives that nobody waits for, of which it warns at exit."""
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
