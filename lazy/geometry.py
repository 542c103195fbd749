"""Interned tensor geometry: the part of a tensor that is known without its data.

Invariant: two geometries with equal facts are one object, so they compare and hash by identity on the recording path.
"""

from __future__ import annotations

import weakref

import torch
from torchlazy.prims.meta import TensorMeta, contiguous_strides


class Geometry:
    """Shape, strides, storage offset (elements), dtype, claimed device and compute device of a tensor.

    `device` is what the user sees (`lazy`, or the real device under `lazy_mode`), `compute` where the kernels run.
    """

    __slots__ = ("__weakref__", "compute", "device", "dtype", "is_plain", "meta", "numel", "offset", "shape", "strides")

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    compute: str
    numel: int
    meta: TensorMeta
    is_plain: bool  # offset 0 and row-major contiguous

    def __repr__(self) -> str:
        return f"Geometry({self.meta}, strides={self.strides}, offset={self.offset}, {self.device})"

    @property
    def span(self) -> int:
        """Elements of storage from its start that this geometry can touch."""
        if self.numel == 0:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize


_INTERNED: weakref.WeakValueDictionary[tuple[object, ...], Geometry] = weakref.WeakValueDictionary()


def geometry(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    compute: str,
) -> Geometry:
    """The one Geometry object with these facts."""
    key = (shape, strides, offset, dtype, device, compute)
    found = _INTERNED.get(key)
    if found is None:
        found = Geometry()
        found.shape, found.strides, found.offset = shape, strides, offset
        found.dtype, found.device, found.compute = dtype, device, compute
        numel = 1
        for size in shape:
            numel *= size
        found.numel = numel
        found.meta = TensorMeta(shape, dtype, strides, compute)
        found.is_plain = offset == 0 and strides == contiguous_strides(shape)
        found = _INTERNED.setdefault(key, found)
    return found


def geometry_like(tensor: torch.Tensor, device: torch.device, compute: str) -> Geometry:
    """The geometry of `tensor`, claimed to be on `device`."""
    return geometry(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, device, compute)


def base_of(geom: Geometry) -> Geometry:
    """The same geometry at storage offset 0: what a fresh storage made for it holds."""
    if geom.offset == 0:
        return geom
    return geometry(geom.shape, geom.strides, 0, geom.dtype, geom.device, geom.compute)


def flat(numel: int, dtype: torch.dtype, device: torch.device, compute: str) -> Geometry:
    """A whole storage seen as one contiguous dimension."""
    return geometry((numel,), (1,), 0, dtype, device, compute)


def overlap(a: Geometry, b: Geometry) -> bool:
    """Whether two windows on one storage may touch the same bytes (by their ranges alone)."""
    if not a.numel or not b.numel:
        return False
    return a.offset * a.dtype.itemsize < b.nbytes and b.offset * b.dtype.itemsize < a.nbytes
