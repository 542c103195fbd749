"""Arithmetic and memory traffic of one recorded operator, from the shapes of its operands and results.

Invariant: rules only multiply and add sizes, so they hold for numbers and for formulas alike; they read no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import sympy
import torch

Size: TypeAlias = "int | sympy.Expr"
Kind = Literal["product", "pointwise", "movement", "view", "other"]


@dataclass(frozen=True)
class Operand:
    """A tensor as the rules see it. `numel` counts the elements that memory holds: an expanded one counts once."""

    shape: tuple[Size, ...]
    numel: Size
    itemsize: int
    numel_now: int  # at the sizes of the call itself


@dataclass(frozen=True)
class Call:
    """One recorded operator: Operands where its arguments and results have tensors (lists of them too)."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]

    def argument(self, name: str) -> Any:
        """An argument by name, wherever it was given; None if it was not."""
        names = (argument.name for argument in self.op._schema.arguments)
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}.get(name)


def tensors_in(value: Any) -> list[Operand]:
    if isinstance(value, (tuple, list)):
        return [operand for item in value for operand in tensors_in(item)]
    return [value] if isinstance(value, Operand) else []


def _volume(shape: Sequence[Size]) -> Size:
    total: Size = 1
    for size in shape:
        total = total * size
    return total


# ---------------------------------------------------------------- products: 2 for each multiplication with its sum


def _matrices(call: Call) -> Size:
    """(..., m, k) times (..., k, n) or (k), or groups of them; operators that add to a product have the sum first."""
    first = int("add" in call.op._schema.name)
    a, b = call.args[first : first + 2]
    return 2 * _volume(a.shape) * (b.shape[-1] if len(b.shape) > 1 else 1)


def _convolution(call: Call) -> Size:
    """Each position (of the result, or of the input if transposed) meets the kernel once."""
    return _meetings(call.args[0] if call.argument("transposed") else call.outputs[0], call.args[1])


def _convolution_backward(call: Call) -> Size:
    """One convolution for the gradient of the input, one for the kernel's."""
    grad, x, weight = call.args[:3]
    mask = call.argument("output_mask") or (True, True)
    return _meetings(x if call.argument("transposed") else grad, weight) * (bool(mask[0]) + bool(mask[1]))


def _meetings(positions: Operand, weight: Operand) -> Size:
    return 2 * _volume(positions.shape) * weight.shape[1] * _volume(weight.shape[2:])


def _attention(first: int, scores: int, values: int) -> Callable[[Call], Size]:
    """So many products of queries with keys, and of weights with values; the queries are the argument `first`."""

    def flops(call: Call) -> Size:
        q, k, v = call.args[first : first + 3]
        return 2 * _volume(q.shape[:-1]) * k.shape[-2] * (scores * q.shape[-1] + values * v.shape[-1])

    return flops


def _recurrent(times: int) -> Callable[[Call], Size]:
    """A recurrent layer in one direction: each input and each hidden state meets its matrix once; backward, once for
    the gradients of inputs and states and once for those of the matrices."""

    def flops(call: Call) -> Size:
        x, of_inputs, of_states = call.args[:3]
        return 2 * times * _volume(x.shape[:2]) * (_volume(of_inputs.shape) + _volume(of_states.shape))

    return flops


_MATRICES = (
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "_addmm_activation", "_grouped_mm", "mv", "addmv", "dot", "vdot",
)  # fmt: skip
_FUSED_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
PRODUCTS: dict[str, Callable[[Call], Size]] = {
    **dict.fromkeys(_MATRICES, _matrices),
    **dict.fromkeys(("convolution", "_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _recurrent(1),
    "mkldnn_rnn_layer_backward": _recurrent(2),
    **{f"_scaled_dot_product_{kind}": _attention(0, 1, 1) for kind in (*_FUSED_ATTENTION, "attention_math")},
    **{f"_scaled_dot_product_{kind}_backward": _attention(1, 3, 2) for kind in _FUSED_ATTENTION},
}
_MOVEMENT = frozenset(
    (
        "_to_copy", "copy", "clone", "contiguous", "cat", "stack", "repeat", "flip", "roll", "constant_pad_nd",
        "index", "index_select", "gather", "embedding", "scatter", "index_put", "_unsafe_index", "_unsafe_index_put",
        "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "empty", "empty_like",
        "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "zeros", "zeros_like", "ones",
        "ones_like", "full", "full_like", "new_zeros", "new_ones", "new_full", "fill", "zero", "arange",
        "scalar_tensor", "eye", "_unsafe_view", "_reshape_copy", "view_copy", "masked_fill", "tril", "triu",
        "_foreach_copy", "_foreach_zero", "unfold_copy", "pixel_shuffle", "expand_copy", "sort", "lift_fresh_copy",
    )
)  # fmt: skip


def _aten_name(op: torch._ops.OpOverload) -> str:
    """Empty for an operator of another library."""
    space, _, name = op._schema.name.partition("::")
    return name if space == "aten" else ""


def kind_of(op: torch._ops.OpOverload) -> Kind:
    """What an operator is for the count."""
    name = _aten_name(op)
    if name in PRODUCTS:
        return "product"
    if op.is_view:
        return "view"
    if name in _MOVEMENT or op.namespace == "torchlazy":
        return "movement"
    return "pointwise" if torch.Tag.pointwise in op.tags or name.startswith("_foreach_") else "other"


def work_of(call: Call) -> tuple[Size, Size]:
    """Floating point operations of one call (`torchlazy.flops` says what counts), and bytes it reads and writes."""
    kind = kind_of(call.op)
    if kind == "view":
        return 0, 0
    results = tensors_in(call.outputs)
    tensors = [*tensors_in(call.args), *tensors_in(tuple(call.kwargs.values())), *results]
    flops: Size = 0
    if kind == "product":
        flops = PRODUCTS[_aten_name(call.op)](call)
    elif kind == "pointwise":
        flops = sum((_volume(result.shape) for result in results), start=0)
    elif kind == "other" and tensors:
        flops = max(tensors, key=lambda tensor: tensor.numel_now).numel
    return flops, sum((tensor.numel * tensor.itemsize for tensor in tensors), start=0)


def window_sizes(call: Call) -> list[tuple[int, int, int]]:
    """(stride, extent, padding) of each window that slides over a dimension: result = (size + padding - extent) //
    stride + 1. Extents are those of dilated kernels, paddings both sides, plus stride - 1 where lengths are rounded up.
    """
    name = _aten_name(call.op)
    if name in ("convolution", "_convolution") and not call.argument("transposed"):
        kernel = [int(size) for size in call.args[1].shape[2:] if isinstance(size, (int, sympy.Integer))]
    elif "pool" in name and "adaptive" not in name and "backward" not in name:
        kernel = call.argument("kernel_size")
    else:
        return []
    if kernel is None:
        return []
    given = (kernel, call.argument("stride") or kernel, call.argument("padding") or 0, call.argument("dilation") or 1)
    lists = [tuple(v) if isinstance(v, (tuple, list)) else (v,) for v in given]
    parts = [v * len(lists[0]) if len(v) == 1 else v for v in lists]
    up = bool(call.argument("ceil_mode"))
    return [(s, d * (k - 1) + 1, 2 * p + (s - 1 if up else 0)) for k, s, p, d in zip(*parts, strict=False)]


def evaluate(expression: Size, values: dict[sympy.Symbol, int]) -> int:
    """The expression as an int for these values; ArithmeticError if it is no whole number there."""
    found = sympy.sympify(expression).subs(values)
    if not found.is_Integer:
        raise ArithmeticError(f"{expression} is {found} for {values}: no whole number")
    return int(found)
