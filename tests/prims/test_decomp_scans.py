"""Scans and sets: values and dtypes against ATen eager."""

from __future__ import annotations

import pytest
import torch
from torchlazy.prims.decompose import decompose

from tests.prims.graphs import aten_graph, check, externs

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("cumsum", "cumprod"))
def test_sums_and_products_up_to_each(name: str, dtype: torch.dtype) -> None:
    op = getattr(aten, name).default
    x = sample(3, 4, 5, dtype=dtype)
    for dim in (0, -1):
        check(op, x, dim)
        check(op, x.transpose(0, 2), dim)
        check(op, x, dim, dtype=torch.float32)
        check(op, x, dim, dtype=torch.int32)
    check(op, sample(dtype=dtype), 0)
    check(op, sample(0, 3, dtype=dtype), 0)
    graph, _, _ = aten_graph(op, x, 1)
    assert externs(decompose(graph, strict=True)) == [name]


def test_other_scans_are_primitives() -> None:
    x = sample(3, 4)
    x[1, 1] = float("nan")
    for name in ("cummax", "cummin", "logcumsumexp", "_logcumsumexp"):
        graph, _, _ = aten_graph(getattr(aten, name).default, x, -1)
        assert externs(decompose(graph, strict=True)) == [name.lstrip("_")]
        check(getattr(aten, name).default, x, -1, allow_extern=True)


def test_bucketize() -> None:
    boundaries = torch.tensor([0.0, 1.0, 2.5])
    for options in ({}, {"right": True}, {"out_int32": True}):
        check(aten.bucketize.Tensor, sample(3, 4), boundaries, **options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.int64, torch.uint8))
def test_isin(dtype: torch.dtype) -> None:
    x = sample(3, 4, dtype=dtype)
    for elements in (x.reshape(-1)[:3], x[:2], torch.tensor([1, 2]), torch.empty(0, dtype=dtype)):
        for invert in (False, True):
            check(aten.isin.Tensor_Tensor, x, elements, invert=invert)
    check(aten.isin.Tensor_Scalar, x, 1)
    check(aten.isin.Tensor_Scalar, x, 1, invert=True)
    check(aten.isin.Tensor_Tensor, torch.tensor([1.0, float("nan")]), torch.tensor([float("nan")]))
    graph, _, _ = aten_graph(aten.isin.Tensor_Tensor, x, torch.arange(1000))
    assert externs(decompose(graph, strict=True)) == ["extern_aten_isin_Tensor_Tensor"]
