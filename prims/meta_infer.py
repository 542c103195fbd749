"""Metadata of one ATen call without data, from torch's fake tensors.

Invariant: `infer` is a pure function of its arguments and torch's default dtype, so results are cached by them; a
runtime scalar stands in as 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torchlazy.prims.meta import ScalarMeta, TensorMeta, ValueMeta, contiguous_strides
from torchlazy.prims.size_int import is_tracked, same_sizes, value_now


def infer(overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ValueMeta:
    """The meta of `overload(*args, **kwargs)`; TensorMeta and ScalarMeta stand where tensors and runtime scalars do.

    Raises what the ATen operator would raise for such operands.
    """
    return _infer(overload, _freeze(args), _freeze(kwargs), torch.get_default_dtype())


def retrack(inferred: Any, told: Any, operands: Sequence[TensorMeta]) -> Any:
    """What torch inferred, with the tracked sizes that the primitive's own rule tells for the same numbers.

    Strides are those of the row-major layout, or of an operand, where they are so now. A promise that does not hold for
    other sizes costs a copy at run time, never a wrong value.
    """
    if isinstance(inferred, tuple):
        return tuple(retrack(a, b, operands) for a, b in zip(inferred, told, strict=True))
    if not isinstance(inferred, TensorMeta) or not isinstance(told, TensorMeta):
        return inferred
    if tuple(map(value_now, told.shape)) != inferred.shape or not any(map(is_tracked, told.shape)):
        return inferred
    layouts = [contiguous_strides(told.shape)]
    layouts += [x.strides for x in operands if x.rank == told.rank and same_sizes(x.shape, told.shape)]  # type: ignore[arg-type]
    for strides in layouts:
        if tuple(map(value_now, strides)) == inferred.strides:
            return replace(inferred, shape=told.shape, strides=strides)
    return replace(inferred, shape=told.shape)


def _freeze(value: Any) -> Any:
    """A hashable form in which 1, 1.0 and True stay apart."""
    if isinstance(value, (list, tuple)):
        return "seq", tuple(map(_freeze, value))
    if isinstance(value, dict):
        return "dict", tuple((key, _freeze(item)) for key, item in value.items())
    return type(value), value


def _thaw(frozen: Any) -> Any:
    kind, value = frozen
    if kind == "seq":
        return [_thaw(item) for item in value]
    if kind == "dict":
        return {key: _thaw(item) for key, item in value}
    if isinstance(value, TensorMeta):
        return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)
    if isinstance(value, ScalarMeta):
        return value.kind(1)
    return value


def _meta_of(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return TensorMeta(tuple(map(int, result.shape)), result.dtype, tuple(result.stride()), str(result.device))
    if isinstance(result, (list, tuple)):
        return tuple(map(_meta_of, result))
    return None


@lru_cache(maxsize=16384)
def _infer(overload: torch._ops.OpOverload, args: Any, kwargs: Any, default: torch.dtype) -> ValueMeta:
    # Below a fake factory torch's own kernel runs: a recorder's modes would take it for an operator of the program.
    with torch.no_grad(), _disable_current_modes(), FakeTensorMode():
        return _meta_of(overload(*_thaw(args), **_thaw(kwargs)))
