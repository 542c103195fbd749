"""Eager references of the primitives, and a runner for graphs of primitives.

Invariant: one function a primitive, called with tensors and then the attributes by name; it defines the primitive's
values, and the code generators are tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx
from torchlazy.prims import random_bits as philox
from torchlazy.prims.meta import TensorMeta


def floor_div(a: Tensor, b: Tensor) -> Tensor:
    """Python's //."""
    return torch.div(a, b, rounding_mode="floor")


def trunc_div(a: Tensor, b: Tensor) -> Tensor:
    """C's / for integers."""
    return torch.div(a, b, rounding_mode="trunc")


def convert(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Tensor.to."""
    return x.to(dtype)


def checked(x: Tensor, holds: Tensor, *, message: str) -> Tensor:
    if x.device.type == "cpu" and not holds.all():
        raise RuntimeError(message)
    return x


def bitcast(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Same bits, other dtype."""
    return x.contiguous().view(dtype)


def full(*, shape: tuple[int, ...], value: Any, dtype: torch.dtype, device: str) -> Tensor:
    """One value everywhere, converted like a tensor element (an int beyond the dtype's range wraps)."""
    whole = isinstance(value, (int, torch.SymInt))  # a symbolic size stays symbolic: nothing is asked of it
    kind = torch.bool if isinstance(value, bool) else torch.int64 if whole else torch.float64
    if type(value) is int and value >= 2**63:  # numbers of uint64, which wrap in int64
        value, kind = (float(value), torch.float64) if dtype.is_floating_point else (value - 2**64, kind)
    return torch.full((), value, dtype=kind).to(dtype).to(device).expand(shape).clone()


def iota(*, length: int, start: Any, step: Any, dtype: torch.dtype, device: str) -> Tensor:
    """start + i * step, computed in `dtype`."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return (torch.arange(length, device=device).to(wide) * step + start).to(dtype)


def random_bits(*, shape: tuple[int, ...], seed: int, stream: int, device: str) -> Tensor:
    """Philox bits."""
    return philox.random_bits(shape, seed, stream, device=torch.device(device))


def reshape(x: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    """Row-major order kept."""
    return x.reshape(shape)


def permute(x: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    """Dimensions reordered."""
    return x.permute(dims)


def expand(x: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    """Sizes of 1 repeated."""
    return x.expand(shape)


def _window(starts: Sequence[int], stops: Sequence[int], steps: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in zip(starts, stops, steps, strict=True))


def slice_(x: Tensor, *, starts: tuple[int, ...], stops: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    """x[start:stop:step, ...]."""
    return x[_window(starts, stops, steps)]


def slice_scatter(
    x: Tensor, src: Tensor, *, starts: tuple[int, ...], stops: tuple[int, ...], steps: tuple[int, ...]
) -> Tensor:
    """A copy of x with the slice replaced."""
    result = x.clone()
    result[_window(starts, stops, steps)] = src
    return result


def flip(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    """Reversed along the axes."""
    return x.flip(axes)


def pad(x: Tensor, *, low: tuple[int, ...], high: tuple[int, ...], value: Any) -> Tensor:
    """Constant padding."""
    shape = [lo + size + hi for lo, size, hi in zip(low, x.shape, high, strict=True)]
    result = full(shape=tuple(shape), value=value, dtype=x.dtype, device=str(x.device))
    result[tuple(slice(lo, lo + size) for lo, size in zip(low, x.shape, strict=True))] = x
    return result


def cat(*xs: Tensor, axis: int) -> Tensor:
    """Joined along one axis; nothing of torch.cat's tolerance for empty 1-D operands is wanted here."""
    return torch.cat(xs, axis)


def as_strided(x: Tensor, *, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    """A window on x as it lies in memory."""
    return x.as_strided(shape, strides, x.storage_offset() + offset)


def as_strided_scatter(
    x: Tensor, src: Tensor, *, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Tensor:
    """A copy of x with the window replaced."""
    result = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    result.copy_(x)
    result.as_strided(shape, strides, offset).copy_(src)
    return result


def sum_(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    """Sum in the operand's dtype."""
    return x.sum(axes, dtype=x.dtype) if axes else x.clone()


def prod(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    """Product in the operand's dtype."""
    return reduce(lambda y, axis: y.prod(axis, dtype=x.dtype), sorted(axes, reverse=True), x.clone())


def amax(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    """Largest element; NaN wins."""
    return x.amax(axes) if axes else x.clone()


def amin(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    """Smallest element; NaN wins."""
    return x.amin(axes) if axes else x.clone()


def _flat(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The axes, in the order given, as one last axis."""
    kept = [i for i in range(x.dim()) if i not in axes]
    moved = x.permute(kept + list(axes))
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    return moved.reshape([x.shape[i] for i in kept] + [count])


def argmax(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    """Flat position of the first largest element; a NaN is the largest."""
    return _flat(x, axes).argmax(-1)


def argmin(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    """Flat position of the first smallest element; a NaN is the smallest."""
    return _flat(x, axes).argmin(-1)


def any_(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    """Logical or."""
    return _flat(x, axes).any(-1)


def all_(x: Tensor, *, axes: tuple[int, ...]) -> Tensor:
    """Logical and."""
    return _flat(x, axes).all(-1)


def welford(x: Tensor, *, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sum of squared deviations, count."""
    flat = _flat(x, axes)
    mean = flat.mean(-1)
    m2 = (flat - mean.unsqueeze(-1)).square().sum(-1)
    return mean, m2, torch.full_like(mean, torch.sym_float(flat.shape[-1]))


def logsumexp(x: Tensor, *, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The largest element (-inf of none), and the sum of exp(x - it), an infinite one counted as 0."""
    flat = _flat(x, axes)
    if flat.shape[-1] == 0:
        return flat.new_full(flat.shape[:-1], float("-inf")), flat.sum(-1)
    largest = flat.amax(-1)
    return largest, (flat - torch.where(largest.isinf(), 0, largest).unsqueeze(-1)).exp().sum(-1)


def _wrapped(index: Tensor, size: int) -> Tensor:
    index = index.long()
    return torch.where(index < 0, index + size, index)


def gather(x: Tensor, index: Tensor, *, axis: int, wrap: bool = True) -> Tensor:
    """x[..., index[...], ...] along one axis."""
    return torch.gather(x, axis, _wrapped(index, x.shape[axis]) if wrap else index.long())


def index(x: Tensor, *indices: Tensor, dims: tuple[int, ...], wrap: bool = True) -> Tensor:
    """Advanced indexing of adjacent dimensions."""
    if not wrap and len(indices) == 1:  # refuses negative positions by itself, without a look at the numbers here
        (only,) = indices
        found = x.index_select(dims[0], only.long().reshape(-1))
        return found.reshape((*x.shape[: dims[0]], *only.shape, *x.shape[dims[0] + 1 :]))
    if not wrap and any(bool((i < 0).any()) for i in indices):
        raise IndexError("index: a negative position is out of range")
    return x[(slice(None),) * dims[0] + tuple(i.long() for i in indices)]


class _Runner(fx.Interpreter):
    """Runs a graph and lays each value out as its metadata says: as_strided reads that layout."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if not isinstance(result, Tensor) or n.op != "call_function":
            return result
        meta: TensorMeta = n.meta["val"]
        dims = tuple(zip(meta.shape, meta.strides, strict=True))
        overlapping = any(stride == 0 and size != 1 for size, stride in dims)
        if result.stride() != meta.strides and not overlapping:
            laid_out = torch.empty_strided(meta.shape, meta.strides, dtype=result.dtype, device=result.device)
            return laid_out.copy_(result)
        return result


def run(graph: fx.Graph, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """The outputs of a graph of primitives (or of ATen) on real tensors and numbers, one operation at a time."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    return _Runner(module, garbage_collect_values=False).run(*inputs)
