"""Interned tensor geometries: what is known of a tensor without its data.

Invariant: two geometries with equal facts are one object, so they compare and hash by identity on the recording path.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torchlazy.lazy.torch_private.dispatch import negative_view
from torchlazy.lazy.torch_private.distributed import is_distributed
from torchlazy.prims.meta import TensorMeta, contiguous_strides

CONJUGATED, NEGATED = 1, 2
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


class Geometry:
    """Shape, strides, storage offset (elements), dtype, claimed device and compute device of a tensor.

    `bits` are the lazy conjugation and negation bits (record/bit_views.py): of tensors only, never of a value in a
    trace. `device` is what the user sees (`lazy`, or the real device under `lazy_mode`), `compute` where the kernels
    run.
    """

    __slots__ = (
        "__weakref__", "_span", "bits", "compute", "device", "dtype", "is_plain", "making", "meta", "numel", "offset",
        "shape", "strides",
    )  # fmt: skip

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    compute: str
    bits: int
    numel: int
    meta: TensorMeta
    is_plain: bool  # offset 0 and row-major contiguous
    _span: int | None
    making: tuple[object, ...] | None  # arguments that make a tensor of it, once one was made (record/tensor.py)

    def __repr__(self) -> str:
        return f"Geometry({self.meta}, strides={self.strides}, offset={self.offset}, {self.device})"

    @property
    def span(self) -> int:
        """Elements of storage from its start that this geometry can touch."""
        if self._span is None:
            within = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
            self._span = self.offset if self.numel == 0 else self.offset + 1 + sum(within)
        return self._span

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
    bits: int = 0,
) -> Geometry:
    """The one Geometry object with these facts."""
    key = (shape, strides, offset, dtype, device, compute, bits)
    found = _INTERNED.get(key)
    if found is None:
        found = Geometry()
        found.shape, found.strides, found.offset = shape, strides, offset
        found.dtype, found.device, found.compute, found.bits = dtype, device, compute, bits
        numel = 1
        for size in shape:
            numel *= size
        found.numel = numel
        found.meta = TensorMeta(shape, dtype, strides, compute)
        found.is_plain = offset == 0 and strides == contiguous_strides(shape)
        found.making = None
        found._span = None
        found = _INTERNED.setdefault(key, found)
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a geometry describes the tensor's memory fully: not sparse, quantized, nested or distributed."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype not in _QUANTIZED
        and not tensor.is_nested
        and (type(tensor) is torch.Tensor or not is_distributed(tensor))
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in one storage: also true of quantized tensors, unlike sparse ones."""
    return tensor.layout is torch.strided and not is_distributed(tensor)


def kind_of(tensor: torch.Tensor) -> str:
    """What kind of tensor it is, in a word."""
    if is_distributed(tensor):
        return "distributed"
    return "nested" if tensor.is_nested else "quantized" if tensor.dtype in _QUANTIZED else str(tensor.layout)


def geometry_like(tensor: torch.Tensor, device: torch.device, compute: str) -> Geometry:
    """The geometry of `tensor`, claimed to be on `device`."""
    offset = int(tensor.storage_offset())
    return geometry(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, device, compute, bits_of(tensor))


def bits_of(tensor: torch.Tensor) -> int:
    """The lazy conjugation and negation bits of a tensor."""
    return CONJUGATED * tensor.is_conj() | NEGATED * tensor.is_neg()


def with_bits(geom: Geometry, bits: int) -> Geometry:
    """The same geometry with these bits in place of its own."""
    if geom.bits == bits:
        return geom
    return geometry(geom.shape, geom.strides, geom.offset, geom.dtype, geom.device, geom.compute, bits)


def show_bits(tensors: Sequence[torch.Tensor], bits: int) -> list[torch.Tensor]:
    """Views of the tensors with these conjugation and negation bits set."""
    found = [tensor.conj() for tensor in tensors] if bits & CONJUGATED else list(tensors)
    return [negative_view(tensor) for tensor in found] if bits & NEGATED else found


def base_of(geom: Geometry) -> Geometry:
    """The same geometry at storage offset 0: what a fresh storage made for it holds."""
    if geom.offset == 0 and not geom.bits:
        return geom
    return geometry(geom.shape, geom.strides, 0, geom.dtype, geom.device, geom.compute)


def flat(numel: int, dtype: torch.dtype, device: torch.device, compute: str) -> Geometry:
    """A whole storage seen as one contiguous dimension."""
    return geometry((numel,), (1,), 0, dtype, device, compute)


def overlap(a: Geometry, b: Geometry) -> bool:
    """Whether two views of one storage may touch the same bytes; False is certain, True where it is hard to decide."""
    if not a.numel or not b.numel:
        return False
    if a.offset * a.dtype.itemsize >= b.nbytes or b.offset * b.dtype.itemsize >= a.nbytes:
        return False
    if a.dtype.itemsize != b.dtype.itemsize:
        return True
    sized = [s for g in (a, b) for n, s in zip(g.shape, g.strides, strict=True) if n > 1 and s > 0]
    radices = sorted({1, *sized}, reverse=True)
    first, second = _digits(a, radices), _digits(b, radices)
    if first is None or second is None:
        return True
    return all(lo <= top and low <= hi for (lo, hi), (low, top) in zip(first, second, strict=True))


def overlaps_itself(geom: Geometry) -> bool:
    """Whether two elements may share memory; False is certain, True where it is hard to decide."""
    if geom.is_plain or not geom.numel:
        return False
    reach = 0  # of the dimensions with smaller strides, together
    for stride, size in sorted((s, n) for n, s in zip(geom.shape, geom.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _digits(geom: Geometry, radices: list[int]) -> list[tuple[int, int]] | None:
    """The interval of each digit of the addresses in mixed radix; None where one could carry into the next.

    Columns 0 and 1 of a matrix of 6 columns: radices 6 and 1, digits (0..3, 0..0) and (0..3, 1..1), which never meet.
    """
    found, rest = [], geom.offset
    for radix in radices:
        digit, rest = divmod(rest, radix)
        steps = sum(n - 1 for n, s in zip(geom.shape, geom.strides, strict=True) if s == radix)
        found.append((digit, digit + steps))
    below = 0
    for radix, (_, high) in zip(reversed(radices), reversed(found), strict=True):
        if below >= radix:
            return None
        below += high * radix
    return found


def check_lazy_index(device: torch.device) -> None:
    """RuntimeError for a lazy device that does not exist: there is one, "lazy" or "lazy:0"."""
    if device.index:
        raise RuntimeError(
            f"there is no device {str(device)!r}: there is one lazy device, 'lazy'; which GPU computes it is set by "
            "torchlazy.set_target"
        )


def indexed(device: torch.device) -> torch.device:
    """The device with its index, as eager's results have it: "cuda" stands for the current CUDA device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
