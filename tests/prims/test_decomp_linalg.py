"""Products that are no library call, and the library calls that stay."""

from __future__ import annotations

import math

import pytest
import torch
from torchlazy.prims.decompose import decompose

from tests.prims.graphs import aten_graph, check, externs, run_decomposed

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_products(dtype: torch.dtype) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    a, b = sample(7, dtype=dtype), sample(7, dtype=dtype, seed=1)
    check(aten.dot.default, a, b, **tolerance)
    check(aten.vdot.default, a, b, **tolerance)
    check(aten.outer.default, a, b[:3])
    bias = sample(7, 3, dtype=dtype, seed=2)
    check(aten.addr.default, bias, a, b[:3], **tolerance)
    check(aten.addr.default, bias, a, b[:3], beta=0.5, alpha=2, **tolerance)
    check(aten.addr.default, bias * math.nan, a, b[:3], beta=0, alpha=2, **tolerance)


def test_dot_of_integers() -> None:
    check(aten.dot.default, torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([4, 5, 6], dtype=torch.int32))


def test_a_bias_that_is_not_read_is_not_handed_over() -> None:
    bias, a, b = torch.full((5,), math.nan), sample(3, 4), sample(4, 5)
    for alpha in (1, 2.5):
        graph, inputs, expected = aten_graph(aten.addmm.default, bias, a, b, beta=0, alpha=alpha)
        assert externs(decompose(graph, strict=True)) == ["mm"]
        torch.testing.assert_close(run_decomposed(graph, inputs)[0], expected)
    arguments = (sample(2, 3, 5), sample(2, 3, 4), sample(2, 4, 5))
    graph, inputs, expected = aten_graph(aten.baddbmm.default, *arguments, beta=0, alpha=0.5)
    assert externs(decompose(graph, strict=True)) == ["bmm"]
    torch.testing.assert_close(run_decomposed(graph, inputs)[0], expected)


def test_products_with_bias_stay_one_call() -> None:
    graph, inputs, expected = aten_graph(aten.addmm.default, sample(5), sample(3, 4), sample(4, 5))
    assert externs(decompose(graph, strict=True)) == ["addmm"]
    torch.testing.assert_close(run_decomposed(graph, inputs, allow_extern=True)[0], expected)
    batched = (sample(3, 5), sample(2, 3, 4), sample(2, 4, 5))
    for beta, alpha in ((1, 1), (0.5, 2)):
        graph, inputs, expected = aten_graph(aten.addbmm.default, *batched, beta=beta, alpha=alpha)
        assert externs(decompose(graph, strict=True)) == ["addmm"]
        actual = run_decomposed(graph, inputs, allow_extern=True)[0]
        torch.testing.assert_close(actual, expected)


def test_trace_and_cross() -> None:
    for dtype in (torch.float32, torch.int32, torch.float64):
        for shape in ((4, 4), (3, 5), (5, 2)):
            check(aten.trace.default, (torch.randn(shape) * 9).to(dtype))
    x, y = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    check(aten.linalg_cross.default, x, y, dim=1)
    check(aten.linalg_cross.default, x.transpose(1, 2), y.transpose(1, 2))
    check(aten.linalg_cross.default, x, y[:1], dim=-2)
    check(aten.linalg_cross.default, (x * 9).long(), (y * 9).long(), dim=1)


def test_convolution_as_its_own_primitive() -> None:
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    graph, _, _ = aten_graph(aten._convolution.default, x, weight, None, *geometry, False, False, True, True)
    assert externs(decompose(graph, strict=True)) == ["convolution"]


def test_affine_grids() -> None:
    for align_corners in (False, True):
        for dtype in (torch.float32, torch.float64):
            theta = torch.randn(2, 2, 3, dtype=dtype)
            near = {"rtol": 1e-5, "atol": 1e-6}
            check(aten.affine_grid_generator.default, theta, [2, 3, 4, 5], align_corners, **near)
            check(aten.affine_grid_generator.default, theta, [2, 3, 1, 5], align_corners, **near)
            theta = torch.randn(2, 3, 4, dtype=dtype)
            check(aten.affine_grid_generator.default, theta, [2, 3, 4, 5, 2], align_corners, **near)
