"""Calls that torch's meta kernels accept and eager refuses, found from geometries alone.

Invariant: a call that is refused here is run for real, which raises eager's own error at the call; where eager accepts
it after all, nothing else is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.lazy.trace.geometry import Geometry

aten = torch.ops.aten
_NOT_COUNTED = frozenset({torch.bool, torch.uint16, torch.uint32, torch.uint64})
_MAX_DIMENSIONS = 64  # of reductions, elementwise and other operators


def _as_strided_scatter(
    x: Geometry, src: Geometry, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> bool:
    """The view has the source's sizes, and must lie within the memory of x."""
    if tuple(size) != src.shape:
        return True
    if not all(size):
        return False
    last = (x.offset if offset is None else offset) + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return last >= x.span


def _select_scatter(x: Geometry, src: Geometry, dim: int, position: int) -> bool:
    """The source has the sizes of what it replaces, here and in the next two."""
    dim %= max(1, len(x.shape))
    return src.shape != x.shape[:dim] + x.shape[dim + 1 :]


def _slice_scatter(
    x: Geometry, src: Geometry, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> bool:
    if not x.shape or step < 1:
        return True
    dim %= len(x.shape)
    count = len(range(*slice(start, end, step).indices(x.shape[dim])))
    return src.shape != (*x.shape[:dim], count, *x.shape[dim + 1 :])


def _diagonal_scatter(x: Geometry, src: Geometry, offset: int = 0, dim1: int = 0, dim2: int = 1) -> bool:
    if len(x.shape) < 2:
        return True
    first, second = dim1 % len(x.shape), dim2 % len(x.shape)
    count = max(0, min(x.shape[first] + min(offset, 0), x.shape[second] - max(offset, 0)))
    return src.shape != (*(size for i, size in enumerate(x.shape) if i not in (first, second)), count)


def _index_add(x: Geometry, dim: int, index: Geometry, source: Geometry, **_: Any) -> bool:
    """Source and x differ in size along `dim` only, where source has as many rows as there are indices."""
    if len(source.shape) != max(len(x.shape), 1) and (x.shape and source.shape):
        return True
    rows = index.numel
    if not x.shape or not source.shape:
        return source.numel != rows
    dim %= len(x.shape)
    return source.shape[dim] != rows or any(
        a != b for i, (a, b) in enumerate(zip(x.shape, source.shape, strict=True)) if i != dim
    )


def _bucketize(x: Geometry, boundaries: Geometry, **_: Any) -> bool:
    return len(boundaries.shape) != 1


def _along(x: Geometry, dim: int = -1, *_: Any, **__: Any) -> bool:
    """The dimension must exist; 0-dim tensors have one of size 1."""
    rank = max(len(x.shape), 1)
    return not -rank <= dim < rank


def _stable_sort(x: Geometry, *, dim: int = -1, **_: Any) -> bool:
    return _along(x, dim)


def _integer_power(x: Geometry, exponent: Any) -> bool:
    """Whole numbers have no negative powers."""
    whole = not x.dtype.is_floating_point and not x.dtype.is_complex
    return whole and isinstance(exponent, int) and exponent < 0


def _index_select(x: Geometry, dim: int, index: Geometry) -> bool:
    return len(index.shape) > 1 or (not x.shape and index.numel != 1)


def _select(x: Geometry, dim: int, position: int) -> bool:
    """torch 2.11 lets a position behind the last one pass."""
    if not -len(x.shape) <= dim < len(x.shape):
        return True
    return not -x.shape[dim] <= position < x.shape[dim]


def _index_copy(x: Geometry, dim: int, index: Geometry, source: Geometry) -> bool:
    """There are as many positions as rows of the source."""
    return bool(source.shape) and -len(source.shape) <= dim < len(source.shape) and index.numel != source.shape[dim]


def _index_reduce(x: Geometry, dim: int, index: Geometry, source: Geometry, *_: Any, **__: Any) -> bool:
    return _index_copy(x, dim, index, source)


def _put(x: Geometry, index: Geometry, source: Geometry, *_: Any, **__: Any) -> bool:
    """There are as many positions as values."""
    return index.numel != source.numel


def mask_rank(index: Geometry | None) -> int:
    """How many dimensions an index covers as a mask; 0 for positions and for none."""
    return len(index.shape) if index is not None and index.dtype in (torch.bool, torch.uint8) else 0


def _index_put(x: Geometry, indices: Sequence[Geometry | None], values: Geometry, *_: Any, **__: Any) -> bool:
    """A mask has the sizes of the dimensions that it covers; values broadcast to the places that positions name. They
    have the dtype of what they are written to; one value is converted."""
    if not indices or (values.dtype != x.dtype and values.numel != 1):
        return True
    axis = 0
    for index in indices:
        rank = mask_rank(index)
        if index is not None and x.shape[axis : axis + rank] != index.shape[:rank]:
            return True
        axis += max(rank, 1)
    try:
        places = _places(x, indices)
        if places is None:
            return False
        return len(values.shape) > len(places) or torch.broadcast_shapes(places, values.shape) != places
    except RuntimeError:
        return True


def _places(x: Geometry, indices: Sequence[Geometry | None]) -> tuple[int, ...] | None:
    """The sizes of what positions select; None where a mask decides them, or the positions are no such lists. The
    selected dimensions are where the positions are, or in front where slices are between these. Raises RuntimeError
    where the positions do not broadcast."""
    named = [axis for axis, index in enumerate(indices) if index is not None]
    positions = [index.shape for index in indices if index is not None and index.dtype in (torch.int64, torch.int32)]
    if len(positions) != len(named) or not named or len(indices) > len(x.shape):
        return None
    together = tuple(torch.broadcast_shapes(*positions))
    first = named[0] if named[-1] - named[0] + 1 == len(named) else 0
    rest = tuple(size for axis, size in enumerate(x.shape) if axis not in named)
    return rest[:first] + together + rest[first:]


def _isin(elements: Geometry, tests: Geometry, **_: Any) -> bool:
    """A few test elements are viewed as one dimension, which must be possible without a copy; many are sorted."""
    if tests.numel >= 10 * elements.numel**0.145:
        return False
    outer = [(size, stride) for size, stride in zip(tests.shape, tests.strides, strict=True) if size != 1]
    return tests.numel > 0 and any(stride != size * inner for (_, stride), (size, inner) in itertools.pairwise(outer))


def _counted(*ends: Any, dtype: torch.dtype | None = None, **_: Any) -> bool:
    """`arange` has no kernel for these."""
    return dtype is not None and (dtype in _NOT_COUNTED or dtype.is_complex)


def _spaced(*_: Any, dtype: torch.dtype | None = None, **__: Any) -> bool:
    return dtype in _NOT_COUNTED


def _full(size: Sequence[int], value: Any, **options: Any) -> bool:
    return _number(value, **options)


def _number(value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> bool:
    """A number that the dtype does not hold is refused, unless it is a negative one that wraps."""
    if type(value) is bool or isinstance(value, torch.SymInt | torch.SymFloat):
        return False
    if dtype is None:
        dtype = torch.get_default_dtype() if type(value) is float else None
    if dtype is None:
        return False
    try:
        torch.full((1,), value, dtype=dtype, device="cpu")
    except RuntimeError:
        return True
    return False


def _elu_backward(grad: Geometry, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Geometry) -> bool:
    """Of a result computed in place nobody can tell what a negative slope made it from."""
    return bool(is_result and alpha < 0)


def _leaky_relu_backward(grad: Geometry, x: Geometry, slope: Any, is_result: bool) -> bool:
    return bool(is_result and slope < 0)


def _rrelu_backward(
    grad: Geometry, x: Geometry, noise: Geometry, lower: Any, upper: Any, training: bool, is_result: bool
) -> bool:
    return bool(is_result and not (training and upper - lower > 1e-6) and (lower + upper) / 2 < 0)


def _mean_pool(x: Geometry, *options: Any, divisor_override: int | None = None, **_: Any) -> bool:
    """The divisor, sixth of the options, may not be 0."""
    return (options[5] if len(options) > 5 else divisor_override) == 0


_CHECKS: dict[torch._ops.OpOverload, Callable[..., bool]] = {
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.index_add.default: _index_add,
    aten.index_add_.default: _index_add,
    aten.bucketize.Tensor: _bucketize,
    aten._softmax.default: _along,
    aten._log_softmax.default: _along,
    aten.sort.default: _along,
    aten.sort.stable: _stable_sort,
    aten.pow.Tensor_Scalar: _integer_power,
    aten.pow_.Scalar: _integer_power,
    aten.index_select.default: _index_select,
    aten.select.int: _select,
    aten.index_copy.default: _index_copy,
    aten.index_copy_.default: _index_copy,
    aten.index_reduce.default: _index_reduce,
    aten.index_reduce_.default: _index_reduce,
    aten.put.default: _put,
    aten.put_.default: _put,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.isin.Tensor_Tensor: _isin,
    aten.arange.default: _counted,
    aten.arange.start: _counted,
    aten.arange.start_step: _counted,
    aten.linspace.default: _spaced,
    aten.logspace.default: _spaced,
    aten.full.default: _full,
    aten.scalar_tensor.default: _number,
    aten.elu_backward.default: _elu_backward,
    aten.leaky_relu_backward.default: _leaky_relu_backward,
    aten.rrelu_with_noise_backward.default: _rrelu_backward,
    aten.avg_pool2d.default: _mean_pool,
    aten.avg_pool3d.default: _mean_pool,
}


# Operators on lists that have no kernel for some numbers; the first five have none for integers.
_LISTS_OF_FLOATS = ("frac", "lerp", "addcdiv", "pow", "norm")
_LISTS_OF_NUMBERS = (
    "erf", "ceil", "round", "lgamma", "abs", "trunc", "sign", "addcmul", "clamp_max", "clamp_min", "maximum", "minimum",
    "max",
)  # fmt: skip


def _is_list_refused(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether an operator on lists may refuse one of its tensors: meta kernels of lists ask for no dtype."""
    name = op._schema.name.removeprefix("aten::_foreach_").removesuffix("_")
    if name not in _LISTS_OF_FLOATS and name not in _LISTS_OF_NUMBERS:
        return False
    dtypes = {item.dtype for value in args if isinstance(value, (list, tuple)) for item in value if _is_tensor(item)}
    return any(
        dtype.is_complex or dtype == torch.bool or (not dtype.is_floating_point and name in _LISTS_OF_FLOATS)
        for dtype in dtypes
    )


def _is_tensor(item: Any) -> bool:
    return isinstance(item, (Geometry, torch.Tensor))


def is_refused(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether eager raises for operands of these geometries (a Geometry in place of each tensor)."""
    if any(type(value) is Geometry and len(value.shape) > _MAX_DIMENSIONS for value in args):
        return True  # some kernels accept them: running for real is right then, too
    if op._schema.name.startswith("aten::_foreach_") and _is_list_refused(op, args):
        return True
    check = _CHECKS.get(op)
    return check is not None and check(*args, **kwargs)
