"""Geometry of Fourier transforms on a CPU with MKL: the transformed dimensions lie innermost.

Meta kernels of some releases make these results row-major. Invariant: what is returned here is what MKL's kernels
return; without MKL, and on other devices, nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchlazy.lazy.geometry import Geometry
from torchlazy.lazy.shape_rules import On, Result, rule
from torchlazy.lazy.shape_strides import Shape, dense_in_order


def _by_stride(dims: Sequence[int], strides: Shape) -> list[int]:
    """Outermost first; of equal strides the earlier one."""
    return sorted(dims, key=lambda dim: -strides[dim])


def _batches(rank: int, dims: Sequence[int]) -> list[int]:
    """The dimensions that are not transformed, in the order that counts among equal strides: the last ones fill the
    places of transformed ones before them."""
    order, first, last = list(range(rank)), 0, rank - 1
    while True:
        while first <= last and order[first] not in dims:
            first += 1
        while first < last and order[last] in dims:
            last -= 1
        if first >= last:
            return order[:first]
        order[first], order[last] = order[last], order[first]


def _transformed(shape: Shape, strides: Shape, dims: Sequence[int]) -> Shape:
    """Strides of a result of this shape: batches as they lay, then `dims`, the last of them innermost."""
    batch = _by_stride(_batches(len(shape), dims), strides)
    return dense_in_order(shape, tuple(reversed((*batch, *dims))))


def _canonical(x: Geometry, dims: Sequence[int]) -> list[int] | None:
    """Dimensions counted from 0; None where the call is not one of a result that is laid out here."""
    rank = len(x.shape)
    if not dims or not all(x.shape) or not all(-rank <= dim < rank for dim in dims):
        return None
    found = [dim % rank for dim in dims]
    return found if len(set(found)) == len(found) else None


def _is_mkl(on: On) -> bool:
    return on.is_cpu and torch.backends.mkl.is_available()


@rule("_fft_c2c", placed=True)
def _complex(x: Geometry, dims: Sequence[int], normalization: int, forward: bool, *, on: On) -> Result | None:
    found = _canonical(x, dims)
    if found is None or not x.dtype.is_complex or not _is_mkl(on):
        return None
    return Result(x.shape, _transformed(x.shape, x.strides, _by_stride(found, x.strides)), x.dtype)


@rule("_fft_r2c", placed=True)
def _from_real(x: Geometry, dims: Sequence[int], normalization: int, onesided: bool, *, on: On) -> Result | None:
    found = _canonical(x, dims)
    if found is None or x.dtype not in (torch.float32, torch.float64) or not _is_mkl(on):
        return None
    *others, last = found
    size = x.shape[last] // 2 + 1 if onesided else x.shape[last]
    shape = (*x.shape[:last], size, *x.shape[last + 1 :])
    return Result(shape, _transformed(shape, x.strides, [*_by_stride(others, x.strides), last]), x.dtype.to_complex())


@rule("_fft_c2r", placed=True)
def _to_real(x: Geometry, dims: Sequence[int], normalization: int, last_size: int, *, on: On) -> Result | None:
    found = _canonical(x, dims)
    if found is None or x.dtype not in (torch.complex64, torch.complex128) or last_size < 1 or not _is_mkl(on):
        return None
    *others, last = found
    strides = _transformed(x.shape, x.strides, _by_stride(others, x.strides)) if others else x.strides
    shape = (*x.shape[:last], last_size, *x.shape[last + 1 :])
    return Result(shape, _transformed(shape, strides, [last]), x.dtype.to_real())


__all__: list[str] = []
