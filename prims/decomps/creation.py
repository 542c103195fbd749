"""Rules of operators that make tensors from numbers.

Invariant: shape, dtype and device are those of the ATen result; strides are stamped on by the driver, so every `*_like`
keeps its operand's layout. Memory that ATen leaves uninitialised is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torchlazy.prims import ops
from torchlazy.prims.builder import Builder, NotApplicable, Rule, rule
from torchlazy.prims.decomps.joins import offsets
from torchlazy.prims.promotion import compute_dtype, is_integral
from torchlazy.prims.size_int import integer_of

aten = torch.ops.aten


def constant(b: Builder, value: Any) -> fx.Node:
    """The wanted result filled with one value."""
    wanted = b.wanted
    if wanted.dtype.is_complex:
        raise NotApplicable("complex dtype")
    return b.full(wanted.shape, value, wanted.dtype, wanted.device)


def _filled(value: int) -> Rule:
    def filled(b: Builder, *_: Any, **__: Any) -> fx.Node:
        """One value everywhere"""
        return constant(b, value)

    return filled


rule(
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format,
    aten.empty_like.default, aten.empty_strided.default, "empty_permuted.default", aten.new_empty.default,
    aten.new_empty_strided.default, "_efficientzerotensor.default",
)(_filled(0))  # fmt: skip
rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)(_filled(1))


@rule(aten.full.default, aten.full_like.default)
def full(b: Builder, _: Any, value: Any, **__: Any) -> fx.Node:
    """`value` everywhere"""
    return constant(b, value)


@rule(aten.new_full.default)
def new_full(b: Builder, _: fx.Node, size: Any, value: Any, **__: Any) -> fx.Node:
    """`value` everywhere"""
    return constant(b, value)


@rule(aten.scalar_tensor.default)
def scalar_tensor(b: Builder, value: Any, **_: Any) -> fx.Node:
    """A number as a 0-dim tensor"""
    return constant(b, value)


# --- sequences ---


@rule(aten.arange.default)
def arange(b: Builder, end: Any, **_: Any) -> fx.Node:
    """0, 1, ... below end"""
    return _sequence(b, 0, 1)


@rule(aten.arange.start)
def arange_start(b: Builder, start: Any, end: Any, **_: Any) -> fx.Node:
    """start, start + 1, ... below end"""
    return _sequence(b, start, 1)


@rule(aten.arange.start_step)
def arange_start_step(b: Builder, start: Any, end: Any, step: Any = 1, **_: Any) -> fx.Node:
    """start + i * step"""
    return _sequence(b, start, step)


def _is_short_integer(value: Any) -> bool:
    is_integer = isinstance(value, int) or float(value).is_integer()
    return is_integer and -(1 << 20) < value < 1 << 20


def _sequence(b: Builder, start: Any, step: Any) -> fx.Node:
    wanted = b.wanted
    if isinstance(start, fx.Node) or isinstance(step, fx.Node) or wanted.dtype.is_complex:
        raise NotApplicable("arange of runtime scalars or complex numbers")
    dtype = wanted.dtype
    if is_integral(dtype):
        start, step = integer_of(start), integer_of(step)
    elif not all(_is_short_integer(v) for v in (start, step, step * wanted.numel)) and wanted.device == "cpu":
        dtype = torch.float64  # ATen's CPU kernel accumulates in it
    else:
        dtype = compute_dtype(dtype)
    made = b.prim(ops.iota, length=wanted.shape[0], start=start, step=step, dtype=dtype, device=wanted.device)
    return b.convert(made, wanted.dtype)


@rule(aten.linspace.default)
def linspace(b: Builder, start: Any, end: Any, steps: int, **_: Any) -> fx.Node | None:
    """start + i * step in the first half, end - (steps - 1 - i) * step in the second: both ends are exact"""
    wanted = b.wanted
    if wanted.dtype not in (torch.float32, torch.float64) or isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    if steps < 2:
        return constant(b, start)
    shape, dtype, device = wanted.shape, wanted.dtype, wanted.device
    first, last = (torch.tensor(v, dtype=dtype) for v in (start, end))
    step = ((last - first) / (steps - 1)).item()
    up = b.prim(ops.iota, length=steps, start=0, step=1, dtype=dtype, device=device)
    down = b.prim(ops.iota, length=steps, start=steps - 1, step=-1, dtype=dtype, device=device)
    from_start = b.prim(ops.add, b.full(shape, start, dtype, device), b.prim(ops.mul, up, step))
    from_end = b.prim(ops.sub, b.full(shape, end, dtype, device), b.prim(ops.mul, down, step))
    return b.prim(ops.where, b.prim(ops.lt, up, steps // 2), from_start, from_end)


@rule(aten.eye.default, aten.eye.m)
def eye(b: Builder, *_: Any, **__: Any) -> fx.Node:
    """1 where row and column are equal"""
    wanted = b.wanted
    rows, columns = wanted.shape
    return b.convert(b.prim(ops.eq, offsets(b, rows, columns, wanted.device), 0), wanted.dtype)
