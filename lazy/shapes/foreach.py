"""Shape rules of `_foreach_*`: one element's rule, applied once for each distinct combination of geometries.

Invariant: sure only where all tensors of a position are row-major, of one shape and one dtype. Then both of ATen's
implementations (a kernel over the lists, or one operator after the other) give the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchlazy.lazy.shapes.pointwise import FLOATS
from torchlazy.lazy.shapes.registry import Result, is_plain, plain, rule
from torchlazy.lazy.trace.geometry import Geometry

Results = tuple[Result, ...]
_NUMBERS = (int, float)


def _elements(*lists: Sequence[Geometry], check: Callable[[Geometry], bool] | None = None) -> Results | None:
    """Each position's result: a new tensor like those in the lists."""
    first = lists[0]
    if not first or any(len(other) != len(first) for other in lists):
        return None
    dtype = first[0].dtype
    if dtype not in FLOATS:
        return None
    known: dict[int, Result] = {}  # geometries are interned: their identity is their value
    found = []
    for position, geom in enumerate(first):
        result = known.get(id(geom))
        if result is None:
            if geom.dtype is not dtype or not is_plain(geom):
                return None
            result = known[id(geom)] = plain(geom.shape, dtype)
        for other in lists[1:]:
            twin = other[position]
            if twin is not geom and (twin.shape != geom.shape or twin.dtype is not dtype or not is_plain(twin)):
                return None
        found.append(result)
    return tuple(found)


def _are_numbers(scalars: Any, count: int) -> bool:
    return len(scalars) == count and all(type(value) in _NUMBERS for value in scalars)


@rule(
    "_foreach_sqrt", "_foreach_rsqrt", "_foreach_reciprocal", "_foreach_neg", "_foreach_abs", "_foreach_exp",
    "_foreach_log", "_foreach_tanh", "_foreach_sigmoid", "_foreach_sign", "_foreach_zero",
)  # fmt: skip
def _unary(tensors: list[Geometry]) -> Results | None:
    return _elements(tensors)


@rule(
    "_foreach_add.Scalar", "_foreach_sub.Scalar", "_foreach_mul.Scalar", "_foreach_div.Scalar",
    "_foreach_clamp_min.Scalar", "_foreach_clamp_max.Scalar", "_foreach_maximum.Scalar", "_foreach_minimum.Scalar",
    "_foreach_pow.Scalar",
)  # fmt: skip
def _with_number(tensors: list[Geometry], number: Any) -> Results | None:
    return _elements(tensors) if type(number) in _NUMBERS else None


@rule(
    "_foreach_add.ScalarList", "_foreach_sub.ScalarList", "_foreach_mul.ScalarList", "_foreach_div.ScalarList",
    "_foreach_pow.ScalarList",
)  # fmt: skip
def _with_numbers(tensors: list[Geometry], numbers: Sequence[Any]) -> Results | None:
    return _elements(tensors) if _are_numbers(numbers, len(tensors)) else None


@rule("_foreach_add.List", "_foreach_sub.List")
def _sum(tensors: list[Geometry], others: list[Geometry], *, alpha: Any = 1) -> Results | None:
    return _elements(tensors, others) if type(alpha) in _NUMBERS else None


@rule("_foreach_mul.List", "_foreach_div.List", "_foreach_maximum.List", "_foreach_minimum.List")
def _pairs(tensors: list[Geometry], others: list[Geometry]) -> Results | None:
    return _elements(tensors, others)


@rule("_foreach_mul.Tensor", "_foreach_div.Tensor")
def _with_tensor(tensors: list[Geometry], other: Geometry) -> Results | None:
    """One number for all of them, in a 0-dim tensor, as in gradient clipping."""
    found = _elements(tensors)
    return found if found and not other.shape and other.dtype is found[0].dtype else None


@rule("_foreach_add.Tensor")
def _plus_tensor(tensors: list[Geometry], other: Geometry, *, alpha: Any = 1) -> Results | None:
    return _with_tensor(tensors, other) if type(alpha) in _NUMBERS else None


@rule("_foreach_addcmul.Scalar", "_foreach_addcdiv.Scalar")
def _added(a: list[Geometry], b: list[Geometry], c: list[Geometry], value: Any = 1) -> Results | None:
    return _elements(a, b, c) if type(value) in _NUMBERS else None


@rule("_foreach_addcmul.ScalarList", "_foreach_addcdiv.ScalarList")
def _added_by(a: list[Geometry], b: list[Geometry], c: list[Geometry], values: Sequence[Any]) -> Results | None:
    return _elements(a, b, c) if _are_numbers(values, len(a)) else None


@rule("_foreach_lerp.Scalar")
def _between(a: list[Geometry], b: list[Geometry], weight: Any) -> Results | None:
    return _elements(a, b) if type(weight) in _NUMBERS else None


@rule("_foreach_norm.Scalar")
def _norm(tensors: list[Geometry], order: Any = 2, dtype: Any = None) -> Results | None:
    found = _elements(tensors)
    if found is None or type(order) not in _NUMBERS or order not in (1, 2) or dtype is not None:
        return None
    return (plain((), found[0].dtype),) * len(found)
