"""Metadata rules of the primitives that generated code computes: against their eager references, and on symbols."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torchlazy.prims import ops
from torchlazy.prims.errors import MetaError
from torchlazy.prims.meta import TensorMeta, contiguous_strides, meta_of

GENERATED = {name: prim for name, prim in ops.PRIMS.items() if prim.overload is None}
N, M = sympy.symbols("n m", positive=True, integer=True)
SIZES = {N: 6, M: 4}
f32, i64 = torch.float32, torch.int64

Call = tuple[list[tuple[tuple[Any, ...], torch.dtype]], dict[str, Any]]  # operands as (shape, dtype), attributes

SHAPED: dict[str, Call] = {
    "where": ([((N, M), torch.bool), ((N, M), f32), ((N, M), f32)], {}),
    "checked": ([((N, M), f32), ((N, M), torch.bool)], {"message": "wrong"}),
    "convert": ([((N, M), f32)], {"dtype": torch.bfloat16}),
    "bitcast": ([((N, M), f32)], {"dtype": torch.int32}),
    "full": ([], {"shape": (N, M * 2), "value": 1.5, "dtype": f32, "device": "cpu"}),
    "iota": ([], {"length": N * M, "start": 0, "step": 2, "dtype": i64, "device": "cpu"}),
    "random_bits": ([], {"shape": (N, M), "seed": 3, "stream": 1, "device": "cpu"}),
    "reshape": ([((N, M), f32)], {"shape": (M, N)}),
    "permute": ([((N, M, 2), f32)], {"dims": (2, 0, 1)}),
    "expand": ([((N, 1, M), f32)], {"shape": (N, 3, M)}),
    "slice": ([((N, M), f32)], {"starts": (1, 0), "stops": (N, M), "steps": (2, 1)}),
    "flip": ([((N, M), f32)], {"axes": (1,)}),
    "pad": ([((N, M), f32)], {"low": (1, 0), "high": (0, N), "value": 0.0}),
    "cat": ([((N, M), f32), ((3, M), f32), ((N, M), f32)], {"axis": 0}),
    "as_strided": ([((N, M), f32)], {"shape": (N - 1, M), "strides": (M, 1), "offset": M}),
    "as_strided_scatter": (
        [((N, M), f32), ((N - 1, M), f32)],
        {"shape": (N - 1, M), "strides": (M, 1), "offset": M},
    ),
    "slice_scatter": ([((N, M), f32), ((N - 1, M), f32)], {"starts": (1, 0), "stops": (N, M), "steps": (1, 1)}),
    "gather": ([((N, M), f32), ((2, M), i64)], {"axis": 0}),
    "index": ([((2, N, M), f32), ((3, M), i64), ((3, M), i64)], {"dims": (0, 1)}),
}
REDUCTIONS = ("sum", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "welford", "logsumexp")


@cache
def calls() -> dict[str, Call]:
    """One call of each primitive."""
    found = dict(SHAPED)
    for name in REDUCTIONS:
        dtype = torch.bool if name in ("any", "all") else f32
        found[name] = [((N, 3, M), dtype)], {"axes": (0, 1)}
    for name in ("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right"):
        found[name] = [((N, M), i64)] * (GENERATED[name].operands or 0), {}
    for name, prim in GENERATED.items():
        if name not in found:
            found[name] = [((N, M), f32)] * (prim.operands or 0), {}
    return found


def at(value: Any) -> Any:
    """Numbers for the symbols."""
    if isinstance(value, sympy.Expr):
        return int(value.subs(SIZES))
    return tuple(map(at, value)) if isinstance(value, tuple) else value


def numbers(attrs: dict[str, Any]) -> dict[str, Any]:
    return {name: at(value) for name, value in attrs.items()}


def operand(shape: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(at(shape)) + 0.1).to(dtype)


def parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_every_primitive_is_called() -> None:
    assert set(calls()) == set(GENERATED)
    assert all(prim.operands for name, prim in GENERATED.items() if name not in (*SHAPED, *REDUCTIONS))


@pytest.mark.parametrize("name", GENERATED)
def test_metadata_is_the_references(name: str) -> None:
    operands, attrs = calls()[name]
    tensors = [operand(*each) for each in operands]
    metas = parts(GENERATED[name].meta(*map(meta_of, tensors), **numbers(attrs)))
    results = parts(GENERATED[name](*tensors, **numbers(attrs)))
    for meta, result in zip(metas, results, strict=True):
        assert (meta.shape, meta.dtype) == (tuple(result.shape), result.dtype)
        assert meta.strides == contiguous_strides(meta.shape) and meta.device == "cpu"


@pytest.mark.parametrize("name", GENERATED)
def test_metadata_on_symbols(name: str) -> None:
    operands, attrs = calls()[name]
    symbolic = [TensorMeta(shape, dtype, contiguous_strides(shape)) for shape, dtype in operands]
    concrete = [TensorMeta(at(x.shape), x.dtype, at(x.strides)) for x in symbolic]
    have = parts(GENERATED[name].meta(*symbolic, **attrs))
    want = parts(GENERATED[name].meta(*concrete, **numbers(attrs)))
    for one, other in zip(have, want, strict=True):
        assert (at(one.shape), at(one.strides), one.dtype) == (other.shape, other.strides, other.dtype)


@pytest.mark.parametrize("name", ("add", "where", "atan2", "bitwise_and", "eq"))
def test_nothing_broadcasts_or_promotes(name: str) -> None:
    """The error names both operands and the remedy."""
    operands, _ = calls()[name]
    metas = [TensorMeta(shape, dtype, contiguous_strides(shape)) for shape, dtype in operands]
    narrow = TensorMeta((1, M), metas[-1].dtype, (M, 1))
    with pytest.raises(MetaError, match="broadcast"):
        GENERATED[name].meta(*metas[:-1], narrow)
    other = TensorMeta(metas[-1].shape, torch.int16, metas[-1].strides)
    with pytest.raises(MetaError, match="convert"):
        GENERATED[name].meta(*metas[:-1], other)
