"""Arithmetic and memory traffic of one recorded operator, from the shapes of its operands and results.

Invariant: formulas only multiply and add sizes, so they hold for numbers and for symbols alike; they read no data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import sympy
import torch

Size: TypeAlias = "int | sympy.Expr"
Kind = Literal["product", "pointwise", "movement", "view", "other"]


@dataclass(frozen=True)
class Operand:
    """A tensor as the formulas see it. `numel` counts the elements that memory holds: an expanded one counts once."""

    shape: tuple[Size, ...]
    numel: Size
    itemsize: int
    numel_now: int  # at the sizes of the call itself

    @property
    def bytes(self) -> Size:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Call:
    """One recorded operator: Operands where its arguments and results have tensors (lists of them too)."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]

    def argument(self, name: str, position: int) -> Any:
        """An argument by name, wherever it was given; None if it was not."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name)

    @property
    def operands(self) -> list[Operand]:
        return [*_operands(self.args), *_operands(tuple(self.kwargs.values()))]

    @property
    def results(self) -> list[Operand]:
        return list(_operands(self.outputs))


def _operands(values: Sequence[Any]) -> list[Operand]:
    found = []
    for value in values:
        if isinstance(value, Operand):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _operands(value)
    return found


def _volume(shape: Sequence[Size]) -> Size:
    total: Size = 1
    for size in shape:
        total = total * size
    return total


# ---------------------------------------------------------------- products: 2 for each multiplication with its sum


def _matrices(first: int) -> Callable[[Call], Size]:
    """(..., m, k) times (..., k, n), the operands at `first` and after it."""

    def flops(call: Call) -> Size:
        a, b = call.args[first], call.args[first + 1]
        return 2 * _volume(a.shape) * b.shape[-1]

    return flops


def _vectors(first: int) -> Callable[[Call], Size]:
    """A matrix (or vector) times a vector."""

    def flops(call: Call) -> Size:
        return 2 * _volume(call.args[first].shape)

    return flops


def _grouped(call: Call) -> Size:
    """Rows (m, k), or groups of them, times a matrix for each group."""
    a, b = call.args[0], call.args[1]
    if len(a.shape) == 2 and len(b.shape) == 2:
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    return 2 * _volume(a.shape) * b.shape[-1]


def _convolution_of(positions: Operand, weight: Operand) -> Size:
    """Each position (of the result, or of the input if transposed) meets the kernel once."""
    return 2 * _volume(positions.shape) * weight.shape[1] * _volume(weight.shape[2:])


def _convolution(call: Call) -> Size:
    transposed = call.argument("transposed", 6)
    return _convolution_of(call.args[0] if transposed else call.outputs[0], call.args[1])


def _convolution_backward(call: Call) -> Size:
    """One convolution for the gradient of the input, one for the kernel's."""
    grad, x, weight = call.args[:3]
    mask = call.argument("output_mask", 10) or (True, True, True)
    once = _convolution_of(x if call.argument("transposed", 7) else grad, weight)
    return once * (bool(mask[0]) + bool(mask[1]))


def _attention_sizes(q: Operand, k: Operand, v: Operand) -> tuple[Size, Size]:
    """Multiplications of queries with keys, and of weights with values."""
    pairs = _volume(q.shape[:-1]) * k.shape[-2]
    return pairs * q.shape[-1], pairs * v.shape[-1]


def _attention(call: Call) -> Size:
    scores, values = _attention_sizes(*call.args[:3])
    return 2 * (scores + values)


def _attention_backward(call: Call) -> Size:
    """The scores again, then the gradients of values, weights, queries and keys."""
    scores, values = _attention_sizes(*call.args[1:4])
    return 2 * (3 * scores + 2 * values)


def _recurrent(call: Call) -> Size:
    """A recurrent layer in one direction: each input and each hidden state meets its matrix once."""
    x, of_inputs, of_states = call.args[:3]
    return 2 * _volume(x.shape[:2]) * (_volume(of_inputs.shape) + _volume(of_states.shape))


def _recurrent_backward(call: Call) -> Size:
    """Once for the gradients of inputs and states, once for those of the matrices."""
    return 2 * _recurrent(call)


PRODUCTS: dict[str, Callable[[Call], Size]] = {
    "aten::mm": _matrices(0),
    "aten::bmm": _matrices(0),
    "aten::addmm": _matrices(1),
    "aten::baddbmm": _matrices(1),
    "aten::addbmm": _matrices(1),
    "aten::_addmm_activation": _matrices(1),
    "aten::_grouped_mm": _grouped,
    "aten::mv": _vectors(0),
    "aten::addmv": _vectors(1),
    "aten::dot": _vectors(0),
    "aten::vdot": _vectors(0),
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent_backward,
    **{
        f"aten::_scaled_dot_product_{kind}": _attention
        for kind in (
            "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention", "attention_math",
        )
    },
    **{
        f"aten::_scaled_dot_product_{kind}_backward": _attention_backward
        for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    },
}  # fmt: skip

_MOVEMENT = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy", "copy", "clone", "contiguous", "cat", "stack", "repeat", "flip", "roll", "constant_pad_nd", "index",
        "index_select", "gather", "embedding", "scatter", "index_put", "_unsafe_index", "_unsafe_index_put",
        "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "empty", "empty_like",
        "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "zeros", "zeros_like", "ones",
        "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full", "fill", "zero", "arange",
        "scalar_tensor", "eye", "_unsafe_view", "_reshape_copy", "view_copy", "masked_fill", "tril", "triu",
        "_foreach_copy", "_foreach_zero", "unfold_copy", "pixel_shuffle", "expand_copy", "sort", "lift_fresh_copy",
    )
)  # fmt: skip


def kind_of(op: torch._ops.OpOverload) -> Kind:
    """What an operator is for the count."""
    name = op._schema.name
    if name in PRODUCTS:
        return "product"
    if op.is_view:
        return "view"
    if name in _MOVEMENT or op.namespace == "torchlazy":
        return "movement"
    if torch.Tag.pointwise in op.tags or name.startswith("aten::_foreach_"):
        return "pointwise"
    return "other"


def flops_of(call: Call) -> Size:
    """Floating point operations of one call; see `torchlazy.flops` for what is counted."""
    kind = kind_of(call.op)
    if kind == "product":
        return PRODUCTS[call.op._schema.name](call)
    if kind in ("view", "movement"):
        return 0
    if kind == "pointwise":
        return sum((_volume(result.shape) for result in call.results), start=0)
    largest = max((*call.operands, *call.results), key=lambda operand: operand.numel_now, default=None)
    return 0 if largest is None else largest.numel


def bytes_of(call: Call) -> Size:
    """Bytes of memory that a call by itself reads and writes; none for a view."""
    if kind_of(call.op) == "view":
        return 0
    return sum((operand.bytes for operand in (*call.operands, *call.results)), start=0)


def window_sizes(call: Call) -> list[tuple[int, int, int]]:
    """(stride, extent, padding) of each window that slides over a dimension: result = (size + padding - extent) //
    stride + 1. Extents are those of dilated kernels, paddings both sides, plus stride - 1 where lengths are rounded up.
    """
    name = call.op._schema.name
    if name in ("aten::convolution", "aten::_convolution") and not call.argument("transposed", 6):
        kernel = [size for size in call.args[1].shape[2:] if isinstance(size, (int, sympy.Integer))]
        strides, paddings, dilations = (
            call.argument(n, p) for n, p in (("stride", 3), ("padding", 4), ("dilation", 5))
        )
        return [
            (s, d * (int(k) - 1) + 1, 2 * p)
            for k, s, p, d in zip(kernel, *(_each(v, len(kernel)) for v in (strides, paddings, dilations)), strict=True)
        ]
    if "pool" in name and "adaptive" not in name and "backward" not in name:
        kernel = call.argument("kernel_size", 1)
        rank = len(kernel) if isinstance(kernel, (tuple, list)) else 1
        strides = call.argument("stride", 2) or kernel
        paddings = call.argument("padding", 3) or 0
        is_max = "max" in name
        dilations = (call.argument("dilation", 4) if is_max else 1) or 1
        rounds_up = call.argument("ceil_mode", 5 if is_max else 4) or False
        parts = (_each(v, rank) for v in (kernel, strides, paddings, dilations))
        return [(s, d * (k - 1) + 1, 2 * p + (s - 1 if rounds_up else 0)) for k, s, p, d in zip(*parts, strict=True)]
    return []


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """An int, or a list of one int or of `rank` ints, as `rank` ints."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values if len(values) == rank else values * rank if len(values) == 1 else values[:rank]


def evaluate(expression: Size, values: dict[sympy.Symbol, int]) -> int:
    """The expression as an int for these values; ArithmeticError if it is no whole number there."""
    found = sympy.sympify(expression).subs(values)
    if not found.is_Integer:
        raise ArithmeticError(f"{expression} is {found} for {values}: no whole number")
    return int(found)


def numel_now(shape: Sequence[int]) -> int:
    return math.prod(shape)
