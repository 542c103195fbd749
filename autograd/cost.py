"""What a value costs to hold and to compute again, from metadata alone.

Costs are in bytes of memory traffic: arithmetic counts as the bytes that memory would have moved in the same time, so
that the price of computing a value again and the price of storing and loading it can be compared.

Invariant: everything here is a pure function of one node (its target, attributes and its operands' metadata).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import fx
from torchlazy.prims.meta import Dim, ScalarMeta, TensorMeta, product
from torchlazy.prims.ops import Kind, Prim
from torchlazy.prims.passes.graph_passes import MEMORY_DTYPE
from torchlazy.prims.size_int import hint

SYMBOL_HINT = 64
"""What an unknown size counts as: sizes that vary are mostly batches and lengths; only ratios matter."""

WORK_PER_BYTE = {"cuda": 10, "cpu": 3}
"""Scalar operations that a fused kernel does in the time in which memory moves a byte.

cuda, H200: 33 T float32 operations/s (not counting an FMA twice) against 4.1 TB/s is 8; a kernel that waits for memory
has idle slots, so 10. cpu: one core with 8 lanes and two ports at 3 GHz does 48 G/s against some 12 GB/s, less what
loads and stores take of the ports: 3.
"""

HEAVY_WORK = 15
MEDIUM_WORK = 4
RANDOM_WORK = 60
"""Operations, in additions, of a transcendental (polynomial of degree 5-7, range reduction), of a division or root, and
of one word of Philox (ten rounds of two wide multiplications): the scale that lowering uses for its own decisions."""

FLOPS_PER_BYTE = {
    ("cuda", torch.bfloat16): 190,  # H200: 790 TFLOP/s measured on large products / 4.1 TB/s
    ("cuda", torch.float16): 190,
    ("cuda", torch.float32): 15,  # 60 TFLOP/s without tf32, torch's default
    ("cuda", torch.float64): 15,  # 60 TFLOP/s on its tensor cores
    ("cpu", torch.float32): 8,  # 100 GFLOP/s of two AVX2 cores / 12 GB/s
    ("cpu", torch.float64): 4,
}
DEFAULT_FLOPS_PER_BYTE = 4
"""Floating-point operations of a library product in the time of a byte; unlisted dtypes run far from their peak."""

_HEAVY = frozenset((
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
    "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "pow", "atan2", "hypot", "nextafter",
    "remainder", "fmod", "floor_div",
))  # fmt: skip
_MEDIUM = frozenset(("div", "reciprocal", "sqrt", "rsqrt", "trunc_div"))
_ALIASES = frozenset(("reshape", "permute", "expand", "slice"))


class Recompute(Enum):
    """How a value can be had a second time."""

    GIVEN = "an input"
    VIEW = "a view of another value"
    CONSTANT = "a constant"
    FUSED = "computed inside the kernel that reads it"
    INDEXED = "read at computed positions from a value in memory"
    PASS = "a reduction: a pass over its operand"
    PRODUCT = "a library call whose operations are counted"
    NEVER = "a library call that is not repeated"


def recompute_kind(node: fx.Node) -> Recompute:
    """How `node`'s value can be had a second time. A part of a result is had with the whole."""
    if node.op == "placeholder":
        return Recompute.GIVEN
    if node.target is operator.getitem:
        return recompute_kind(_operand(node))
    prim = node.target
    if not isinstance(prim, Prim):
        return Recompute.NEVER
    if prim.overload is not None:
        return Recompute.NEVER if has_effect(node) or _count_of(prim) is None else Recompute.PRODUCT
    return _kind_of(prim)


@cache
def _kind_of(prim: Prim) -> Recompute:
    """The same of every call of a primitive that generated code computes."""
    if prim.is_kind(Kind.REDUCTION):
        return Recompute.PASS
    if prim.is_kind(Kind.CREATION):
        return Recompute.CONSTANT
    if prim.is_kind(Kind.INDEXING) or prim.name in ("as_strided", "as_strided_scatter"):
        return Recompute.INDEXED
    return Recompute.VIEW if prim.name in _ALIASES else Recompute.FUSED


def is_alias(node: fx.Node) -> bool:
    """Whether the node is a view that takes no memory of its own where its operand is in memory."""
    return isinstance(node.target, Prim) and node.target.name in _ALIASES


def storage_of(node: fx.Node) -> fx.Node:
    """The node whose memory holds `node`'s elements, were every value stored: the base of views."""
    while is_alias(node):
        node = _operand(node)
    return node


def has_effect(node: fx.Node) -> bool:
    """Whether calling the operator twice is not like calling it once: collectives, and draws from a generator."""
    prim = node.target
    if not isinstance(prim, Prim) or prim.overload is None:
        return False
    if prim.is_kind(Kind.COLLECTIVE):
        return True
    return prim.is_kind(Kind.RANDOM) and argument(node, "dropout_p") != 0.0


def argument(node: fx.Node, name: str) -> Any:
    """The extern call's argument of that name, or its schema's default; None where it has no such argument."""
    prim = node.target
    assert isinstance(prim, Prim) and prim.overload is not None, f"{node} is no extern call"
    if name in node.kwargs:
        return node.kwargs[name]
    for position, formal in enumerate(prim.overload._schema.arguments):
        if formal.name == name:
            return node.args[position] if position < len(node.args) else formal.default_value
    return None


# --- sizes ---


def concrete(dim: Dim) -> int:
    """A size as a number; a tracked one as its hint, each SymPy symbol as SYMBOL_HINT."""
    if isinstance(dim, int):
        return int(hint(dim))
    return int(dim.subs({symbol: SYMBOL_HINT for symbol in dim.free_symbols}))


def numel_of(node: fx.Node) -> int:
    """How many elements the value has; of several results, all."""
    return sum(concrete(product(meta.shape)) for meta in _tensors(node.meta.get("val")))


def bytes_of(node: fx.Node) -> int:
    """Bytes of the value, stored without gaps, as the half that it may be stored in where a pass said so; of several
    results, all; 0 for a runtime scalar."""
    stored = node.meta.get(MEMORY_DTYPE)
    metas = _tensors(node.meta.get("val"))
    return sum(concrete(product(meta.shape)) * (stored or meta.dtype).itemsize for meta in metas)


def _tensors(value: Any) -> list[TensorMeta]:
    if isinstance(value, TensorMeta):
        return [value]
    if isinstance(value, tuple):
        return [meta for item in value for meta in _tensors(item)]
    assert value is None or isinstance(value, ScalarMeta), f"{value!r} is no metadata / verify the graph first"
    return []


def device_kind(node: fx.Node) -> str:
    """ "cuda" or "cpu": where the value is computed."""
    metas = _tensors(node.meta.get("val"))
    return "cuda" if metas and metas[0].device.startswith("cuda") else "cpu"


# --- work ---


def work_of(node: fx.Node) -> int:
    """Scalar operations, in additions, that this node adds to a kernel that computes it."""
    prim = node.target
    if not isinstance(prim, Prim) or prim.overload is not None or is_alias(node) or prim.is_kind(Kind.CREATION):
        return 0
    if prim.name == "random_bits":
        return RANDOM_WORK * numel_of(node)
    each = HEAVY_WORK if prim.name in _HEAVY else MEDIUM_WORK if prim.name in _MEDIUM else 1
    return each * numel_of(node)


def work_in_bytes(node: fx.Node, work: int) -> int:
    """The bytes that memory moves on the node's device while `work` operations are done."""
    return work // WORK_PER_BYTE[device_kind(node)]


def product_in_bytes(node: fx.Node) -> int:
    """The time of a library product as bytes: its operations or its traffic, whichever takes longer."""
    count = flops(node)
    assert count is not None, f"{node} has no known number of operations"
    first = _tensors(node.meta["val"])[0]
    per_byte = FLOPS_PER_BYTE.get((device_kind(node), first.dtype), DEFAULT_FLOPS_PER_BYTE)
    traffic = bytes_of(node) + sum(bytes_of(operand) for operand in node.all_input_nodes)
    return max(count // per_byte, traffic)


def flops(node: fx.Node) -> int | None:
    """Floating-point operations of a library product (two a multiply-add); None for any other library call."""
    prim = node.target
    count = _count_of(prim) if isinstance(prim, Prim) else None
    return None if count is None else count(node)


@cache
def _count_of(prim: Prim) -> Callable[[fx.Node], int] | None:
    if prim.overload is None or prim.overload.namespace != "aten":
        return None
    return _FLOPS.get(prim.overload._schema.name.removeprefix("aten::"))


def _sizes(value: Any) -> tuple[int, ...]:
    assert isinstance(value, fx.Node), f"{value!r} is no tensor"
    return tuple(concrete(size) for size in value.meta["val"].shape)


def _matrix_product(left: int) -> Callable[[fx.Node], int]:
    """Twice the result's size times the inner one, the last of operand `left`."""
    return lambda node: 2 * numel_of(node) * _sizes(node.args[left])[-1]


def _convolution(node: fx.Node) -> int:
    """Each element of the result (transposed: of the input) meets one filter of the weight."""
    weight = _sizes(argument(node, "weight"))
    if argument(node, "transposed"):
        met = numel_of(argument(node, "input"))
    else:
        met = numel_of(node)
    taps = 1
    for size in weight[1:]:
        taps *= size
    return 2 * met * taps


def _attention(node: fx.Node) -> int:
    """Scores and their product with the values; half of both where the mask is causal."""
    *rows, length, width = _sizes(argument(node, "query"))
    keys, value = _sizes(argument(node, "key"))[-2], _sizes(argument(node, "value"))[-1]
    count = 2 * length * keys * (width + value)
    for size in rows:
        count *= size
    return count // 2 if argument(node, "is_causal") is True else count


_FLOPS: dict[str, Callable[[fx.Node], int]] = {
    "mm": _matrix_product(0),
    "bmm": _matrix_product(0),
    "mv": _matrix_product(0),
    "dot": _matrix_product(0),
    "linear": _matrix_product(0),
    "addmm": _matrix_product(1),
    "baddbmm": _matrix_product(1),
    "addmv": _matrix_product(1),
    "convolution": _convolution,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
}


def _operand(node: fx.Node) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node), f"{node} has no operand / verify the graph first"
    return operand
